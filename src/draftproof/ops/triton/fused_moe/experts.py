"""Stages of a mixture of experts for one row: routing, gate and up, down with the sum of the experts.

Each of them has the bits of the kernels in `moe/`. A program computes columns of one expert in gate and up,
and the same few columns of all experts in down, so that it can add them without another barrier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from draftproof.ops.triton import elementwise
from draftproof.ops.triton.attention.kv_rings import thread_barrier
from draftproof.ops.triton.fused_moe.norms import tree_sum
from draftproof.ops.triton.moe import routing
from draftproof.ops.triton.moe.routing import LOWEST, MIN_WEIGHT_SUM, SIGN_MASK, TAKEN
from draftproof.ops.triton.one_row.ring import (
    BF16,
    CHUNK,
    COLUMN,
    MMA_COLUMNS,
    PRODUCT,
    ROWS_LAYOUT,
    STAGE_ROWS,
    WEIGHT,
    copy_stage,
    lines_of,
    multiply,
    release,
    rows_of_product,
    store_first_column,
    wait_full,
)

ROUTER_COLUMNS = gl.constexpr(16)  # experts whose logits one program computes: the minimum of the tensor core
UNSET = gl.constexpr(-1)  # bits of a logit that is not stored yet: a NaN that no operation returns
INNER_WIDTH = gl.constexpr(256)  # columns of the rows of down that are copied together
# Layout of the rows of down, and of the experts by rank.
INNER_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
RANKS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

order_keys = gluon.jit(routing.order_keys.fn)
act_gate = gluon.jit(elementwise.act_gate.fn)


@gluon.jit
def router_logits(
    lines, logits, ring, full, empty, index, H: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Store the logits of the experts of this program, never as UNSET; return the next index of the ring."""
    PER_STAGE: gl.constexpr = STAGE_ROWS // ROUTER_COLUMNS * CHUNK // 256
    acc, index = multiply(
        lines_of(lines, H, 256), ring, full, empty, index, ROUTER_COLUMNS, PER_STAGE, STAGES
    )
    store_first_column(
        logits + gl.program_id(0) * ROUTER_COLUMNS, gl.where(acc == acc, acc, float("nan")), ROUTER_COLUMNS
    )
    return index


@gluon.jit
def unset_logits(logits):
    """Store UNSET in place of the logits of this program, which all programs have read."""
    column = gl.program_id(0) * ROUTER_COLUMNS + rows_of_product(ROUTER_COLUMNS)
    gl.store(logits.to(gl.pointer_type(gl.int32)) + column, column * 0 + UNSET)


@gluon.jit
def read_logits(logits, column):
    """Return the logits of all experts once the programs that compute them have stored them."""
    logit = gl.load(logits + column, volatile=True)
    while gl.min((logit.to(gl.int32, bitcast=True) != UNSET).to(gl.int32), axis=0) == 0:
        logit = gl.load(logits + column, volatile=True)
    return logit


@gluon.jit
def score_of_key(key):
    """Return the value of a key of `routing.order_keys`."""
    return (key ^ ((key >> 31) & SIGN_MASK)).to(gl.float32, bitcast=True)


@gluon.jit
def select_experts(
    logits, ids, weights, top_k, scale, E: gl.constexpr, TOP_K: gl.constexpr, NORMALIZE: gl.constexpr
):
    """Store the experts of the row and their weights to shared memory; all programs select the same."""
    layout: gl.constexpr = gl.BlockedLayout([E // 32], [32], [4], [0])  # no sum crosses a warp
    column = gl.arange(0, E, layout=layout)
    logit = read_logits(logits, column)
    scores = gl.exp(logit - gl.max(logit, axis=0))
    scores = scores / tree_sum(scores)
    choice = gl.where(scores >= LOWEST, scores, LOWEST)  # NaN as well
    keys = order_keys(choice)
    rank_column = gl.arange(0, TOP_K, layout=layout)
    chosen_experts = gl.zeros([TOP_K], gl.int32, layout)
    chosen_scores = gl.zeros([TOP_K], gl.float32, layout)
    total = gl.sum(chosen_scores, axis=0)
    for rank in range(top_k):  # not TOP_K: the loop would be unrolled
        top = gl.max(keys, axis=0)
        best = gl.min(gl.where(keys == top, column, E), axis=0)
        chosen = column == best
        keys = gl.where(chosen, TAKEN, keys)
        score = score_of_key(top)
        total += score
        chosen_scores = gl.where(rank_column == rank, score, chosen_scores)
        chosen_experts = gl.where(rank_column == rank, best, chosen_experts)
    chosen_scores = gl.where(chosen_scores == LOWEST, float("nan"), chosen_scores)
    if NORMALIZE:
        chosen_scores = chosen_scores / gl.maximum(total, MIN_WEIGHT_SUM)
    weights._reinterpret(gl.float32, [TOP_K], weights.type.layout).store(chosen_scores * scale)
    ids.store(chosen_experts)
    thread_barrier()


@gluon.jit
def gate_up(
    lines, inner, ring, full, empty, index,
    H: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store silu(gate) * up of COLUMNS columns of an expert; inner [TOP_K, INNER] is divided in order.

    The first half of a stage is rows of gate, the second of up.
    """
    acc, index = multiply(lines_of(lines, H, CHUNK), ring, full, empty, index, STAGE_ROWS, 1, STAGES)
    gate, up = gl.split(gl.permute(gl.reshape(acc, [2, STAGE_ROWS // 2, MMA_COLUMNS]), (1, 2, 0)))
    gate, up = gate.to(BF16).to(gl.float32), up.to(BF16).to(gl.float32)
    activated = act_gate(gate, up, "silu").to(BF16)
    store_first_column(inner + gl.program_id(0) * COLUMNS, activated, COLUMNS)
    return index


@gluon.jit
def copy_inner(inner, rows, INNER: gl.constexpr, TOP_K: gl.constexpr):
    """Copy inner [TOP_K, INNER] of all programs to shared memory [_, PAIRS, INNER_WIDTH]."""
    pair = gl.arange(0, rows.shape[1], layout=gl.SliceLayout(1, INNER_LAYOUT))
    column = gl.arange(0, INNER_WIDTH, layout=gl.SliceLayout(0, INNER_LAYOUT))
    pointers = inner + pair[:, None] * INNER + column[None, :]
    exists = (pair < TOP_K)[:, None] & (column >= 0)[None, :]
    for i in gl.static_range(INNER // INNER_WIDTH):
        async_copy.async_copy_global_to_shared(rows.index(i), pointers + i * INNER_WIDTH, mask=exists)
    async_copy.commit_group()
    async_copy.wait_group(0)
    thread_barrier()


@gluon.jit
def down(
    rows, weights, outputs, ring, full, empty, index, top_k, num_steps,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the weighted sum of the experts in COLUMNS columns, in the order of ranks, and the next index.

    Rows of the product are the columns of all experts, its columns are pairs: the product of a pair and the
    columns of its expert is used, the others are not. num_steps: INNER // INNER_WIDTH, not a constant, so not
    unrolled.
    """
    PAIRS: gl.constexpr = rows.shape[1]
    acc = gl.zeros([STAGE_ROWS, PAIRS], gl.float32, PRODUCT)
    for i in range(num_steps):
        for part in gl.static_range(INNER_WIDTH // CHUNK):
            wait_full(full, index, STAGES)
            block = ring.index(index % STAGES).load(WEIGHT)
            columns = rows.index(i).slice(part * CHUNK, CHUNK, dim=1).permute((1, 0)).load(COLUMN)
            release(empty, index, 1, STAGES)
            acc = mma_v2(block, columns, acc)
            index += 1
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, PRODUCT))
    pair_of_row = rows_of_product(STAGE_ROWS) // COLUMNS
    own = gl.sum(gl.where(pair_of_row[:, None] == pair[None, :], acc, 0.0), axis=1)
    outputs._reinterpret(gl.float32, [STAGE_ROWS], outputs.type.layout).store(own)
    thread_barrier()
    total = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(1, PRODUCT))
    for rank in range(top_k):
        weight = weights.index(rank).load(gl.SliceLayout(1, PRODUCT))
        total = total + weight * outputs.index(rank).load(gl.SliceLayout(1, PRODUCT))
    return total, index


@gluon.jit
def copy_experts(
    gate_up_w, down_w, ids, ring, full, empty, index,
    H: gl.constexpr, INNER: gl.constexpr, TOP_K: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy weights of the selected experts: COLUMNS columns of gate and up of one, then of down of all."""
    program = gl.program_id(0)
    OUT: gl.constexpr = STAGE_ROWS // TOP_K  # columns of down
    PROGRAMS_OF_EXPERT: gl.constexpr = INNER // COLUMNS
    r = gl.arange(0, STAGE_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    c = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    experts, rank_column = ids.load(RANKS_LAYOUT), gl.arange(0, TOP_K, layout=RANKS_LAYOUT)
    chosen = rank_column == program // PROGRAMS_OF_EXPERT
    expert = gl.sum(gl.where(chosen, experts, 0), axis=0).to(gl.int64)
    n = r % (STAGE_ROWS // 2)
    first = expert * (2 * INNER) + program % PROGRAMS_OF_EXPERT * COLUMNS
    pointers = gate_up_w + (first + r // (STAGE_ROWS // 2) * INNER + n)[:, None] * H + c[None, :]
    exists = (n < COLUMNS)[:, None] & (c >= 0)[None, :]
    for i in range(H // CHUNK):
        index = copy_stage(ring, full, empty, index, pointers + i * CHUNK, exists, STAGES)
    expert_of_row = gl.zeros([STAGE_ROWS], gl.int32, gl.SliceLayout(1, ROWS_LAYOUT))
    for rank in gl.static_range(TOP_K):
        expert_of_rank = gl.sum(gl.where(rank_column == rank, experts, 0), axis=0)
        expert_of_row = gl.where(r // OUT == rank, expert_of_rank, expert_of_row)
    row = expert_of_row.to(gl.int64) * H + program * OUT + r % OUT
    down_pointers = down_w + row[:, None] * INNER + c[None, :]
    for i in range(INNER // CHUNK):
        index = copy_stage(ring, full, empty, index, down_pointers + i * CHUNK, None, STAGES)
    return index
