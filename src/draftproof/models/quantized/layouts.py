"""Layouts of quantised linear layers in files of compressed-tensors, AWQ, GPTQ, fp8 and mxfp4 checkpoints.

A layout takes the stored tensors of one layer by their suffix and returns the weight in its format. Shapes,
types and scales are checked, so that a damaged file is refused before anything is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.quantized.config import REQUANTIZE, StoredScheme
from draftproof.models.weight_formats import W8A8Weight, WeightTensor
from draftproof.models.weights.low_bit import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4GroupWeight,
    Mxfp4Weight,
    check_scales,
)

PER_WORD = 8  # 4-bit values in an int32
AWQ_COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]  # 4 bits of a word that hold its columns 0 to 7
ONE_IN_EACH = 0x11111111  # adds 1 to every 4-bit value of a word


def unpack_words(words: Tensor) -> Tensor:
    """Return the 4-bit values [A, 8 B] uint8 of words [A, B] int32, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    return torch.stack([data & 15, data >> 4], -1).flatten(1)


def pack_words(values: Tensor) -> Tensor:
    """Pack 4-bit values [A, B] uint8 into words [A, ceil(B / 8)] int32, the lowest bits first."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % PER_WORD))
    pairs = padded.view(len(values), -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous().view(torch.int32)


def _int8(parts: Mapping[str, Tensor], shape: tuple[int, int], scheme: StoredScheme) -> WeightTensor:
    """Read int8 [N, K] with a scale per channel, or one that is repeated for every channel."""
    scales = parts["weight_scale"].float().flatten()
    if scales.numel() == 1:
        scales = scales.repeat(shape[0])
    check_scales(scales, shape[:1])
    return W8A8Weight(parts["weight"], scales)


def _fp8(parts: Mapping[str, Tensor], shape: tuple[int, int], scheme: StoredScheme) -> WeightTensor:
    return Fp8Weight.create(parts["weight"], parts["weight_scale"])


def _fp8_block(parts: Mapping[str, Tensor], shape: tuple[int, int], scheme: StoredScheme) -> WeightTensor:
    return Fp8BlockWeight.create(parts["weight"], parts[scheme.scale_name])


def _int4_packed(parts: Mapping[str, Tensor], shape: tuple[int, int], scheme: StoredScheme) -> WeightTensor:
    """Read words [N, ceil(K / 8)] and zero points [ceil(N / 8), groups] of compressed-tensors."""
    columns, depth = shape
    stored_shape = parts["weight_shape"].tolist()
    if stored_shape != [columns, depth]:
        raise LoadError(f"weight_shape is {stored_shape}, but should be {[columns, depth]}")
    groups = _num_groups(depth, scheme.group_size)
    _check(parts, "weight_packed", (columns, -(-depth // PER_WORD)), torch.int32)
    _check(parts, "weight_scale", (columns, groups))
    _check_order(parts.get("weight_g_idx"), depth, depth // groups)
    integers = unpack_words(parts["weight_packed"])[:, :depth]
    zeros = None
    if scheme.has_zero_points:
        _check(parts, "weight_zero_point", (-(-columns // PER_WORD), groups), torch.int32)
        zeros = unpack_words(parts["weight_zero_point"].T)[:, :columns].T
    return Int4GroupWeight.create(integers, parts["weight_scale"], zeros)


def _awq(parts: Mapping[str, Tensor], shape: tuple[int, int], scheme: StoredScheme) -> WeightTensor:
    """Read words [K, N / 8] and zero points [groups, N / 8], both with interleaved columns."""
    columns, depth = shape
    groups = _num_groups(depth, scheme.group_size)
    _check_words(columns)
    _check(parts, "qweight", (depth, columns // PER_WORD), torch.int32)
    _check(parts, "qzeros", (groups, columns // PER_WORD), torch.int32)
    _check(parts, "scales", (groups, columns))
    integers, zeros = (_awq_columns(unpack_words(parts[name])) for name in ("qweight", "qzeros"))
    return Int4GroupWeight.create(integers.T.contiguous(), parts["scales"].T.contiguous(), zeros.T)


def _awq_columns(values: Tensor) -> Tensor:
    """Put the interleaved columns of each word [A, N] into ascending order."""
    return values.view(len(values), -1, PER_WORD)[..., AWQ_COLUMNS].flatten(1)


def _gptq(parts: Mapping[str, Tensor], shape: tuple[int, int], scheme: StoredScheme) -> WeightTensor:
    """Read words [K / 8, N] and zero points [groups, N / 8].

    Version 1 stores zero points less one, subtracted from whole words; adding to words reverses the borrows.
    """
    columns, depth = shape
    groups = _num_groups(depth, scheme.group_size)
    _check_words(columns)
    _check_words(depth)
    _check(parts, "qweight", (depth // PER_WORD, columns), torch.int32)
    _check(parts, "qzeros", (groups, columns // PER_WORD), torch.int32)
    _check(parts, "scales", (groups, columns))
    _check_order(parts.get("g_idx"), depth, depth // groups)
    zeros = unpack_words(parts["qzeros"] + ONE_IN_EACH * scheme.zero_offset)
    return Int4GroupWeight.create(
        unpack_words(parts["qweight"].T), parts["scales"].T.contiguous(), zeros.T.contiguous()
    )


def _mxfp4(parts: Mapping[str, Tensor], shape: tuple[int, int], scheme: StoredScheme) -> WeightTensor:
    return Mxfp4Weight.create(parts["weight_blocks"], parts["weight_scales"])


def _num_groups(depth: int, size: int) -> int:
    if size and depth % size:
        raise LoadError(f"rows of {depth} are not whole groups of {size}")
    return depth // size if size else 1


def _check_words(size: int) -> None:
    if size % PER_WORD:
        raise LoadError(f"{size} rows or columns do not fill words of {PER_WORD} values")


def _check(
    parts: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """Raise LoadError unless a part has this shape and type; `dtype` None: a float type."""
    found = parts[name]
    if tuple(found.shape) != shape:
        raise LoadError(f"{name} is {list(found.shape)} but should be {list(shape)}")
    if (dtype is None and not found.is_floating_point()) or (dtype is not None and found.dtype != dtype):
        raise LoadError(f"{name} is {found.dtype}, not {dtype or 'a float type'}")


def _check_order(group_of: Tensor | None, depth: int, size: int) -> None:
    """Raise LoadError if columns belong to groups in another order than their own."""
    if group_of is None:
        return
    if tuple(group_of.shape) != (depth,):
        raise LoadError(f"the group index is {list(group_of.shape)} but should be {[depth]}")
    if not torch.equal(group_of.long(), torch.arange(depth) // size):
        raise LoadError(
            "columns in the order of activations (desc_act with g_idx) are not supported: use a checkpoint "
            f"made with desc_act=False or actorder='static', or {REQUANTIZE}"
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Stored tensors of a layer and the function that reads them."""

    read: Callable[[Mapping[str, Tensor], tuple[int, int], StoredScheme], WeightTensor]
    needed: tuple[str, ...]  # suffixes; the first holds the matrix
    optional: tuple[str, ...] = ()
    dtype: torch.dtype | None = None  # of the matrix, where its name does not tell it from a float one


LAYOUTS = {
    "int8": Layout(_int8, ("weight", "weight_scale"), dtype=torch.int8),
    "fp8": Layout(_fp8, ("weight", "weight_scale"), dtype=torch.float8_e4m3fn),
    "fp8_block": Layout(_fp8_block, ("weight",), dtype=torch.float8_e4m3fn),  # and `scale_name`
    "int4_packed": Layout(
        _int4_packed,
        ("weight_packed", "weight_scale", "weight_shape"),
        ("weight_zero_point", "weight_g_idx"),
    ),
    "awq": Layout(_awq, ("qweight", "qzeros", "scales")),
    "gptq": Layout(_gptq, ("qweight", "qzeros", "scales"), ("g_idx",)),
    "mxfp4": Layout(_mxfp4, ("weight_blocks", "weight_scales")),  # by `split_stacked_experts`
}


def read_layer(
    module: str, tensors: dict[str, Tensor], shape: tuple[int, int], scheme: StoredScheme
) -> WeightTensor | None:
    """Remove the tensors of a quantised layer and return its weight [N, K]; None: it is stored as floats.

    LoadError names the layer and what is missing or does not fit.
    """
    layout = LAYOUTS[scheme.layout]
    needed = dict.fromkeys([*layout.needed, *([scheme.scale_name] if layout.dtype else [])])
    present = [suffix for suffix in (*needed, *layout.optional) if f"{module}.{suffix}" in tensors]
    if not set(present) - {"weight"} and is_float(tensors.get(f"{module}.weight")):
        return None
    try:
        if missing := [suffix for suffix in needed if suffix not in present]:
            raise LoadError(f"{', '.join(missing)} missing")
        _check_zero_points(module, tensors, scheme)
        names = [suffix for suffix in present if f"{module}.{suffix}" in tensors]
        parts = {suffix: tensors.pop(f"{module}.{suffix}") for suffix in names}
        matrix = parts[layout.needed[0]]
        if layout.dtype is not None:
            _check(parts, "weight", shape, layout.dtype)
        elif matrix.ndim != 2:
            raise LoadError(f"{layout.needed[0]} is {list(matrix.shape)}, not a matrix")
        return layout.read(parts, shape, scheme)
    except LoadError as error:
        raise LoadError(f"{module}: {error}") from error


def _check_zero_points(module: str, tensors: dict[str, Tensor], scheme: StoredScheme) -> None:
    """Remove zero points of a symmetric scheme if they are all zero, as old tools wrote them."""
    name = f"{module}.weight_zero_point"
    if scheme.layout == "int4_packed" and scheme.has_zero_points:
        if name not in tensors:
            raise LoadError("weight_zero_point is missing, though the scheme is not symmetric")
    elif name in tensors and bool(tensors.pop(name).any()):
        raise LoadError("weight_zero_point is not zero, though the scheme is symmetric")


def is_float(tensor: Tensor | None) -> bool:
    """Return whether the tensor is stored in fp32, bf16 or fp16."""
    return tensor is not None and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
