"""One row of activations that a GEMM kernel quantises itself, for weights of format w8a8.

Each program reads the row twice: for its largest magnitude, then chunk by chunk beside the weight. The values
and the scale have the bits of `quantize_rows_kernel`: the formulas are shared, and a maximum has no order.
The row is in L2, and one launch is saved. With 2 to 16 rows a separate kernel is faster.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.quantized.row_quantization import INT8_MAX, inverse_scale, quantized


@triton.jit
def row_scale_of(x, row, num_words, K, BLOCK: tl.constexpr):
    """Return the scale of a row of x, and the factor that quantises it; 0 words: the row does not exist.

    Words of two bf16 values are read. The bits of a magnitude in the upper half of a word compare as the
    number does, whatever the lower half is. K is even.
    """
    word = tl.arange(0, BLOCK // 2)
    at = x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * (K // 2) + word
    top = tl.zeros((BLOCK // 2,), tl.int32)
    for k in tl.range(0, K // 2, BLOCK // 2, num_stages=1):
        pair = tl.load(at + k, mask=k + word < num_words, other=0)
        top = tl.maximum(top, tl.maximum(pair & 0x7FFFFFFF, (pair << 16) & 0x7FFFFFFF))
    largest = (tl.max(top, 0) & 0x7FFF0000).to(tl.float32, bitcast=True)
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
