"""Weights in fp8 (e4m3), groups of 4-bit integers and mxfp4, as public GPU checkpoints store them.

A constructor checks shapes and values, so that a malformed checkpoint is refused before anything is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.weights.tensor import WeightTensor

E4M3_MAX = 448.0
FP8_BLOCK = 128  # rows, and columns, of a weight block that share a scale
INT4_ZERO = 8  # zero point of a symmetric 4-bit weight
INT4_GROUPS = (128, 64, 32)  # elements of a row that share a scale, by preference; others: the whole row
MXFP4_GROUP = 32  # elements of a row that share an exponent
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1; the highest bit is the sign
MXFP4_BIAS = 127  # subtracted from a stored exponent
MXFP4_MAX_EXPONENT = 252  # stored; larger ones give values that are not finite
TINY = torch.finfo(torch.float32).tiny


def check_scales(scales: Tensor, shape: tuple[int, ...]) -> None:
    """Raise LoadError unless the scales have this shape and finite values."""
    if tuple(scales.shape) != shape:
        raise LoadError(f"scales of shape {list(scales.shape)}, not {list(shape)}")
    if not bool(scales.float().isfinite().all()):
        raise LoadError("scales that are not finite")


def check_e4m3(data: Tensor) -> None:
    """Raise LoadError unless the matrix is e4m3 without NaN."""
    if data.ndim != 2 or data.dtype != torch.float8_e4m3fn:
        raise LoadError(f"an e4m3 matrix is expected, not {data.dtype} {list(data.shape)}")
    if bool(((data.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise LoadError("e4m3 values that are not numbers")


@dataclass(frozen=True, slots=True)
class Fp8Weight(WeightTensor):
    """Matrix in e4m3 with one fp32 scale per output row; activations are e4m3 with a scale per token.

    `data` [N, K] float8_e4m3fn; `scales` [N] fp32. An element is its value times the scale.
    """

    @property
    def format(self) -> str:
        """Return "fp8"."""
        return "fp8"

    @classmethod
    def create(cls, data: Tensor, scales: Tensor) -> Self:
        """Check and build a weight; a scale of the whole tensor ([] or [1]) is repeated for each row."""
        check_e4m3(data)
        scales = scales.float().flatten()
        if scales.numel() == 1:
            scales = scales.repeat(len(data))
        check_scales(scales, (len(data),))
        return cls(data, scales)

    @classmethod
    def quantize(cls, matrix: Tensor) -> Self:
        """Quantise a float matrix [N, K], each row by its largest magnitude."""
        rows = matrix.detach().float()
        scales = (rows.abs().amax(1) / E4M3_MAX).clamp(min=TINY)
        scaled = (rows / scales[:, None]).clamp_(-E4M3_MAX, E4M3_MAX)
        return cls(scaled.to(torch.float8_e4m3fn), scales)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, computed in fp32 and rounded once, by default to bf16."""
        assert self.scales is not None
        return (self.data.float() * self.scales[:, None]).to(dtype or torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight(WeightTensor):
    """Matrix in e4m3 with an fp32 scale per 128 x 128 block; activations are e4m3 per token and 128 columns.

    `data` [N, K] float8_e4m3fn. `scales` [ceil(N / 128), ceil(K / 128)], or [N, ceil(K / 128)] where output
    rows were selected or concatenated inside a block. An element is its value times the scale.
    """

    @property
    def format(self) -> str:
        """Return "fp8_block"."""
        return "fp8_block"

    @classmethod
    def create(cls, data: Tensor, scales: Tensor) -> Self:
        """Check and build a weight with one scale per 128 x 128 block."""
        check_e4m3(data)
        check_scales(scales, (-(-data.shape[0] // FP8_BLOCK), -(-data.shape[1] // FP8_BLOCK)))
        return cls(data, scales.float())

    @classmethod
    def quantize(cls, matrix: Tensor) -> Self:
        """Quantise a float matrix [N, K], each block by its largest magnitude."""
        rows, depth = matrix.shape
        blocks = -(-rows // FP8_BLOCK), -(-depth // FP8_BLOCK)
        padded = matrix.new_zeros((blocks[0] * FP8_BLOCK, blocks[1] * FP8_BLOCK), dtype=torch.float32)
        padded[:rows, :depth] = matrix.detach()
        cells = padded.view(blocks[0], FP8_BLOCK, blocks[1], FP8_BLOCK)
        scales = (cells.abs().amax((1, 3)) / E4M3_MAX).clamp(min=TINY)
        cells = (cells / scales[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
        return cls(cells.view_as(padded)[:rows, :depth].contiguous().to(torch.float8_e4m3fn), scales)

    def row_scales(self) -> Tensor:
        """Return one scale per output row and block of columns: [N, ceil(K / 128)]."""
        assert self.scales is not None
        if len(self.scales) == len(self.data):
            return self.scales
        return self.scales.repeat_interleave(FP8_BLOCK, 0)[: len(self.data)]

    @property
    def column_unit(self) -> int:
        """Return the columns of a block."""
        return FP8_BLOCK

    def columns(self, begin: int, end: int) -> Self:
        """Return the columns begin..end."""
        assert self.scales is not None
        blocks = slice(begin // FP8_BLOCK, -(-end // FP8_BLOCK))
        return type(self)(self.data[:, begin:end], self.scales[:, blocks])

    def rows(self, ids: Tensor) -> Self:
        """Return the output rows `ids` [n], on the device of the weight."""
        at = ids.to(self.data.device)
        return type(self)(self.data.view(torch.uint8)[at].view(self.data.dtype), self.row_scales()[at])

    @classmethod
    def cat(cls, weights: Sequence[Self]) -> Self:
        """Concatenate along the output rows; scales are repeated by row unless every block stays whole."""
        if len(weights) == 1:
            return weights[0]
        whole = all(len(w.data) % FP8_BLOCK == 0 and w.scales is not w.row_scales() for w in weights)
        scales = [w.scales if whole and w.scales is not None else w.row_scales() for w in weights]
        return cls(torch.cat([weight.data for weight in weights]), torch.cat(scales))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, computed in fp32 and rounded once, by default to bf16."""
        scales = self.row_scales().repeat_interleave(FP8_BLOCK, 1)[:, : self.data.shape[1]]
        return (self.data.float() * scales).to(dtype or torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Int4GroupWeight(WeightTensor):
    """Matrix of 4-bit integers with a scale, and a zero point if asymmetric, per output row and group.

    `data` [N, K / 2] uint8: element 2 j in the low half of byte j, element 2 j + 1 in the high half.
    `scales` [N, K / group] in fp32, bf16 or fp16. `zeros` [N, K / group] uint8, or None: 8 everywhere.
    An element is scale times (integer - zero point), computed in fp32 and rounded to bf16.
    """

    @property
    def format(self) -> str:
        """Return "w4a16"."""
        return "w4a16"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""
        return len(self.data), 2 * self.data.shape[1]

    @property
    def group(self) -> int:
        """Return the number of consecutive elements that share a scale."""
        assert self.scales is not None
        return self.shape[1] // self.scales.shape[1]

    @classmethod
    def create(cls, integers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Self:
        """Check and pack integers [N, K] of 0 to 15 with their scales and zero points [N, K / group]."""
        if integers.ndim != 2 or integers.shape[1] % 2:
            raise LoadError(f"a 4-bit matrix with an even row length is expected, not {list(integers.shape)}")
        columns, depth = integers.shape
        groups = scales.shape[1] if scales.ndim == 2 else 0
        if groups == 0 or depth % groups or (groups > 1 and depth // groups not in INT4_GROUPS):
            raise LoadError(
                f"rows of {depth} with {groups} scales: groups of {', '.join(map(str, INT4_GROUPS))} "
                "or one per row are supported"
            )
        check_scales(scales, (columns, groups))
        if zeros is not None and zeros.shape != scales.shape:
            raise LoadError(f"zero points of shape {list(zeros.shape)}, not {list(scales.shape)}")
        for values in (integers, zeros):
            if (
                values is not None
                and values.numel()
                and not 0 <= int(values.min()) <= int(values.max()) <= 15
            ):
                raise LoadError("4-bit values outside of 0 to 15")
        pairs = integers.to(torch.uint8).view(columns, depth // 2, 2)
        packed = pairs[..., 0] | (pairs[..., 1] << 4)
        return cls(packed, scales.contiguous(), None if zeros is None else zeros.to(torch.uint8).contiguous())

    @classmethod
    def quantize(cls, matrix: Tensor, group: int | None = None) -> Self:
        """Quantise a float matrix [N, K] symmetrically, with scales in bf16.

        Groups are the largest of INT4_GROUPS that divides K, or else whole rows; `group` 0: whole rows.
        """
        columns, depth = matrix.shape
        if depth % 2:
            raise LoadError(f"rows of {depth} elements: an even number is needed")
        if group is None:
            group = next((size for size in INT4_GROUPS if depth % size == 0), depth)
        group = group or depth
        groups = matrix.detach().float().view(columns, -1, group)
        scales = (groups.abs().amax(2) / 7.5).clamp(min=TINY).to(torch.bfloat16)  # [N, K / group]
        integers = (groups / scales.float()[..., None]).round().clamp(-INT4_ZERO, 15 - INT4_ZERO) + INT4_ZERO
        return cls.create(integers.view(columns, depth).to(torch.uint8), scales)

    @property
    def column_unit(self) -> int:
        """Return the columns that share a scale; 2, those of a byte, where a whole row does."""
        return self.group if self.group < self.shape[1] else 2

    def columns(self, begin: int, end: int) -> Self:
        """Return the columns begin..end."""
        assert self.scales is not None
        groups = slice(None) if self.group == self.shape[1] else slice(begin // self.group, end // self.group)
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return type(self)(self.data[:, begin // 2 : end // 2], self.scales[:, groups], zeros)

    def integers(self) -> Tensor:
        """Return the unpacked integers [N, K] as uint8."""
        return torch.stack([self.data & 15, self.data >> 4], 2).flatten(1)

    @classmethod
    def cat(cls, weights: Sequence[Self]) -> Self:
        """Concatenate along the output rows; the smallest group becomes that of all."""
        if len(weights) == 1:
            return weights[0]
        group = min(weight.group for weight in weights)
        has_zeros = any(weight.zeros is not None for weight in weights)
        scales, zeros = [], []
        for weight in weights:
            assert weight.scales is not None
            points = torch.full_like(weight.scales, INT4_ZERO, dtype=torch.uint8)
            points = points if weight.zeros is None else weight.zeros
            scales.append(weight.scales.repeat_interleave(weight.group // group, 1))
            zeros.append(points.repeat_interleave(weight.group // group, 1))
        data = torch.cat([weight.data for weight in weights])
        return cls(data, torch.cat(scales), torch.cat(zeros) if has_zeros else None)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, rounded to bf16 whatever `dtype` is, so that every dtype has the same values."""
        assert self.scales is not None
        scales = self.scales.float().repeat_interleave(self.group, 1)
        zeros = INT4_ZERO if self.zeros is None else self.zeros.float().repeat_interleave(self.group, 1)
        rounded = ((self.integers().float() - zeros) * scales).to(torch.bfloat16)
        return rounded if dtype is None else rounded.to(dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(WeightTensor):
    """Matrix in mxfp4 (OCP microscaling): e2m1 with an exponent per output row and 32 columns.

    `data` [N, K / 2] uint8: element 2 j in the low half of byte j, element 2 j + 1 in the high half.
    `scales` [N, K / 32] uint8. An element is its e2m1 value times 2 ** (exponent - 127), exact in bf16.
    """

    is_requantized = True

    @property
    def format(self) -> str:
        """Return "mxfp4"."""
        return "mxfp4"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""
        return len(self.data), 2 * self.data.shape[1]

    @classmethod
    def create(cls, blocks: Tensor, exponents: Tensor) -> Self:
        """Check and build a weight from bytes [N, K / 2] and exponents [N, K / 32]."""
        for what, part in (("blocks", blocks), ("scales", exponents)):
            if part.ndim != 2 or part.dtype != torch.uint8:
                raise LoadError(f"{what}: a uint8 matrix is expected, not {part.dtype} {list(part.shape)}")
        columns, depth = len(blocks), 2 * blocks.shape[1]
        if depth % MXFP4_GROUP:
            raise LoadError(f"rows of {depth} are not whole groups of {MXFP4_GROUP}")
        if tuple(exponents.shape) != (columns, depth // MXFP4_GROUP):
            raise LoadError(f"scales of shape {list(exponents.shape)} for a matrix of {[columns, depth]}")
        if exponents.numel() and int(exponents.max()) > MXFP4_MAX_EXPONENT:
            raise LoadError("scales that are not finite")
        return cls(blocks, exponents)

    @property
    def column_unit(self) -> int:
        """Return the columns that share an exponent."""
        return MXFP4_GROUP

    def columns(self, begin: int, end: int) -> Self:
        """Return the columns begin..end."""
        assert self.scales is not None
        groups = slice(begin // MXFP4_GROUP, end // MXFP4_GROUP)
        return type(self)(self.data[:, begin // 2 : end // 2], self.scales[:, groups])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, by default in bf16, which holds every value exactly."""
        assert self.scales is not None
        make = partial(torch.tensor, dtype=torch.bfloat16, device=self.data.device)
        codes = make([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
        pairs = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], 1)  # [256, 2]: of each byte
        factors = make([2.0 ** (exponent - MXFP4_BIAS) for exponent in range(MXFP4_MAX_EXPONENT + 1)])
        values = pairs[self.data.int()].flatten(1)  # [N, K]
        groups = values.view(len(values), -1, MXFP4_GROUP)
        groups *= factors[self.scales.int()][..., None]
        return values if dtype is None else values.to(dtype)
