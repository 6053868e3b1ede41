"""Weights in blocks of integers with a scale and a minimum per group, as GGUF files have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.weights.tensor import WeightTensor
from draftproof.ops.contract.block_scales import SUPER_BLOCK, float_scales, pack_scales, split_scales

INT4_GROUP = 32  # elements of a row that share a scale and a minimum
MIN_FP16_SCALE = 2.0**-14  # the smallest normal fp16: a group of equal elements has no range


@dataclass(frozen=True, slots=True)
class BlockWeight(WeightTensor):
    """Matrix of integers with a scale and a minimum per output row and group of its elements.

    `data` [N, K] int8, or uint8 for integers of 4 bits, 0..15. `scales` [N, K / group, 2] scale and minimum,
    or [N, K / group, 1] without minimum, fp16 or fp32; or uint8, two levels as in `block_scales`. An element
    is scale times integer plus minimum. The packed layout depends on these types and shapes, not on the
    values, so parts of a weight are packed alike.
    """

    @property
    def format(self) -> str:
        """Return "blocks"."""
        return "blocks"

    @property
    def stored_as(self) -> str:
        """Return the number of bits of an integer."""
        return "int4" if self.data.dtype == torch.uint8 else "int8"

    @property
    def group(self) -> int:
        """Return the number of consecutive elements that share a scale."""
        assert self.scales is not None
        if self.has_two_levels:
            return SUPER_BLOCK // split_scales(self.scales[:1])[1].shape[2]
        return self.data.shape[1] // self.scales.shape[1]

    @property
    def has_two_levels(self) -> bool:
        """Return whether the scales are in two levels."""
        return self.scales is not None and self.scales.dtype == torch.uint8

    @property
    def column_unit(self) -> int:
        """Return the columns of a group, or of a block of activations, which is as long or longer."""
        return max(self.group, INT4_GROUP)

    def columns(self, begin: int, end: int) -> Self:
        """Return the columns begin..end; scales in two levels become one unless these are super-blocks."""
        assert self.scales is not None
        scales, unit = self.scales, SUPER_BLOCK if self.has_two_levels else self.group
        if begin % unit or end % unit:
            scales, unit = float_scales(scales), self.group
        return type(self)(self.data[:, begin:end], scales[:, begin // unit : end // unit])

    @classmethod
    def cat(cls, weights: Sequence[Self]) -> Self:
        """Concatenate along the output rows; all take the smallest group and the widest types."""
        if len(weights) == 1:
            return weights[0]
        group = min(weight.group for weight in weights)
        scales = [weight.scales for weight in weights if weight.scales is not None]
        is_4bit = all(weight.data.dtype == torch.uint8 for weight in weights)
        data = torch.cat([weight.data if is_4bit else weight.data.view(torch.int8) for weight in weights])
        if all(weight.has_two_levels for weight in weights):
            levels = [split_scales(scale) for scale in scales]
            kinds = max(bases.shape[2] for bases, _ in levels)
            bases = _join([bases for bases, _ in levels], [1] * len(levels), kinds)
            repeats = [weight.group // group for weight in weights]
            return cls(data, pack_scales(bases, _join([factors for _, factors in levels], repeats, kinds, 2)))
        is_fp16 = all(scale.dtype == torch.float16 for scale in scales)
        plain = [scale if is_fp16 else float_scales(scale) for scale in scales]
        kinds = max(scale.shape[2] for scale in plain)
        return cls(data, _join(plain, [weight.group // group for weight in weights], kinds))

    @classmethod
    def quantize(cls, matrix: Tensor) -> Self:
        """Quantise a float matrix [N, K] to 4 bits: groups of 32 with an fp16 scale and minimum."""
        columns, depth = matrix.shape
        if depth % INT4_GROUP:
            raise LoadError(f"rows of {depth} are not whole groups of {INT4_GROUP}")
        groups = matrix.detach().float().view(columns, -1, INT4_GROUP)
        low = groups.amin(2, keepdim=True).half().float()
        scale = ((groups.amax(2, keepdim=True) - low) / 15).clamp(min=MIN_FP16_SCALE).half().float()
        integers = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8)
        return cls(integers.view(columns, depth), torch.cat([scale, low], 2).half())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, computed in fp32 and rounded once, by default to bf16."""
        assert self.scales is not None
        parts = [part.repeat_interleave(self.group, 1) for part in float_scales(self.scales).unbind(2)]
        values = parts[0] * self.data
        return (values + parts[1] if len(parts) > 1 else values).to(dtype or torch.bfloat16)


def _join(parts: Sequence[Tensor], repeats: Sequence[int], kinds: int, axis: int = 1) -> Tensor:
    """Concatenate rows of scales [N, ..., F], each repeated along `axis`, with 0 up to F = `kinds`."""
    pairs = zip(parts, repeats, strict=True)
    fine = [part.repeat_interleave(count, axis) if count > 1 else part for part, count in pairs]
    return torch.cat([torch.nn.functional.pad(part, (0, kinds - part.shape[-1])) for part in fine])
