"""Philox-4x32-10 and the noise made from it, on the device: the integers of the contract, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.runtime import INTERPRETED

HARDWARE = tl.constexpr(not INTERPRETED)  # the interpreter knows no instructions


@triton.jit
def philox(seed, position, stream: tl.constexpr, block):
    """The four words of counter (block, position, stream, 0) under `seed`; block [B] -> four [B] uint32."""
    c0 = block.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.full(c0.shape, stream, tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = seed.to(tl.uint64).to(tl.uint32)
    k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    return tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)


@triton.jit
def uniform_of(word):
    """(word + 0.5) / 2^32, fp64, exact."""
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gumbel_of(word):
    """float32(-log(-log1p(-u))). 1 - u is exact in fp64, so log(1 - u) is as good as log1p(-u)."""
    return (-tl.log(-tl.log(1.0 - uniform_of(word)))).to(tl.float32)


@triton.jit
def nearly_log(x):
    """log within 1e-6 of its value, or of 1 where that is less: the hardware's, a tenth of the library's."""
    if HARDWARE:
        two: tl.constexpr = "lg2.approx.f32 $0, $1;"
        return 0.6931472 * tl.inline_asm_elementwise(two, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log(x)


@triton.jit
def nearly_gumbel_of(word):
    """gumbel_of within 1e-4, in fp32: enough to say who cannot win.

    u below 1/16 by series (fp32 loses a small u in 1 - u), above by the complement 1 - u, which has its own
    exact bits near u = 1.
    """
    SCALE: tl.constexpr = 2.3283064365386963e-10
    u = (word.to(tl.float32) + 0.5) * SCALE
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * SCALE  # 1 - u
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    return -nearly_log(tl.where(u < 0.0625, series, -nearly_log(rest)))
