"""Two-level scales of weights in blocks, as the K-quants of GGUF store them.

A super-block is 256 consecutive elements of a row. It has an fp16 base for the scales and one for the
minimums, and an int8 factor per group for each. A scale is base times factor, which fp32 holds without
rounding. The stored form is uint8 [N, K / 256, bytes]: the bases, then the factors group by group.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUPER_BLOCK = 256  # elements of a row that share a base
BASE_BYTES = 2


def pack_scales(bases: Tensor, factors: Tensor) -> Tensor:
    """Return the stored form of bases [N, S, F] fp16 and factors [N, S, groups, F] int8."""
    parts = bases.contiguous().view(torch.uint8), factors.contiguous().view(torch.uint8).flatten(2)
    return torch.cat(parts, 2)


def split_scales(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bases [N, S, F] fp16 and the factors [N, S, groups, F] int8 of the stored form."""
    # F = 2 means 2 * (2 + groups) bytes, F = 1 means 2 + groups bytes; groups are 8 or 16
    kinds = 2 if stored.shape[2] in (2 * (BASE_BYTES + 8), 2 * (BASE_BYTES + 16)) else 1
    bases = stored[..., : BASE_BYTES * kinds].contiguous().view(torch.float16)
    factors = stored[..., BASE_BYTES * kinds :].contiguous().view(torch.int8)
    return bases, factors.view(*stored.shape[:2], -1, kinds)


def float_scales(scales: Tensor) -> Tensor:
    """Return scales and minimums [N, K / group, F] in fp32 from either form."""
    if scales.dtype != torch.uint8:
        return scales.float()
    bases, factors = split_scales(scales)
    return (bases[:, :, None].float() * factors).flatten(1, 2)
