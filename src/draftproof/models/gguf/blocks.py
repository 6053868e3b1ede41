"""Blocks of GGUF tensors as integers, scales and minimums, without rounding. Does not import torch.

An element is scale times integer plus minimum. Integers of 4 bits are 0..15 in uint8, all others are int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# integers, then scale and minimum [blocks, groups] where there is one, then their bases [blocks, 1], if any
Decoded = tuple[Array, tuple[Array, ...], tuple[Array, ...]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Integers of rows, and the scale and minimum of each group of their elements.

    K-quants have bases: a scale or minimum is then base times factor, and `scales` holds the factors.
    """

    integers: Array  # [N, K] int8, or uint8 for 0..15
    scales: Array  # [N, K / group, 2] scale and minimum, or [N, K / group, 1] scale; fp16, or int8 factors
    bases: Array | None  # [N, K / 256, 2 or 1] fp16


def read_blocks(rows: Array, kind: str, block_bytes: int) -> Blocks:
    """Decode rows [N, bytes of a row] of a type of `DECODERS`."""
    with np.errstate(all="ignore"):  # a damaged scale is found by the caller
        integers, scales, bases = DECODERS[kind](rows.reshape(-1, block_bytes))
    parts = [np.stack(part, axis=-1).reshape(len(rows), -1, len(scales)) for part in (scales, bases) if part]
    return Blocks(integers.reshape(len(rows), -1), parts[0], parts[1] if bases else None)


def _half(data: Array, at: int) -> Array:
    """Return the fp16 at byte `at` of each block, [blocks, 1]."""
    return np.ascontiguousarray(data[:, at : at + 2]).view(np.float16)


def _nibbles(data: Array) -> Array:
    """Return the low, then the high halves of bytes: [blocks, n] -> [blocks, 2 n]."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _fifth_bits(data: Array) -> Array:
    """Return bit i of a 32-bit word, shifted to bit 4: [blocks, 4] -> [blocks, 32]."""
    words = np.ascontiguousarray(data).view(np.uint32)
    return (((words >> np.arange(32, dtype=np.uint32)) & 1) << 4).astype(np.uint8)


def _q4_0(data: Array) -> Decoded:
    scale = _half(data, 0)
    return _nibbles(data[:, 2:]), (scale, scale * np.float16(-8)), ()


def _q4_1(data: Array) -> Decoded:
    return _nibbles(data[:, 4:]), (_half(data, 0), _half(data, 2)), ()


def _q5_0(data: Array) -> Decoded:
    integers = (_nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6])).view(np.int8) - np.int8(16)
    return integers, (_half(data, 0),), ()


def _q5_1(data: Array) -> Decoded:
    integers = _nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8])
    return integers.view(np.int8), (_half(data, 0), _half(data, 2)), ()


def _q8_0(data: Array) -> Decoded:
    return data[:, 2:].view(np.int8), (_half(data, 0),), ()


def _scales_6bit(packed: Array) -> tuple[Array, Array]:
    """Return 8 scales and 8 minimums of 6 bits from 12 bytes: [blocks, 8] each."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales.view(np.int8), minimums.view(np.int8)


def _groups_of_64(data: Array) -> Array:
    """Return the halves of 128 bytes: 32 low, 32 high of each 32 bytes, [blocks, 8, 32]."""
    parts = data.reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (parts & 15).reshape(-1, 8, 32)


def _q4_k(data: Array) -> Decoded:
    scales, minimums = _scales_6bit(data[:, 4:16])
    return _groups_of_64(data[:, 16:]), (scales, minimums), (_half(data, 0), -_half(data, 2))


def _q5_k(data: Array) -> Decoded:
    scales, minimums = _scales_6bit(data[:, 4:16])
    bits = (data[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1  # [blocks, 8, 32]
    integers = _groups_of_64(data[:, 48:]) | (bits << 4)
    return integers.view(np.int8), (scales, minimums), (_half(data, 0), -_half(data, 2))


def _q6_k(data: Array) -> Decoded:
    low = data[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    high = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    integers = (low & 15).reshape(-1, 256) | ((high & 3) << 4).reshape(-1, 256)
    scales = data[:, 192:208].view(np.int8)  # [blocks, 16]
    return integers.view(np.int8) - np.int8(32), (scales,), (_half(data, 208),)


DECODERS: dict[str, Callable[[Array], Decoded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
