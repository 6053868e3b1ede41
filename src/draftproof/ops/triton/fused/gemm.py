"""GEMM stages of the fused layers kernel, divided into items for the programs.

An item is a tile of columns. Its weights are loaded into shared memory before the program waits for the
previous stage; then the rows are loaded, in pieces of K. An item has more columns than rows (32 to 16), so
that the warps divide the columns and none repeats work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.elementwise import act_gate, inverse_rms, tree_levels, tree_sum_rows
from draftproof.ops.triton.fused.barrier import arrive, first_item, wait
from draftproof.ops.triton.gemm.fused import load_rope_rows, rope_store_tile


@triton.constexpr_function
def piece_sizes(depth: int, largest: int) -> list[int]:
    """Return descending powers of two, at most `largest`, that add up to `depth`."""
    loaded = []
    while depth:
        loaded.append(min(largest, 1 << (depth.bit_length() - 1)))
        depth -= loaded[-1]
    return loaded


@triton.constexpr_function
def num_pieces(depth: int, largest: int) -> int:
    """Return the number of pieces."""
    return len(piece_sizes(depth, largest))


@triton.constexpr_function
def piece_size(depth: int, largest: int, i: int) -> int:
    """Return the size of piece `i`."""
    return piece_sizes(depth, largest)[i]


@triton.constexpr_function
def piece_start(depth: int, largest: int, i: int) -> int:
    """Return the first column of piece `i`."""
    return sum(piece_sizes(depth, largest)[:i])


@triton.jit
def load_weight_pieces(w, rn, first, DEPTH: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr):
    """Load rows rn [BN] of a weight, columns first .. first + DEPTH, in pieces [size, BN]."""
    loaded = ()
    for i in tl.static_range(num_pieces(DEPTH, PIECE)):
        rk = first + piece_start(DEPTH, PIECE, i) + tl.arange(0, piece_size(DEPTH, PIECE, i))
        loaded = loaded + (tl.load(w + rn[None, :] * STRIDE + rk[:, None]),)
    return loaded


@triton.jit
def load_input_pieces(x, rm, R, first, DEPTH: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr):
    """Load rows rm [BM] of x in pieces [BM, size]; other programs of this launch have written them.

    Rows past the end repeat the last row: their results are not stored, and masks would cost instructions.
    """
    loaded = ()
    for i in tl.static_range(num_pieces(DEPTH, PIECE)):
        rk = first + piece_start(DEPTH, PIECE, i) + tl.arange(0, piece_size(DEPTH, PIECE, i))
        pointers = x + tl.minimum(rm, R - 1)[:, None] * STRIDE + rk[None, :]
        loaded = loaded + (tl.load(pointers, cache_modifier=".cg"),)
    return loaded


@triton.jit
def load_embedding_pieces(table, tokens, rm, R, VOCAB, K: tl.constexpr, PIECE: tl.constexpr):
    """Load embedding rows [VOCAB, K] of tokens rm [BM] in pieces; zeros outside the vocabulary."""
    token = tl.load(tokens + tl.minimum(rm, R - 1))
    known = (token >= 0) & (token < VOCAB)
    loaded = ()
    for i in tl.static_range(num_pieces(K, PIECE)):
        rk = piece_start(K, PIECE, i) + tl.arange(0, piece_size(K, PIECE, i))
        pointers = table + token[:, None] * K + rk[None, :]
        loaded = loaded + (tl.load(pointers, mask=known[:, None], other=0.0),)
    return loaded


@triton.jit
def load_norm_pieces(weight, K: tl.constexpr, PIECE: tl.constexpr):
    """Load the weights of a norm in pieces, as fp32."""
    loaded = ()
    for i in tl.static_range(num_pieces(K, PIECE)):
        pointers = weight + piece_start(K, PIECE, i) + tl.arange(0, piece_size(K, PIECE, i))
        loaded = loaded + (tl.load(pointers).to(tl.float32),)
    return loaded


@triton.jit
def inverse_rms_pieces(xs, eps, K: tl.constexpr, PIECE: tl.constexpr):
    """Return 1 / rms of rows in pieces; the tree over a whole row continues above the pieces."""
    sums = ()
    for i in tl.static_range(num_pieces(K, PIECE)):
        wide = xs[i].to(tl.float32)
        sums = sums + (tree_sum_rows(wide * wide),)
    for _ in tl.static_range(tree_levels(num_pieces(K, PIECE))):
        above = ()
        for i in tl.static_range(0, len(sums) - 1, 2):
            above = above + (sums[i] + sums[i + 1],)
        if len(sums) % 2 == 1:
            above = above + (sums[len(sums) - 1],)
        sums = above
    return inverse_rms(sums[0], eps, K)


@triton.jit
def norm_pieces(xs, norm_pieces_, eps, K: tl.constexpr, PIECE: tl.constexpr):
    """Return the RMS norm of rows in pieces."""
    dtype: tl.constexpr = xs[0].dtype
    scale = inverse_rms_pieces(xs, eps, K, PIECE)[:, None]
    rows = ()
    for i in tl.static_range(num_pieces(K, PIECE)):
        unit = (xs[i].to(tl.float32) * scale).to(dtype).to(tl.float32)
        rows = rows + ((unit * norm_pieces_[i][None, :]).to(dtype),)
    return rows


@triton.jit
def norm_linear_pair(
    x, weight, w, bias, rm, R, first, pair_offset, eps, counter, goal, wait_now, tokens, table, token_norm,
    VOCAB, K: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_TOKEN_NORM: tl.constexpr, GRID_SYNC: tl.constexpr,
):  # fmt: skip
    """Multiply the norm of rows rm by `BN // 2` columns from `first` and by their partner columns.

    Both results are rounded, then fp32, [BM, BN // 2]. `bias` points at the address of the bias.
    Partners are adjacent columns of the product, so that one thread holds both.
    HAS_TOKEN_NORM: w [_, 2 K] reads two rows, first the norm of the embedding of a token.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    WEIGHT_DEPTH: tl.constexpr = 2 * K if HAS_TOKEN_NORM else K
    rn = first + tl.arange(0, BN) // 2 + (tl.arange(0, BN) % 2) * pair_offset
    weight_pieces = load_weight_pieces(w, rn, WEIGHT_DEPTH - K, K, WEIGHT_DEPTH, PIECE)
    norm_pieces_ = load_norm_pieces(weight, K, PIECE)
    if HAS_BIAS:
        bias_values = tl.load(tl.load(bias).to(tl.pointer_type(tl.float32)) + rn)
    total = tl.zeros((BM, BN), tl.float32)
    if HAS_TOKEN_NORM:  # independent of the previous stages of this launch
        token_pieces = load_weight_pieces(w, rn, 0, K, WEIGHT_DEPTH, PIECE)
        rows = load_embedding_pieces(table, tokens, rm, R, VOCAB, K, PIECE)
        rows = norm_pieces(rows, load_norm_pieces(token_norm, K, PIECE), eps, K, PIECE)
        for i in tl.static_range(num_pieces(K, PIECE)):
            total = tl.dot(rows[i], token_pieces[i], total)
    if wait_now:
        wait(counter, goal, GRID_SYNC)
    rows = norm_pieces(load_input_pieces(x, rm, R, 0, K, K, PIECE), norm_pieces_, eps, K, PIECE)
    for i in tl.static_range(num_pieces(K, PIECE)):
        total = tl.dot(rows[i], weight_pieces[i], total)
    if HAS_BIAS:
        total += bias_values[None, :]
    low, high = tl.split(tl.reshape(total.to(dtype).to(tl.float32), (BM, BN // 2, 2)))
    return low, high


@triton.jit
def qkv_stage(
    x, weight, w, bias, q, cache, positions, slots, kv_index, rope, plane, eps, counter, goal, R,
    tokens, table, token_norm, VOCAB,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TOKEN_NORM: tl.constexpr,
    GRID_SYNC: tl.constexpr,
):  # fmt: skip
    """Norm, QKV projection, rotary embedding: q [R, NUM_Q * D], k, v to the cache. Return the new goal."""
    MIDDLE: tl.constexpr = D // 2
    HALF: tl.constexpr = BN // 2
    grid_m = tl.cdiv(R, BM)
    items = grid_m * ((NUM_Q + 2 * NUM_KV) * (MIDDLE // HALF))
    first_own = first_item(goal)
    for item in range(first_own, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        head = item // grid_m // (MIDDLE // HALF)
        first = item // grid_m % (MIDDLE // HALF) * HALF
        j = first + tl.arange(0, HALF)
        cos, sin, kv_place, is_real = load_rope_rows(rm, rm < R, j, positions, slots, kv_index, rope, D)
        low, high = norm_linear_pair(
            x, weight, w, bias, rm, R, head * D + first, MIDDLE, eps, counter, goal, item == first_own,
            tokens, table, token_norm, VOCAB, K, PIECE, BM, BN, HAS_BIAS, HAS_TOKEN_NORM, GRID_SYNC,
        )  # fmt: skip
        rope_store_tile(
            low, high, cos, sin, kv_place, is_real, rm, rm < R, head, j, cache, q, plane, NUM_Q, NUM_KV, D
        )
        arrive(counter, GRID_SYNC)
    return goal + items


@triton.jit
def gate_up_stage(
    x, weight, w, bias, out, eps, counter, goal, R,
    INNER: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, GRID_SYNC: tl.constexpr,
):  # fmt: skip
    """Norm, gate and up projections and SiLU-mul: out [R, INNER] of x [R, K]. Return the new goal."""
    HALF: tl.constexpr = BN // 2
    grid_m = tl.cdiv(R, BM)
    items = grid_m * (INNER // HALF)
    first_own = first_item(goal)
    for item in range(first_own, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        first = item // grid_m * HALF
        low, high = norm_linear_pair(
            x, weight, w, bias, rm, R, first, INNER, eps, counter, goal, item == first_own, bias, x, x, 0, K,
            PIECE, BM, BN, HAS_BIAS, False, GRID_SYNC,
        )  # fmt: skip
        rn = first + tl.arange(0, HALF)
        pointers = out + rm[:, None] * INNER + rn[None, :]
        tl.store(pointers, act_gate(low, high, "silu").to(out.dtype.element_ty), mask=(rm < R)[:, None])
        arrive(counter, GRID_SYNC)
    return goal + items


@triton.jit
def add_linear_stage(
    x, w, bias, residual, taps, tap, counter, goal, R,
    N: tl.constexpr, K: tl.constexpr, PANELS: tl.constexpr, RESIDENT_PIECES: tl.constexpr,
    PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, TAPS: tl.constexpr,
    GRID_SYNC: tl.constexpr,
):  # fmt: skip
    """Add x [R, K] times w [N, K] to residual [R, N], rounded as the two ops round. Return the new goal.

    The weight is held one of PANELS parts at a time. Shared memory also holds RESIDENT_PIECES pieces of rows;
    0: all of them. With TAPS and tap >= 0 the result is also stored to taps [R, TAPS, N] at `tap`.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    PANEL_DEPTH: tl.constexpr = K // PANELS
    COUNT: tl.constexpr = num_pieces(PANEL_DEPTH, PIECE)
    STEP: tl.constexpr = RESIDENT_PIECES if RESIDENT_PIECES else COUNT
    grid_m = tl.cdiv(R, BM)
    items = grid_m * (N // BN)
    first_own = first_item(goal)
    one = (R > 0).to(dtype)
    for item in range(first_own, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        rn = (item // grid_m) * BN + tl.arange(0, BN)
        if HAS_BIAS:
            bias_values = tl.load(tl.load(bias).to(tl.pointer_type(tl.float32)) + rn)
        total = tl.zeros((BM, BN), tl.float32)
        inside = (rm < R)[:, None]
        pointers = residual + rm[:, None] * N + rn[None, :]
        old = tl.zeros((BM, BN), dtype)
        for panel in range(PANELS):
            weight_pieces = load_weight_pieces(w, rn, panel * PANEL_DEPTH, PANEL_DEPTH, K, PIECE)
            if (item == first_own) & (panel == 0):
                wait(counter, goal, GRID_SYNC)
            xs = load_input_pieces(x, rm, R, panel * PANEL_DEPTH, PANEL_DEPTH, K, PIECE)
            old = tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
            for first in tl.static_range(0, COUNT, STEP):
                rows = ()
                for i in tl.static_range(first, min(first + STEP, COUNT)):
                    # Loaded values go to shared memory at once, computed values when they are used:
                    # multiplied by one, rows stay in registers until then.
                    rows = rows + (xs[i] * one if RESIDENT_PIECES else xs[i],)
                for i in tl.static_range(first, min(first + STEP, COUNT)):
                    total = tl.dot(rows[i - first], weight_pieces[i], total)
        if HAS_BIAS:
            total += bias_values[None, :]
        summed = (total.to(dtype).to(tl.float32) + old.to(tl.float32)).to(dtype)
        tl.store(pointers, summed, mask=inside)
        if TAPS:
            tap_pointers = taps + (rm[:, None] * TAPS + tap) * N + rn[None, :]
            tl.store(tap_pointers, summed, mask=inside & (tap >= 0))
        arrive(counter, GRID_SYNC)
    return goal + items
