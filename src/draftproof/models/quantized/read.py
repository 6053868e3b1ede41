"""Reader of the stored tensors of a checkpoint, quantised linear layers included."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.expected_tensors import check_shapes
from draftproof.models.quantized.config import CheckpointQuantization
from draftproof.models.quantized.layouts import read_layer
from draftproof.models.rope import loaded_form, qk_to_halves
from draftproof.models.weight_formats import FloatWeight, WeightTensor

EMBEDDING_SUFFIX = "embed_tokens.weight"
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_stored(
    tensors: dict[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    quantization: CheckpointQuantization | None,
    config: ModelConfig,
    where: str,
) -> dict[str, WeightTensor]:
    """Return the weights `expected` (name -> shape) in their stored formats; LoadError names a wrong tensor.

    Tensors of quantised layers are removed from `tensors`.
    """
    quantized: dict[str, WeightTensor] = {}
    if quantization is not None:
        quantized = _read_quantized(tensors, expected, quantization, config, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_shapes(shapes | {name: weight.shape for name, weight in quantized.items()}, expected, where)
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise LoadError(f"{where}: {name} is {tensor.dtype}, not fp32, bf16 or fp16")
    tensors = loaded_form(tensors, config)
    return {name: quantized.get(name) or FloatWeight(tensors[name]) for name in expected}


def _read_quantized(
    tensors: dict[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    quantization: CheckpointQuantization,
    config: ModelConfig,
    where: str,
) -> dict[str, WeightTensor]:
    """Remove the tensors of quantised linear layers and return their weights by name.

    Tensors that remain are stored as floats. LoadError names the layer at fault.
    """
    weights: dict[str, WeightTensor] = {}
    try:
        for name, shape in expected.items():
            module = name.removesuffix(".weight")
            is_linear = len(shape) == 2 and not name.endswith(EMBEDDING_SUFFIX)
            scheme = quantization.scheme(module) if is_linear else None
            if scheme is None:
                continue
            bias = f"{module}.bias"  # GPTQ tools write zeros where a model has none
            if bias in tensors and bias not in expected and not bool(tensors[bias].any()):
                del tensors[bias]
            weight = read_layer(module, tensors, (shape[0], shape[1]), scheme)
            if weight is not None:
                weights[name] = _rows_as_halves(name, weight, config)
    except LoadError as error:
        raise LoadError(f"{where}: {quantization.method}: {error}") from error
    return weights


def _rows_as_halves(name: str, weight: WeightTensor, config: ModelConfig) -> WeightTensor:
    """Reorder output rows of q and k."""
    if not config.reorders_qk:
        return weight
    order = torch.arange(weight.shape[0])[:, None]
    moved = qk_to_halves(name, order, config, config.rope_interleaved)
    return weight if moved is order else weight.rows(moved[:, 0])
