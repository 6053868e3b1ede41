"""The stages of `blocks` that are matrix products, cut into items for the programs; attention: `spans`.

A matrix product's item is a tile of columns. Its weights are loaded and laid into shared memory before the
program waits for the stage before; then the rows come in, in pieces of K. An item's columns are more than its
rows (32 to 16), so that the warps share out the columns and none does another's work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.elementwise import inverse_rms, silu_gate, tree_sum_rows
from draftproof.ops.triton.fused.barrier import arrive, turn, wait
from draftproof.ops.triton.gemm.fused import places, rotate_store


@triton.constexpr_function
def pieces(depth: int, largest: int) -> list[int]:
    """Powers of two that add up to `depth`, falling."""
    found = []
    while depth:
        found.append(min(largest, 1 << (depth.bit_length() - 1)))
        depth -= found[-1]
    return found


@triton.constexpr_function
def count_of(depth: int, largest: int) -> int:
    return len(pieces(depth, largest))


@triton.constexpr_function
def size_of(depth: int, largest: int, i: int) -> int:
    return pieces(depth, largest)[i]


@triton.constexpr_function
def start_of(depth: int, largest: int, i: int) -> int:
    return sum(pieces(depth, largest)[:i])


@triton.constexpr_function
def levels_above(count: int) -> int:
    return (count - 1).bit_length()


@triton.jit
def weights(w, rn, first, DEPTH: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr):
    """The rows rn [BN] of a weight, columns first .. first + DEPTH, in pieces [size, BN]."""
    found = ()
    for i in tl.static_range(count_of(DEPTH, PIECE)):
        rk = first + start_of(DEPTH, PIECE, i) + tl.arange(0, size_of(DEPTH, PIECE, i))
        found = found + (tl.load(w + rn[None, :] * STRIDE + rk[:, None]),)
    return found


@triton.jit
def inputs(x, rm, R, first, DEPTH: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr):
    """The rows rm [BM] of x in pieces [BM, size]; written by other programs of this launch.

    Past the end the last row stands in: what comes of it is not stored, and masks take instructions.
    """
    found = ()
    for i in tl.static_range(count_of(DEPTH, PIECE)):
        rk = first + start_of(DEPTH, PIECE, i) + tl.arange(0, size_of(DEPTH, PIECE, i))
        at = x + tl.minimum(rm, R - 1)[:, None] * STRIDE + rk[None, :]
        found = found + (tl.load(at, cache_modifier=".cg"),)
    return found


@triton.jit
def embedded(table, tokens, rm, R, VOCAB, K: tl.constexpr, PIECE: tl.constexpr):
    """The rows of an embedding [VOCAB, K] for tokens rm [BM], in pieces; zeros outside of it."""
    token = tl.load(tokens + tl.minimum(rm, R - 1))
    known = (token >= 0) & (token < VOCAB)
    found = ()
    for i in tl.static_range(count_of(K, PIECE)):
        rk = start_of(K, PIECE, i) + tl.arange(0, size_of(K, PIECE, i))
        at = table + token[:, None] * K + rk[None, :]
        found = found + (tl.load(at, mask=known[:, None], other=0.0),)
    return found


@triton.jit
def norm_weights(weight, K: tl.constexpr, PIECE: tl.constexpr):
    found = ()
    for i in tl.static_range(count_of(K, PIECE)):
        at = weight + start_of(K, PIECE, i) + tl.arange(0, size_of(K, PIECE, i))
        found = found + (tl.load(at).to(tl.float32),)
    return found


@triton.jit
def scale_of(xs, eps, K: tl.constexpr, PIECE: tl.constexpr):
    """1 / rms of rows in pieces; as the tree over all of a row goes on above the pieces."""
    sums = ()
    for i in tl.static_range(count_of(K, PIECE)):
        wide = xs[i].to(tl.float32)
        sums = sums + (tree_sum_rows(wide * wide),)
    for _ in tl.static_range(levels_above(count_of(K, PIECE))):
        above = ()
        for i in tl.static_range(0, len(sums) - 1, 2):
            above = above + (sums[i] + sums[i + 1],)
        if len(sums) % 2 == 1:
            above = above + (sums[len(sums) - 1],)
        sums = above
    return inverse_rms(sums[0], eps, K)


@triton.jit
def normed_rows(xs, gains, eps, K: tl.constexpr, PIECE: tl.constexpr):
    """The norm of rows in pieces."""
    dtype: tl.constexpr = xs[0].dtype
    scale = scale_of(xs, eps, K, PIECE)[:, None]
    rows = ()
    for i in tl.static_range(count_of(K, PIECE)):
        unit = (xs[i].to(tl.float32) * scale).to(dtype).to(tl.float32)
        rows = rows + ((unit * gains[i][None, :]).to(dtype),)
    return rows


@triton.jit
def normed_pair(
    x, weight, w, bias, rm, R, first, apart, eps, counter, goal, wait_now, tokens, table, token_norm, VOCAB,
    K: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    JOINED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The norm of rows rm times `BN // 2` columns from `first`, and times those `apart` further on.

    Both rounded, then fp32, [BM, BN // 2]. `bias`: where its address stands.
    Partners lie side by side in the product, so that a thread holds both.
    JOINED: w [_, 2 K] reads two rows, and the norm of a token's embedding comes first.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = 2 * K if JOINED else K
    rn = first + tl.arange(0, BN) // 2 + (tl.arange(0, BN) % 2) * apart
    held = weights(w, rn, WIDE - K, K, WIDE, PIECE)
    gains = norm_weights(weight, K, PIECE)
    if HAS_BIAS:
        extra = tl.load(tl.load(bias).to(tl.pointer_type(tl.float32)) + rn)
    total = tl.zeros((BM, BN), tl.float32)
    if JOINED:  # none of it waits for a stage of this launch
        others = weights(w, rn, 0, K, WIDE, PIECE)
        rows = embedded(table, tokens, rm, R, VOCAB, K, PIECE)
        rows = normed_rows(rows, norm_weights(token_norm, K, PIECE), eps, K, PIECE)
        for i in tl.static_range(count_of(K, PIECE)):
            total = tl.dot(rows[i], others[i], total)
    if wait_now:
        wait(counter, goal, ALL)
    rows = normed_rows(inputs(x, rm, R, 0, K, K, PIECE), gains, eps, K, PIECE)
    for i in tl.static_range(count_of(K, PIECE)):
        total = tl.dot(rows[i], held[i], total)
    if HAS_BIAS:
        total += extra[None, :]
    low, high = tl.split(tl.reshape(total.to(dtype).to(tl.float32), (BM, BN // 2, 2)))
    return low, high


@triton.jit
def qkv_stage(
    x, weight, w, bias, q, cache, positions, slots, kv_index, rope, plane, eps, counter, goal, R,
    tokens, table, token_norm, VOCAB,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, JOINED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """q of the norm of x [R, K], rotated, to q [R, NUM_Q * D]; k and v to the cache. Returns the new goal."""
    MIDDLE: tl.constexpr = D // 2
    HALF: tl.constexpr = BN // 2
    grid_m = tl.cdiv(R, BM)
    items = grid_m * ((NUM_Q + 2 * NUM_KV) * (MIDDLE // HALF))
    begin = turn(goal)
    for item in range(begin, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        head = item // grid_m // (MIDDLE // HALF)
        first = item // grid_m % (MIDDLE // HALF) * HALF
        j = first + tl.arange(0, HALF)
        cos, sin, place, live = places(rm, rm < R, j, positions, slots, kv_index, rope, D)
        low, high = normed_pair(
            x, weight, w, bias, rm, R, head * D + first, MIDDLE, eps, counter, goal, item == begin, tokens,
            table, token_norm, VOCAB, K, PIECE, BM, BN, HAS_BIAS, JOINED, ALL,
        )  # fmt: skip
        rotate_store(low, high, cos, sin, place, live, rm, rm < R, head, j, cache, q, plane, NUM_Q, NUM_KV, D)
        arrive(counter, ALL)
    return goal + items


@triton.jit
def gate_stage(
    x, weight, w, bias, out, eps, counter, goal, R,
    INNER: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """out [R, INNER] = silu(gate) * up of the norm of x [R, K]. Returns the new goal."""
    HALF: tl.constexpr = BN // 2
    grid_m = tl.cdiv(R, BM)
    items = grid_m * (INNER // HALF)
    begin = turn(goal)
    for item in range(begin, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        first = item // grid_m * HALF
        low, high = normed_pair(
            x, weight, w, bias, rm, R, first, INNER, eps, counter, goal, item == begin, bias, x, x, 0, K,
            PIECE, BM, BN, HAS_BIAS, False, ALL,
        )  # fmt: skip
        rn = first + tl.arange(0, HALF)
        at = out + rm[:, None] * INNER + rn[None, :]
        tl.store(at, silu_gate(low, high).to(out.dtype.element_ty), mask=(rm < R)[:, None])
        arrive(counter, ALL)
    return goal + items


@triton.jit
def add_linear(
    x, w, bias, residual, taps, tap, counter, goal, R,
    N: tl.constexpr, K: tl.constexpr, PANELS: tl.constexpr, ROOM: tl.constexpr, PIECE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, TAPS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """residual [R, N] += x [R, K] times w [N, K], rounded twice as the two ops round. Returns the new goal.

    What is held of a weight at a time is one of PANELS parts. Shared memory has room for ROOM pieces of rows
    besides; 0: for all of them. With TAPS and tap >= 0 it goes to taps [R, TAPS, N] at `tap` as well.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    DEEP: tl.constexpr = K // PANELS
    COUNT: tl.constexpr = count_of(DEEP, PIECE)
    STEP: tl.constexpr = ROOM if ROOM else COUNT
    grid_m = tl.cdiv(R, BM)
    items = grid_m * (N // BN)
    begin = turn(goal)
    one = (R > 0).to(dtype)
    for item in range(begin, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        rn = (item // grid_m) * BN + tl.arange(0, BN)
        if HAS_BIAS:
            extra = tl.load(tl.load(bias).to(tl.pointer_type(tl.float32)) + rn)
        total = tl.zeros((BM, BN), tl.float32)
        inside = (rm < R)[:, None]
        at = residual + rm[:, None] * N + rn[None, :]
        before = tl.zeros((BM, BN), dtype)
        for panel in range(PANELS):
            held = weights(w, rn, panel * DEEP, DEEP, K, PIECE)
            if (item == begin) & (panel == 0):
                wait(counter, goal, ALL)
            xs = inputs(x, rm, R, panel * DEEP, DEEP, K, PIECE)
            before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
            for first in tl.static_range(0, COUNT, STEP):
                rows = ()
                for i in tl.static_range(first, min(first + STEP, COUNT)):
                    # What comes from memory is laid into shared memory at once, what is computed when it is:
                    # times one, rows stay in registers until their turn.
                    rows = rows + (xs[i] * one if ROOM else xs[i],)
                for i in tl.static_range(first, min(first + STEP, COUNT)):
                    total = tl.dot(rows[i - first], held[i], total)
        if HAS_BIAS:
            total += extra[None, :]
        summed = (total.to(dtype).to(tl.float32) + before.to(tl.float32)).to(dtype)
        tl.store(at, summed, mask=inside)
        if TAPS:
            aside = taps + (rm[:, None] * TAPS + tap) * N + rn[None, :]
            tl.store(aside, summed, mask=inside & (tap >= 0))
        arrive(counter, ALL)
    return goal + items
