"""Router kernel: logits, scores, the experts of each row, and the work list of the grouped GEMM.

One launch. A program computes the logits of a tile of rows and a tile of experts; the last program of a row
tile selects the experts of its rows. For the work list these programs count the rows of each expert, and the
last of them divides the experts into tiles. Which program is last, and the order of the rows of an expert,
vary from run to run and change no bit of the output: a row is routed and multiplied independently of others.

Logits are fp32 sums in the order of `gemm/dense.py`. Sums of scores have a fixed tree or the order of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.contract.types import Routing
from draftproof.ops.triton.elementwise import tree_sum_rows
from draftproof.ops.triton.gemm.dense import dot_rows
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two

MAX_SPLIT_ROWS = 512  # up to it several programs share the experts of a row tile
ROWS, MANY_ROWS = 16, 64  # of a row tile, up to MAX_SPLIT_ROWS rows and above
FEW_ROWS = 4  # rows: up to it the tile that selects experts has FEW_ROWS rows, one for each warp
EXPERTS = 16  # of the tile of a program, up to MAX_SPLIT_ROWS rows
# Up to MAX_SPLIT_ROWS rows there are few programs: each has many loads in flight.
NUM_WARPS = 4  # warps of a program
NUM_STAGES = 6  # steps over K whose loads are in flight
BF16_STEP_COLUMNS = 256  # columns of x and of the router in one step over K, in bf16
LARGE_EXPERTS = 256  # above it a tile of many rows would not fit into registers
MAX_EXPERT_TILES = tl.constexpr(1 << 16)  # a work item is expert * MAX_EXPERT_TILES + tile of the expert
MIN_WEIGHT_SUM = tl.constexpr(1e-20)  # divisor of the weights if all scores of a row are 0
LOWEST = tl.constexpr(-3.0e38)  # score in place of NaN: below all others, above those that are excluded
EXCLUDED = tl.constexpr(float("-inf"))
SIGN_MASK = tl.constexpr(0x7FFFFFFF)
TAKEN = tl.constexpr(-(1 << 31))  # key of an expert that is selected already: below those of all scores


@dataclass(frozen=True, slots=True)
class Assignment:
    """Experts of the rows of one call; `order`, `counts` and `items` only with a work list."""

    experts: Tensor  # [R, top_k] int32, best first
    weights: Tensor  # [R, top_k] fp32
    order: Tensor | None = None  # [E, R] int32: pairs (row * top_k + rank) of each expert
    counts: Tensor | None = None  # [E] int32: pairs of each expert
    items: Tensor | None = None  # [1 + max] int32: number of tiles, then each tile as a work item


def max_tiles(rows: int, top_k: int, num_experts: int, tile_rows: int) -> int:
    """Return the largest number of tiles that the pairs of `rows` rows can need."""
    pairs = rows * top_k
    touched = min(pairs, num_experts)
    return (pairs + touched * (tile_rows - 1)) // tile_rows


def make_counters(num_experts: int, device: torch.device) -> Tensor:
    """Return the counters of a router, which each launch leaves at zero."""
    return torch.zeros(num_experts + 1 + MAX_SPLIT_ROWS // ROWS, dtype=torch.int32, device=device)


@triton.jit
def best_column(values, column):
    """Return the maximum of each row of values [M, N], its leftmost column, and that as a mask [M, N]."""
    top = tl.max(values, 1)
    index = tl.min(tl.where(values == top[:, None], column[None, :], values.shape[1]), 1)
    return top, index, column[None, :] == index[:, None]


@triton.jit
def order_keys(values):
    """Return integers in the order of fp32 values, none of them NaN or -0: one instruction reduces a warp."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & SIGN_MASK)


@triton.jit
def exclude_groups(
    choice, M: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
):  # fmt: skip
    """Exclude all but the TOP_GROUPS best groups of choice [M, GROUPS * WIDTH].

    The score of a group is that of its best expert, or with TOP2 the sum of its two best.
    """
    rows = tl.reshape(choice, (M * GROUPS, WIDTH))
    score, _, first = best_column(rows, tl.arange(0, WIDTH))
    if TOP2:
        score = score + tl.max(tl.where(first, EXCLUDED, rows), 1)
    score = tl.reshape(score, (M, GROUPS))
    allowed = tl.zeros((M, GROUPS), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        _, _, chosen = best_column(score, tl.arange(0, GROUPS))
        allowed = tl.where(chosen, 1, allowed)
        score = tl.where(chosen, EXCLUDED, score)
    kept = tl.reshape(tl.broadcast_to(allowed[:, :, None], (M, GROUPS, WIDTH)), (M, GROUPS * WIDTH))
    return tl.where(kept != 0, choice, EXCLUDED)


@triton.jit
def scores_of(logits, is_expert, SIGMOID: tl.constexpr):
    """Return the scores of logits [M, N]; columns that are no experts have score 0."""
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        top = tl.max(tl.where(is_expert[None, :], logits, EXCLUDED), 1)
        scores = tl.exp(logits - top[:, None])
        scores = tl.where(is_expert[None, :], scores, 0.0)
        scores = scores / tree_sum_rows(scores)[:, None]
    return tl.where(is_expert[None, :], scores, 0.0)


@triton.jit
def write_items(counters, counts, items, E: tl.constexpr, E_PAD: tl.constexpr, BM: tl.constexpr):
    """Move the counters to `counts`, reset them, and list the tiles of BM pairs of every expert."""
    expert = tl.arange(0, E_PAD)
    count = tl.atomic_xchg(counters + expert, tl.zeros((E_PAD,), tl.int32), mask=expert < E, sem="relaxed")
    count = tl.where(expert < E, count, 0)
    tl.store(counts + expert, count, mask=expert < E)
    tiles = (count + BM - 1) // BM
    end = tl.cumsum(tiles, 0)
    tl.store(items, tl.sum(tiles, 0))
    for tile in range(tl.max(tiles, 0)):
        entry = expert * MAX_EXPERT_TILES + tile
        tl.store(items + 1 + end - tiles + tile, entry, mask=tile < tiles)


@triton.jit(do_not_specialize=["R"])
def route_kernel(
    x, router, bias, correction, logits, experts, weights, counters, order, counts, items, scale, R,
    K: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BR: tl.constexpr, SELECT_ROWS: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    HAS_LIST: tl.constexpr, BM: tl.constexpr, EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Route rows x [R, K] by router [E, K]: `experts`, `weights` [R, TOP_K]; list tiles of BM pairs.

    SELECT_ROWS: rows of the tile that selects experts: BR, or fewer if R is at most SELECT_ROWS.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not WEIGHT_FIRST:
            tl.extra.cuda.gdc_wait()
    EXPERT_TILES: tl.constexpr = (E + BE - 1) // BE
    row_tile = tl.program_id(0) // EXPERT_TILES
    rm = row_tile * BR + tl.arange(0, BR)
    rn = (tl.program_id(0) % EXPERT_TILES) * BE + tl.arange(0, BE)
    rk = tl.arange(0, BK)
    row_ok, col_ok = rm < R, rn < E
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = router + rn[None, :] * K + rk[:, None]
    value = dot_rows(x_at, w_at, row_ok, col_ok, rk, K, BR, BE, BK, EVEN_K, WEIGHT_FIRST, PDL)
    if HAS_BIAS:
        value += tl.load(bias + rn, mask=col_ok, other=0.0)[None, :]
    at = logits + rm.to(tl.int64)[:, None] * E + rn[None, :]
    tl.store(at, value, mask=row_ok[:, None] & col_ok[None, :])
    tl.debug_barrier()  # the stores of all threads precede the arrival
    if EXPERT_TILES > 1:
        arrivals = counters + E + 1 + row_tile
        if tl.atomic_add(arrivals, 1, sem="acq_rel") != EXPERT_TILES - 1:
            return
        tl.store(arrivals, 0)
    rm = row_tile * BR + tl.arange(0, SELECT_ROWS)
    row_ok = rm < R
    column = tl.arange(0, GROUPS_PAD * WIDTH_PAD)  # groups are padded to powers of two
    within, group = column % WIDTH_PAD, column // WIDTH_PAD
    expert = group * (E // GROUPS) + within
    is_expert = (within < E // GROUPS) & (group < GROUPS)
    at = logits + rm.to(tl.int64)[:, None] * E + expert[None, :]
    value = tl.load(at, mask=row_ok[:, None] & is_expert[None, :], other=0.0)
    scores = scores_of(value, is_expert, SIGMOID)
    choice = scores
    if HAS_CORRECTION:
        choice += tl.load(correction + expert, mask=is_expert, other=0.0)[None, :]
    choice = tl.where(choice >= LOWEST, choice, LOWEST)  # NaN as well
    choice = tl.where(is_expert[None, :], choice, EXCLUDED)
    if TOP_GROUPS < GROUPS:
        choice = exclude_groups(choice, SELECT_ROWS, GROUPS_PAD, WIDTH_PAD, TOP_GROUPS, TOP2)
    keys, score_bits = order_keys(choice), scores.to(tl.int32, bitcast=True)
    rank_column, total = tl.arange(0, TOP_K_PAD), tl.zeros((SELECT_ROWS,), tl.float32)
    chosen_weights = tl.zeros((SELECT_ROWS, TOP_K_PAD), tl.float32)
    chosen_experts = tl.zeros((SELECT_ROWS, TOP_K_PAD), tl.int32)
    for rank in tl.static_range(TOP_K):
        _, index, chosen = best_column(keys, column)
        keys = tl.where(chosen, TAKEN, keys)
        score = tl.sum(tl.where(chosen, score_bits, 0), 1).to(tl.float32, bitcast=True)
        best = (index // WIDTH_PAD) * (E // GROUPS) + index % WIDTH_PAD
        total += score
        chosen_weights = tl.where(rank_column[None, :] == rank, score[:, None], chosen_weights)
        chosen_experts = tl.where(rank_column[None, :] == rank, best[:, None], chosen_experts)
    if NORMALIZE:
        chosen_weights = chosen_weights / tl.maximum(total, MIN_WEIGHT_SUM)[:, None]
    pair = rm[:, None] * TOP_K + rank_column[None, :]
    inside = row_ok[:, None] & (rank_column < TOP_K)[None, :]
    if HAS_LIST:  # append the pairs to the lists of their experts
        place = tl.atomic_add(counters + chosen_experts, 1, mask=inside, sem="relaxed")
        tl.store(order + chosen_experts.to(tl.int64) * R + place, pair, mask=inside)
    tl.store(experts + pair, chosen_experts, mask=inside)
    tl.store(weights + pair, chosen_weights * scale, mask=inside)
    if HAS_LIST:
        tl.debug_barrier()
        finished = tl.atomic_add(counters + E, 1, sem="acq_rel")
        if finished == tl.cdiv(R, BR) - 1:
            tl.store(counters + E, 0)
            write_items(counters, counts, items, E, E_PAD, BM)


def route(
    x: Tensor, router: PackedLinear, routing: Routing, correction: Tensor | None, counters: Tensor,
    tile_rows: int, pdl: bool,
) -> Assignment:  # fmt: skip
    """Return the experts of rows x [R, K]; `tile_rows` 0: without a work list."""
    rows, depth = x.shape
    count, top_k = routing.num_experts, routing.top_k

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=x.device)

    chosen, logits = ints(rows, top_k), torch.empty((rows, count), device=x.device)
    found = Assignment(chosen, torch.empty((rows, top_k), device=x.device))
    if tile_rows:
        items = ints(1 + max_tiles(rows, top_k, count, tile_rows))
        found = Assignment(chosen, found.weights, ints(count, rows), ints(count), items)
    padded = next_power_of_two(count)
    if is_split := rows <= MAX_SPLIT_ROWS:
        tile = {"BR": ROWS, "BE": EXPERTS, "num_warps": NUM_WARPS, "num_stages": NUM_STAGES}
    else:
        tile = {"BR": MANY_ROWS if padded <= LARGE_EXPERTS else ROWS, "BE": padded}
        tile |= {"num_warps": 8, "num_stages": 3}
    tile["SELECT_ROWS"] = FEW_ROWS if rows <= FEW_ROWS else tile["BR"]
    step = (BF16_STEP_COLUMNS if is_split else 64) if x.dtype == torch.bfloat16 else 32
    even = depth % step == 0
    grid = triton.cdiv(rows, tile["BR"]) * triton.cdiv(count, tile["BE"])
    route_kernel[(grid,)](
        x, router.weight, found.weights if router.bias is None else router.bias,
        found.weights if correction is None else correction, logits, chosen, found.weights, counters,
        *(chosen if part is None else part for part in (found.order, found.counts, found.items)),
        routing.scale, rows, K=depth, E=count, E_PAD=padded, BK=step, TOP_K=top_k,
        TOP_K_PAD=next_power_of_two(top_k), GROUPS=routing.num_groups,
        GROUPS_PAD=next_power_of_two(routing.num_groups),
        WIDTH_PAD=next_power_of_two(count // routing.num_groups), TOP_GROUPS=routing.top_groups,
        TOP2=routing.group_score == "top2_sum", SIGMOID=routing.scoring == "sigmoid",
        NORMALIZE=routing.normalize, HAS_BIAS=router.bias is not None, HAS_CORRECTION=correction is not None,
        HAS_LIST=tile_rows > 0, BM=max(tile_rows, 1), EVEN_K=even, WEIGHT_FIRST=pdl and even,
        **launch_options(pdl, enable_fp_fusion=False, **tile),
    )  # fmt: skip
    return found
