"""All layers of a mixture of experts in one cooperative kernel, for one row.

With one row most of the time of an op is its launch and its chain of dependent loads. Here every program
runs all layers and their stages: norm and QKV; attention; output projection; norm and router; gate and up;
down with the sum of the experts. A grid barrier separates the stages, except that logits of the router are
read as soon as they are stored. Every program computes the same norms and the same choice of experts, and
its own columns of each product. Four warps copy weights ahead of the stage that reads them, see
`one_row/ring.py`.

Bits equal those of the separate ops. Written in Gluon, which Triton's interpreter does not run. The size of
the code matters: each stage runs once a layer, so its instructions are no longer in the instruction cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from draftproof.ops.triton.attention.kv_rings import thread_barrier
from draftproof.ops.triton.fused_moe import experts
from draftproof.ops.triton.fused_moe.attention import attend_items, copy_spans, load_head_norms
from draftproof.ops.triton.fused_moe.norms import load_weight, normed_lines
from draftproof.ops.triton.one_row.grid_barrier import reset, synchronise
from draftproof.ops.triton.one_row.ring import (
    BF16,
    CHUNK,
    MMA_COLUMNS,
    ROWS_LAYOUT,
    STAGE_ROWS,
    copy_stage,
    lines_of,
    load_lines,
    make_ring,
    multiply,
    rows_of_product,
    store_first_column,
    store_lines,
)
from draftproof.ops.triton.one_row.spans import FEW_SPANS, HEAD_ROWS, SPAN, merge_spans


@gluon.jit
def tensor_at(table, layer, field: gl.constexpr, FIELDS: gl.constexpr):
    """Return a pointer to a bf16 tensor of a layer; see `launcher.addresses`."""
    address = gl.load(table + layer * FIELDS + field)
    return gl.multiple_of(address.to(gl.pointer_type(BF16)), 16)


@gluon.jit
def load_addresses(table, layer, FIELDS: gl.constexpr):
    """Return pointers to the norms of a layer, to the norms of q and k, and to its cache."""
    return (
        tensor_at(table, layer, 0, FIELDS), tensor_at(table, layer, 1, FIELDS),
        tensor_at(table, layer, 2, FIELDS), tensor_at(table, layer, 3, FIELDS),
        tensor_at(table, layer, 4, FIELDS),
    )  # fmt: skip


@gluon.jit
def copy_layers(
    table, page_table, positions, slots, ring, ids, full, empty, routed, num_layers, max_pages, plane,
    H: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, INNER: gl.constexpr, NUM_KV: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, OUT: gl.constexpr, GATE: gl.constexpr,
    QKV: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Copy what the stages of all layers read, in their order: weights, keys and values of earlier passes."""
    program = gl.program_id(0)
    Q: gl.constexpr = NUM_KV * GROUP * D
    OUT_CHUNKS: gl.constexpr = STAGE_ROWS // OUT  # of a stage of the output projection
    ROUTER: gl.constexpr = experts.ROUTER_COLUMNS
    ROUTER_CHUNKS: gl.constexpr = STAGE_ROWS // ROUTER
    r = gl.arange(0, STAGE_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    c = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    position = gl.load(positions).to(gl.int32)
    pages = page_table + gl.maximum(gl.load(slots), 0) * max_pages
    n = r % (STAGE_ROWS // 2)
    is_qkv = (n < QKV)[:, None] & (c >= 0)[None, :]
    index = 0
    for layer in range(num_layers):
        rows = tensor_at(table, layer, 5, FIELDS) + ((program * QKV + n) * H)[:, None] + c[None, :]
        rows += (r // (STAGE_ROWS // 2) * CHUNK)[:, None]
        for i in range(H // (2 * CHUNK)):
            index = copy_stage(ring, full, empty, index, rows + i * 2 * CHUNK, is_qkv, STAGES)
        index = copy_spans(
            tensor_at(table, layer, 4, FIELDS), plane, pages, position, ring, full, empty, index, NUM_KV, D,
            PAGE, STAGES,
        )  # fmt: skip
        rows = tensor_at(table, layer, 6, FIELDS) + ((program * OUT + r % OUT) * Q)[:, None] + c[None, :]
        rows += (r // OUT * CHUNK)[:, None]
        for i in range(Q // (OUT_CHUNKS * CHUNK)):
            index = copy_stage(ring, full, empty, index, rows + i * OUT_CHUNKS * CHUNK, None, STAGES)
        if program < E // ROUTER:
            router_rows = ((program * ROUTER + r % ROUTER) * H + r // ROUTER * CHUNK)[:, None] + c[None, :]
            rows = tensor_at(table, layer, 7, FIELDS) + router_rows
            for i in range(H // (ROUTER_CHUNKS * CHUNK)):
                index = copy_stage(ring, full, empty, index, rows + i * ROUTER_CHUNKS * CHUNK, None, STAGES)
        mbarrier.wait(routed, layer & 1)
        index = experts.copy_experts(
            tensor_at(table, layer, 8, FIELDS), tensor_at(table, layer, 9, FIELDS), ids, ring, full, empty,
            index, H, INNER, TOP_K, GATE, STAGES,
        )  # fmt: skip


@gluon.jit
def attention_stage(
    x, norm, q_norm, k_norm, cache, qkv, mixed, parts, stats, rope, position, slot, kv_index, plane, spans,
    scale, eps, counter, goal, ring, lines, queries, full, empty, index,
    H: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, QKV: gl.constexpr,
    MERGE: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Norm, QKV and attention of the row x; return the new goal and the next index of the ring."""
    store_lines(lines, normed_lines(x, norm, eps, H))
    acc, index = multiply(lines_of(lines, H, 2 * CHUNK), ring, full, empty, index, STAGE_ROWS // 2, 1, STAGES)
    store_first_column(qkv + gl.program_id(0) * QKV, acc.to(BF16), QKV)
    head_norms = load_head_norms(q_norm, k_norm, D, Q_NORM, K_NORM)
    goal = synchronise(counter, goal)
    index = attend_items(
        qkv, rope, head_norms, cache, mixed, parts, stats, position, slot, kv_index, plane, spans, scale, eps,
        ring, queries, lines, full, empty, index, NUM_KV, GROUP, D, Q_NORM, K_NORM, STAGES,
    )  # fmt: skip
    goal = synchronise(counter, goal)
    if position >= FEW_SPANS * SPAN:
        merge_spans(parts, stats, mixed, position // SPAN + 1, spans, MERGE, D)
        goal = synchronise(counter, goal)
    return goal, index


@gluon.jit
def compute_layers(
    table, x, middle, qkv, mixed, parts, stats, logits, inner, taps, positions, slots, kv_indices, rope,
    counter, ring, lines, inner_rows, outputs, ids, weights, full, empty, routed,
    num_layers, plane, spans, top_k, num_down_steps, eps, scale, route_scale,
    H: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, INNER: gl.constexpr, NUM_KV: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr, GATE: gl.constexpr, QKV: gl.constexpr,
    Q_NORM: gl.constexpr, K_NORM: gl.constexpr, NORMALIZE: gl.constexpr, STAGES: gl.constexpr,
    FIELDS: gl.constexpr,
):  # fmt: skip
    """Compute the stages of all layers."""
    program = gl.program_id(0)
    Q: gl.constexpr = NUM_KV * GROUP * D
    ROUTERS: gl.constexpr = E // experts.ROUTER_COLUMNS  # programs that compute logits
    queries = inner_rows._reinterpret(
        BF16, [HEAD_ROWS, D], gl.NVMMASharedLayout.get_default_for([HEAD_ROWS, D], BF16)
    )
    position = gl.load(positions).to(gl.int32)
    slot, kv_index = gl.load(slots), gl.load(kv_indices)
    columns = program * OUT + rows_of_product(OUT)
    index = 0
    goal = 0
    current = load_addresses(table, 0, FIELDS)
    norm = load_weight(current[0], H)
    for layer in range(num_layers):
        # loaded early, so that nothing waits for them at the end of the layer
        following = load_addresses(table, gl.minimum(layer + 1, num_layers - 1), FIELDS)
        tap = gl.load(table + layer * FIELDS + (FIELDS - 1))
        mlp_norm, q_norm, k_norm, cache = current[1], current[2], current[3], current[4]
        goal, index = attention_stage(
            x, norm, q_norm, k_norm, cache, qkv, mixed, parts, stats, rope, position, slot, kv_index, plane,
            spans, scale, eps, counter, goal, ring, lines, queries, full, empty, index,
            H, NUM_KV, GROUP, D, QKV, Q * OUT // H, Q_NORM, K_NORM, STAGES,
        )  # fmt: skip
        store_lines(lines, load_lines(mixed, Q))
        before = gl.load(x + columns, cache_modifier=".cg").to(gl.float32)
        acc, index = multiply(
            lines_of(lines, Q, 4 * CHUNK), ring, full, empty, index, OUT, STAGE_ROWS // (4 * OUT), STAGES
        )
        after = (acc.to(BF16).to(gl.float32) + before[:, None]).to(BF16)
        store_first_column(middle + program * OUT, after, OUT)
        weight = load_weight(mlp_norm, H)
        goal = synchronise(counter, goal)
        store_lines(lines, normed_lines(middle, weight, eps, H))
        if program < ROUTERS:
            index = experts.router_logits(lines, logits, ring, full, empty, index, H, STAGES)
        experts.select_experts(logits, ids, weights, top_k, route_scale, E, TOP_K, NORMALIZE)
        mbarrier.arrive(routed, count=1)
        index = experts.gate_up(lines, inner, ring, full, empty, index, H, GATE, STAGES)
        before_experts = gl.load(middle + columns, cache_modifier=".cg").to(gl.float32)
        goal = synchronise(counter, goal)
        if program < ROUTERS:
            experts.unset_logits(logits)
        experts.copy_inner(inner, inner_rows, INNER, TOP_K)
        total, index = experts.down(
            inner_rows, weights, outputs, ring, full, empty, index, top_k, num_down_steps, TOP_K, OUT, STAGES
        )
        summed = (total.to(BF16).to(gl.float32) + before_experts).to(BF16)
        gl.store(x + columns, summed)
        if tap >= 0:
            gl.store(taps + tap * H + columns, summed)
        current = following
        norm = load_weight(current[0], H)
        if layer + 1 < num_layers:
            goal = synchronise(counter, goal)
    reset(counter)


@gluon.jit
def fused_moe_kernel(
    table, x, middle, qkv, mixed, parts, stats, logits, inner, taps, positions, slots, kv_indices, page_table,
    rope, counter, num_layers, max_pages, plane, spans, top_k, num_down_steps, eps, scale, route_scale,
    H: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, INNER: gl.constexpr, NUM_KV: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, OUT: gl.constexpr, GATE: gl.constexpr,
    QKV: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr, NORMALIZE: gl.constexpr,
    STAGES: gl.constexpr, FIELDS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Run all layers on the row x [H] in place.

    OUT, GATE, QKV: columns of a program in the output, in gate or up, and in q, k and v.

    taps [_, H]: the residual after the layers that have a tap. parts, stats: see `online_softmax`.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDTH: gl.constexpr = experts.INNER_WIDTH
    ring, full, empty = make_ring(STAGES)
    # the row of a product, or the heads of an item of attention
    LINES: gl.constexpr = max(H, NUM_KV * GROUP * D, HEAD_ROWS * D) // CHUNK
    lines = gl.allocate_shared_memory(BF16, [LINES, CHUNK], plain)
    PAIRS: gl.constexpr = max(TOP_K, MMA_COLUMNS)
    inner_rows = gl.allocate_shared_memory(
        BF16, [INNER // WIDTH, PAIRS, WIDTH], gl.NVMMASharedLayout.get_default_for([PAIRS, WIDTH], BF16)
    )
    outputs = gl.allocate_shared_memory(gl.float32, [TOP_K, OUT], plain)
    weights = gl.allocate_shared_memory(gl.float32, [TOP_K, 1], plain)
    ids = gl.allocate_shared_memory(gl.int32, [TOP_K], plain)
    routed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(routed, count=1)
    thread_barrier()
    gl.warp_specialize(
        [
            (compute_layers, (table, x, middle, qkv, mixed, parts, stats, logits, inner, taps, positions,
                              slots, kv_indices, rope, counter, ring, lines, inner_rows, outputs, ids,
                              weights, full, empty, routed, num_layers, plane, spans, top_k, num_down_steps,
                              eps, scale, route_scale, H, E, TOP_K, INNER, NUM_KV, GROUP, D, OUT, GATE, QKV,
                              Q_NORM, K_NORM, NORMALIZE, STAGES, FIELDS)),
            (copy_layers, (table, page_table, positions, slots, ring, ids, full, empty, routed, num_layers,
                           max_pages, plane, H, E, TOP_K, INNER, NUM_KV, GROUP, D, PAGE, OUT, GATE, QKV,
                           STAGES, FIELDS)),
        ],
        [4], [COPY_REGISTERS],
    )  # fmt: skip
