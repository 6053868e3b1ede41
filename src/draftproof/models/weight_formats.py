"""Weight formats: how a checkpoint stores a weight, and how it is packed for a backend.

A new format is one class here or in `weights/`. A backend that multiplies a format directly lists
its name in `ForwardOps.weight_formats` and receives it in `pack_quantized`. Every other backend receives the
dequantised weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError, LoadError
from draftproof.models.weights.blocks import INT4_GROUP as INT4_GROUP
from draftproof.models.weights.blocks import BlockWeight as BlockWeight
from draftproof.models.weights.low_bit import Fp8BlockWeight as Fp8BlockWeight
from draftproof.models.weights.low_bit import Fp8Weight as Fp8Weight
from draftproof.models.weights.low_bit import Int4GroupWeight as Int4GroupWeight
from draftproof.models.weights.sharded import HeadNormWeight, RowParallelWeight, VocabParallelWeight
from draftproof.models.weights.tensor import FLOAT_NAMES
from draftproof.models.weights.tensor import FloatWeight as FloatWeight
from draftproof.models.weights.tensor import WeightTensor as WeightTensor
from draftproof.ops import Ops


@dataclass(frozen=True, slots=True)
class Int8RowWeight(WeightTensor):
    """Matrix in int8 with one fp32 scale per output row."""

    suffixes = {"scales": ".scale"}
    limit: ClassVar[int] = 127

    @property
    def format(self) -> str:
        """Return "int8"."""
        return "int8"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, rounded to bf16 whatever `dtype` is, so that every dtype has the same values."""
        assert self.scales is not None
        rounded = (self.data.float() * self.scales.float()[:, None]).to(torch.bfloat16)
        return rounded if dtype is None else rounded.to(dtype)

    @classmethod
    def from_parts(cls, name: str, data: Tensor, parts: Mapping[str, Tensor]) -> Self:
        """Build the weight from the matrix and its scales."""
        scales = parts.get("scales")
        if scales is None or scales.shape != data.shape[:1]:
            raise LoadError(f"{name} is int8, but {name}.scale does not hold one scale per row")
        return cls(data, scales)

    @classmethod
    def quantize(cls, matrix: Tensor) -> Self:
        """Quantise a float matrix [N, K], each row by its largest magnitude."""
        rows = matrix.detach().float()
        scales = (rows.abs().amax(1) / cls.limit).clamp(min=torch.finfo(torch.float32).tiny)
        return cls((rows / scales[:, None]).round().clamp(-cls.limit, cls.limit).to(torch.int8), scales)

    def stored(self, name: str) -> dict[str, Tensor]:
        """Return the tensors that a file holds for this weight."""
        assert self.scales is not None
        return {name: self.data, name + self.suffixes["scales"]: self.scales}


@dataclass(frozen=True, slots=True)
class W8A8Weight(Int8RowWeight):
    """Int8 matrix that backends multiply by int8 activations, which are quantised per row."""

    @property
    def format(self) -> str:
        """Return "w8a8"."""
        return "w8a8"


# dtype of the stored matrix -> format; every other dtype is a FloatWeight
FORMATS: dict[torch.dtype, type[WeightTensor]] = {torch.int8: Int8RowWeight}

# Names of linear layers; embeddings, routers and the LM head stay floats.
LINEAR_SUFFIXES = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
HEADS_SUFFIX = ".kv_b_proj.weight"  # multiplied head by head in floats, see `latent_attention`
# format -> quantisation of a float matrix [N, K]
QUANTIZERS: dict[str, Callable[[Tensor], WeightTensor]] = {
    "w8a8": W8A8Weight.quantize,
    "blocks": BlockWeight.quantize,
    "fp8": Fp8Weight.quantize,
    "w4a16": Int4GroupWeight.quantize,
}


def used_formats(weights: Mapping[str, WeightTensor], ops: Ops) -> str:
    """Return the quantised formats that the backend multiplies, by decreasing size; "" if there is none."""
    sizes: Counter[str] = Counter()
    for weight in weights.values():
        is_float = isinstance(weight, FloatWeight) or weight.stored_as in FLOAT_NAMES.values()
        if not is_float and weight.format in ops.forward.weight_formats:
            sizes[weight.stored_as] += math.prod(weight.shape)
    return "/".join(name for name, _ in sizes.most_common())


def _load_format(quantization: str, ops: Ops) -> str:
    """Return the format that the engine's option makes on load for a backend, or ""."""
    formats = {"int8": "w8a8", "fp8": "fp8", "int4": ops.forward.int4_format}
    return formats.get(quantization, "")


def quantizer(quantization: str, ops: Ops) -> Callable[[Tensor], WeightTensor] | None:
    """Return the quantisation on load that the engine's option selects for a backend, or None."""
    return QUANTIZERS.get(_load_format(quantization, ops))


def quantized_format(name: str, weight: WeightTensor, quantization: str, ops: Ops) -> str:
    """Return the format to which a weight is quantised on load; "" if it is not."""
    is_quantized = (
        name.endswith(LINEAR_SUFFIXES) and not name.endswith(HEADS_SUFFIX) and _is_quantizable(weight)
    )
    return _load_format(quantization, ops) if is_quantized else ""


def quantize_linears(weights: dict[str, WeightTensor], quantization: str, ops: Ops) -> None:
    """Quantise the float weights of linear layers in place, one by one, if `quantization` is made on load."""
    quantize = linear_quantizer(weights, quantization, ops)
    for name, weight in weights.items():
        weights[name] = quantize(name, weight)


def linear_quantizer(
    weights: Mapping[str, WeightTensor], quantization: str, ops: Ops
) -> Callable[[str, WeightTensor], WeightTensor]:
    """Return the function that quantises a weight of a linear layer; others are returned unchanged.

    With "none" every quantised weight is unpacked.
    """
    quantize = quantizer(quantization, ops)
    if quantization == "none":
        return lambda name, weight: _unpacked(weight)
    if quantize is None:
        return lambda name, weight: weight
    if stored := {w.format for w in weights.values() if not _is_quantizable(w)}:
        raise ConfigError(
            f"quantization {quantization!r} is made from float weights, and the checkpoint is quantised "
            f"already ({', '.join(sorted(stored))}): leave quantization out"
        )

    def quantized(name: str, weight: WeightTensor) -> WeightTensor:
        if not quantized_format(name, weight, quantization, ops):
            return weight
        matrix = weight.to(ops.device).dequantize()  # a GPU quantises a model in seconds
        if not bool(matrix.isfinite().all()):
            raise LoadError(f"{name} has values that are not finite: it cannot be quantised")
        try:
            return quantize(matrix)
        except LoadError as error:
            raise LoadError(f"{name} cannot be quantised: {error}") from error

    return quantized


def _unpacked(weight: WeightTensor) -> WeightTensor:
    """Return a weight as floats."""
    return weight if isinstance(weight, FloatWeight) else FloatWeight(weight.dequantize())


def _is_quantizable(weight: WeightTensor) -> bool:
    """Return whether a weight of the checkpoint may be quantised on load."""
    return isinstance(weight, FloatWeight) or weight.is_requantized


def read_weights(tensors: Mapping[str, Tensor]) -> dict[str, WeightTensor]:
    """Group the tensors of a file into weights by name."""
    suffixes = {suffix for kind in FORMATS.values() for suffix in kind.suffixes.values()}
    weights: dict[str, WeightTensor] = {}
    for name, data in tensors.items():
        if any(name.endswith(suffix) and name.removesuffix(suffix) in tensors for suffix in suffixes):
            continue
        kind = FORMATS.get(data.dtype, FloatWeight)
        parts = {field: tensors[name + end] for field, end in kind.suffixes.items() if name + end in tensors}
        weights[name] = kind.from_parts(name, data, parts)
    return weights


def dequantize_all(weights: Mapping[str, WeightTensor]) -> dict[str, Tensor]:
    """Return every weight in the float type of its format."""
    return {name: weight.dequantize() for name, weight in weights.items()}


class PackedStore(Protocol):
    """Cache of packed weights."""

    def packed(self, names: Sequence[str], parts: Sequence[WeightTensor], bias: Tensor | None) -> Any:
        """Return weights packed as one; None if they are not stored."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """Part of a model on the device, and how it is made from weights of the checkpoint."""

    formats: Mapping[str, str]  # names of these weights, with the format of each
    shapes: Mapping[str, tuple[int, ...]]
    pack: Callable[[Mapping[str, WeightTensor]], Any]
    packed: Any


class WeightPacker:
    """Remove weights from a checkpoint one by one and pack them for a backend, so that none is held twice.

    `entries` records how each part was made, so that new weights can be packed in the same form.
    """

    def __init__(
        self,
        weights: dict[str, WeightTensor],
        ops: Ops,
        dtype: torch.dtype | None = None,
        draft: bool = False,
        store: PackedStore | None = None,
    ) -> None:
        """Set the dtype of dequantised weights; `draft` weights may be packed with lower precision."""
        self.weights = weights
        self.ops = ops
        self.dtype = dtype
        self.draft = draft
        self.store = store
        self.entries: list[PackedEntry] = []

    def derive(self, names: Sequence[str], pack: Callable[[Mapping[str, WeightTensor]], T]) -> T:
        """Remove weights and return what `pack` makes of them, which depends on nothing else."""
        weights = {name: self.weights.pop(name) for name in names}
        return self.record(weights, pack, pack(weights))

    def record(
        self,
        weights: Mapping[str, WeightTensor],
        pack: Callable[[Mapping[str, WeightTensor]], T],
        packed: T,
    ) -> T:
        """Record that `packed` is what `pack` makes of `weights`."""
        formats = {name: weight.format for name, weight in weights.items()}
        shapes = {name: weight.shape for name, weight in weights.items()}
        self.entries.append(PackedEntry(formats, shapes, pack, packed))
        return packed

    def tensor(self, name: str) -> Tensor:
        """Remove one weight and return it dequantised on the device."""
        return self.derive([name], lambda weights: self.on_device(weights[name]))

    def norm(self, name: str) -> Any:
        """Remove the weight of a norm of attention heads and return it on the device."""

        def pack(weights: Mapping[str, WeightTensor]) -> Any:
            weight = weights[name]
            return (
                weight.pack(self.on_device) if isinstance(weight, HeadNormWeight) else self.on_device(weight)
            )

        return self.derive([name], pack)

    def on_device(self, weight: WeightTensor) -> Tensor:
        """Return a weight dequantised on the device."""
        return weight.dequantize(self.dtype).to(self.ops.device).contiguous()

    def fp32(self, name: str) -> Tensor:
        """Remove one weight and return it on the device in fp32."""
        return self.derive([name], lambda weights: self._as_stored(weights[name]).float())

    def _as_stored(self, weight: WeightTensor) -> Tensor:
        return weight.dequantize().to(self.ops.device).contiguous()

    def router(self, name: str, bias: bool = False) -> Any:
        """Remove the weight of a router, and its bias, and pack them without rounding."""
        names, pack = [f"{name}.weight", f"{name}.bias"][: 1 + bias], self.ops.forward.pack_router

        def pack_stored(weights: Mapping[str, WeightTensor]) -> Any:
            matrix, *vectors = (self._as_stored(weights[each]) for each in names)
            return pack(matrix, vectors[0].float() if vectors else None)

        return self.derive(names, pack_stored)

    def experts(self, names: Sequence[Sequence[str]], bias: bool) -> Any:
        """Remove the weights of each expert and pack them as `ForwardOps.stacks_experts` requires."""
        if self.ops.forward.stacks_experts:
            return self.packed([name for expert in names for name in expert], bias)
        return tuple(self.packed(expert, bias) for expert in names)

    def packed(self, names: Sequence[str], bias: bool) -> Any:
        """Remove linear weights, concatenate their output rows and pack them for `Ops.linear`."""
        matrices, biases = [f"{name}.weight" for name in names], [f"{name}.bias" for name in names if bias]
        weights = {name: self.weights.pop(name) for name in (*matrices, *biases)}
        pack = partial(self._pack_linear, matrices, biases)
        stored = None
        if self.store is not None:
            parts = [weights[name] for name in matrices]
            stored = self.store.packed(names, parts, self._bias(biases, weights))
        return self.record(weights, pack, pack(weights) if stored is None else stored)

    def _bias(self, names: Sequence[str], weights: Mapping[str, WeightTensor]) -> Tensor | None:
        return torch.cat([self.on_device(weights[name]) for name in names]) if names else None

    def _pack_linear(
        self, names: Sequence[str], biases: Sequence[str], weights: Mapping[str, WeightTensor]
    ) -> Any:
        parts = [weights[name].to(self.ops.device) for name in names]
        if len({type(part) for part in parts}) > 1:  # a file may store one of q, k and v as floats
            parts = [FloatWeight(part.dequantize(self.dtype)) for part in parts]
        bias = self._bias(biases, weights)
        return pack_weight(self.ops, type(parts[0]).cat(parts), bias, self.dtype, self.draft)


def pack_weight(
    ops: Ops,
    weight: WeightTensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    draft: bool = False,
) -> Any:
    """Pack a weight for `Ops.linear`: in its own format where the backend multiplies it, else dequantised."""
    if isinstance(weight, RowParallelWeight):
        return weight.pack(lambda part: pack_weight(ops, part, dtype=dtype), bias)
    if isinstance(weight, VocabParallelWeight):
        return weight.pack(lambda part: pack_weight(ops, part, dtype=dtype), bias, ops.forward.table_formats)
    if weight.format in ops.forward.weight_formats:
        return ops.forward.pack_quantized(weight.format, weight.data, weight.scales, bias, weight.zeros)
    pack = ops.forward.pack_draft_linear if draft else ops.forward.pack_linear
    return pack(weight.dequantize(dtype), bias)
