"""Reader of the quantised linear layers of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.quantized.config import CheckpointQuantization
from draftproof.models.quantized.layouts import read_layer
from draftproof.models.registry import expected_tensors
from draftproof.models.rope import qk_to_halves
from draftproof.models.weight_formats import WeightTensor

EMBEDDING = "model.embed_tokens.weight"


def read_quantized(
    tensors: dict[str, Tensor], quantization: CheckpointQuantization, config: ModelConfig, where: str
) -> dict[str, WeightTensor]:
    """Remove the tensors of quantised linear layers and return their weights by name.

    Tensors that remain are stored as floats. LoadError names the layer at fault.
    """
    weights: dict[str, WeightTensor] = {}
    expected = expected_tensors(config)
    try:
        for name, shape in expected.items():
            module = name.removesuffix(".weight")
            scheme = quantization.scheme(module) if len(shape) == 2 and name != EMBEDDING else None
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
    """Reorder output rows that are stored as adjacent rotary pairs."""
    if not config.rope_interleaved:
        return weight
    order = torch.arange(weight.shape[0])[:, None]
    moved = qk_to_halves(name, order, config)
    return weight if moved is order else weight.rows(moved[:, 0])
