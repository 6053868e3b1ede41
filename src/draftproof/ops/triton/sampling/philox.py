"""Philox-4x32-10 random numbers and Gumbel noise on the device, bit for bit those of the contract."""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.kernel_utils import HAS_PTX


@triton.jit
def philox(seed, position, stream: tl.constexpr, block):
    """Return the four words [B] uint32 of counter (block [B], position, stream, 0) under `seed`."""
    c0 = block.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.full(c0.shape, stream, tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = seed.to(tl.uint64).to(tl.uint32)
    k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    return tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)


@triton.jit
def word_to_uniform(word):
    """Return (word + 0.5) / 2^32 in fp64, exact."""
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def word_to_gumbel(word):
    """Return float32(-log(-log1p(-u))); 1 - u is exact in fp64, so log(1 - u) equals log1p(-u)."""
    return (-tl.log(-tl.log(1.0 - word_to_uniform(word)))).to(tl.float32)


@triton.jit
def approx_log(x):
    """Return log(x) with an error below 1e-6 * max(1, |log x|), by the hardware instruction."""
    if HAS_PTX:
        INSTRUCTION: tl.constexpr = "lg2.approx.f32 $0, $1;"
        return 0.6931472 * tl.inline_asm_elementwise(
            INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log(x)


@triton.jit
def approx_gumbel(word):
    """Return `word_to_gumbel` in fp32 with an error below 1e-4: enough to exclude ids that cannot win.

    For u below 1/16 a series is used, because fp32 loses a small u in 1 - u. Above that the complement 1 - u
    is computed from the inverted word, which keeps its bits near u = 1.
    """
    SCALE: tl.constexpr = 2.3283064365386963e-10
    u = (word.to(tl.float32) + 0.5) * SCALE
    complement = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * SCALE  # 1 - u
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    return -approx_log(tl.where(u < 0.0625, series, -approx_log(complement)))
