"""Philox-4x32-10: noise as a pure function of (seed, position, stream, id). See contract/sampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import device, inlined

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


@device
def philox(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of one block of counter and key words (all as int64)."""
    for _ in range(10):
        product_0 = np.uint64(c0) * np.uint64(MULTIPLIER_0)
        product_1 = np.uint64(c2) * np.uint64(MULTIPLIER_1)
        high_0, low_0 = np.int64(product_0 >> np.uint64(32)), np.int64(product_0) & _LOW
        high_1, low_1 = np.int64(product_1 >> np.uint64(32)), np.int64(product_1) & _LOW
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + WEYL_0) & _LOW, (k1 + WEYL_1) & _LOW
    return c0, c1, c2, c3


@device
def vphilox(c0: Any, c1: int, c2: int, k0: int, k1: int) -> Any:
    """Return 16 blocks: c0 is a vector of counters, the other words are common, c3 = 0."""
    a, b, c, d = c0, v.isplat(c1), v.isplat(c2), v.isplat(0)
    for _ in range(10):
        high_0, low_0 = v.imul_high(a, v.isplat(MULTIPLIER_0)), v.imul(a, v.isplat(MULTIPLIER_0))
        high_1, low_1 = v.imul_high(c, v.isplat(MULTIPLIER_1)), v.imul(c, v.isplat(MULTIPLIER_1))
        a, b = v.ixor(v.ixor(high_1, b), v.isplat(k0)), low_1
        c, d = v.ixor(v.ixor(high_0, d), v.isplat(k1)), low_0
        k0, k1 = (k0 + WEYL_0) & _LOW, (k1 + WEYL_1) & _LOW
    return a, b, c, d


@inlined
def unit(word: int) -> float:
    """Return a 32-bit word as a number in (0, 1)."""
    return (np.float64(word) + 0.5) * 2.0**-32


@device
def gumbel(word: int) -> Any:
    """Return the Gumbel noise of a word, fp32."""
    return np.float32(-math.log(-math.log1p(-unit(word))))


@device
def noise_word(token: int, position: int, stream: int, k0: int, k1: int) -> int:
    """Return the word of one token id."""
    w0, w1, w2, w3 = philox(token // 4, position & _LOW, stream, 0, k0, k1)
    lane = token % 4
    if lane == 0:
        return w0
    if lane == 1:
        return w1
    if lane == 2:
        return w2
    return w3
