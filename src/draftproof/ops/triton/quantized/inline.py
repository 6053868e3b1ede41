"""Rows of activations that a GEMM kernel quantises itself, for weights of format w8a8.

Each program reads all of its rows twice: for their largest magnitudes, then chunk by chunk beside the weight.
The values and scales have the bits of `quantize_rows_kernel`: the formulas are shared, and a maximum has no
order. Few rows lie in L2, and one launch is saved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.kernel_utils import prefetch_l2
from draftproof.ops.triton.quantized.rows import INT8_MAX, inverse_scale, quantized

LINE_BYTES = tl.constexpr(128)  # of the L2 cache
LOOP_STAGES = tl.constexpr(4)  # blocks of several rows in flight while the largest magnitudes are searched


@triton.jit
def prefetch_weight(w, wn, col_ok, K, LINES: tl.constexpr):
    """Prefetch the first LINES lines of the int8 weight rows wn to L2."""
    row = tl.where(col_ok, wn, 0).to(tl.int64)
    prefetch_l2(w + row[:, None] * K + tl.minimum(tl.arange(0, LINES) * LINE_BYTES, K - 1)[None, :])


@triton.jit
def existing_rows(rm, row_ok, ROWS: tl.constexpr):
    """Return the first ROWS of the rows rm and which of them exist; fewer than all of rm begin with row 0."""
    if rm.shape[0] == ROWS:
        return rm, row_ok
    row = tl.arange(0, ROWS)
    return row, row < tl.sum(row_ok.to(tl.int32), 0)


@triton.jit
def repeated_rows(tile, BM: tl.constexpr):
    """Return a tile of BM rows that repeats the rows of `tile`: no result of the others is stored."""
    ROWS: tl.constexpr = tile.shape[0]
    if ROWS == BM:
        return tile
    COLUMNS: tl.constexpr = tile.shape[1]
    return tl.reshape(tl.broadcast_to(tile[None, :, :], (BM // ROWS, ROWS, COLUMNS)), (BM, COLUMNS))


@triton.jit
def quantized_tile(values, inverse, BM: tl.constexpr):
    """Return a tile [BM, BK] in int8 that repeats the rows of `values`.

    The maximum over an axis of one element changes nothing. Without it the compiler quantises after the tile
    has the layout of the tensor core, in which each warp holds all of it.
    """
    integers = quantized(values.to(tl.float32), inverse[:, None], tl.int8)
    return repeated_rows(tl.max(integers[None, :, :], 0).to(tl.int8), BM)


@triton.jit
def row_scales_of(x, row, ok, K, BLOCK: tl.constexpr):
    """Return the scales of rows of x, and the factors that quantise them.

    Words of two bf16 values are read. The bits of a magnitude in the upper half of a word compare as the
    number does, whatever the lower half is. K is even.
    """
    ROWS: tl.constexpr = row.shape[0]
    words, word = K // 2, tl.arange(0, BLOCK // 2)
    at = x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64)[:, None] * words + word[None, :]
    top = tl.zeros((ROWS, BLOCK // 2), tl.int32)
    STAGES: tl.constexpr = 1 if ROWS == 1 else LOOP_STAGES
    for k in tl.range(0, words, BLOCK // 2, num_stages=STAGES):
        pair = tl.load(at + k, mask=ok[:, None] & (k + word < words)[None, :], other=0)
        top = tl.maximum(top, tl.maximum(pair & 0x7FFFFFFF, (pair << 16) & 0x7FFFFFFF))
    largest = (tl.max(top, 1) & 0x7FFF0000).to(tl.float32, bitcast=True)
    return tl.math.div_rn(largest, INT8_MAX), inverse_scale(largest, INT8_MAX)


@triton.jit
def quantized_words(at, ok, inverse):
    """Load four bf16 values as one int64 at each address, and return them as int8 in one int32."""
    four = tl.load(at, mask=ok, other=0)
    word = tl.zeros_like(four).to(tl.int32)
    for i in tl.static_range(4):
        value = ((four >> (16 * i)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        word |= (quantized(value, inverse, tl.int8).to(tl.int32) & 255) << (8 * i)
    return word
