"""Table of model architectures, and the protocol that their classes implement.

A dense family whose differences are flags of `ModelConfig` is one line here and one entry of
`families.dense.DENSE_FAMILIES`. Another kind of model is one line here and a module with its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.weight_formats import PackedEntry, PackedStore, WeightTensor
from draftproof.ops import KVLayout, Ops, QuantizedTable, Rows
from draftproof.registry import lookup

_DENSE = "draftproof.models.decoder:DenseDecoder"

# Hugging Face class name -> class that implements `Model`
MODELS = {
    "LlamaForCausalLM": _DENSE,
    "MistralForCausalLM": _DENSE,
    "MixtralForCausalLM": _DENSE,
    "Qwen2ForCausalLM": _DENSE,
    "Qwen2MoeForCausalLM": _DENSE,
    "Qwen3ForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": _DENSE,
    "Ernie4_5ForCausalLM": _DENSE,
    "Gemma3ForCausalLM": _DENSE,
    "Gemma3ForConditionalGeneration": _DENSE,
    "Ernie4_5_MoeForCausalLM": _DENSE,
    "Glm4MoeForCausalLM": _DENSE,
    "GlmForCausalLM": _DENSE,
    "GptOssForCausalLM": _DENSE,
    "Glm4ForCausalLM": _DENSE,
    "GraniteForCausalLM": _DENSE,
    "MiMoForCausalLM": _DENSE,
    "Olmo2ForCausalLM": _DENSE,
    "Phi3ForCausalLM": _DENSE,
    "SmolLM3ForCausalLM": _DENSE,
    "DeepseekV2ForCausalLM": _DENSE,
    "DeepseekV3ForCausalLM": _DENSE,
}


class Model(Protocol):
    """Forward pass of a decoder over ragged rows. The caller owns the storage of K and V."""

    config: ModelConfig
    embedding: Tensor | QuantizedTable  # [V, hidden]
    lm_head: Any  # packed, [V, hidden]
    entries: Sequence[PackedEntry]  # every part that was made from weights

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, WeightTensor],
        ops: Ops,
        max_len: int,
        store: PackedStore | None = None,
    ) -> None:
        """Pack `weights` for the backend, or take them from `store`; each is removed once packed."""

    @staticmethod
    def config_from_hf(
        architecture: str, raw: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        """Parse config.json and generation_config.json."""

    @staticmethod
    def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor of a checkpoint, in forward order."""

    @staticmethod
    def kv_layout(config: ModelConfig, dtype: torch.dtype) -> KVLayout:
        """Return the storage of K and V that a model of this configuration needs; `dtype`: of an element."""

    def forward(
        self,
        rows: Rows,
        caches: Sequence[Tensor],
        taps: Sequence[int] = (),
        output_rows: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the hidden rows after the last norm, then the residual after each layer of `taps`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocab] of hidden rows [rows, hidden], by the ops of the backend alone."""


def model_class(architecture: str) -> type[Model]:
    """Return the class of an architecture; LoadError lists those that are supported."""
    if architecture not in MODELS:
        raise LoadError(f"architecture {architecture} is not supported; supported: {', '.join(MODELS)}")
    found: type[Model] = lookup(MODELS, architecture, "architecture")
    return found


def create_model(
    config: ModelConfig,
    weights: dict[str, WeightTensor],
    ops: Ops,
    max_len: int,
    store: PackedStore | None = None,
) -> Model:
    """Build the model of a configuration; see `Model.__init__`."""
    return model_class(config.architecture)(config, weights, ops, max_len, store)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a model, in forward order."""
    return model_class(config.architecture).expected_tensors(config)


def kv_layout(config: ModelConfig, dtype: torch.dtype) -> KVLayout:
    """Return the storage of K and V that a model needs."""
    return model_class(config.architecture).kv_layout(config, dtype)


def config_from_hf(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """Parse the contents of config.json and, where there is one, generation_config.json."""
    try:
        names = raw.get("architectures") or ["(none named)"]
        name = str(names[0])
        return model_class(name).config_from_hf(name, raw, generation or {})
    except LoadError as error:
        raise LoadError(f"{where}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise LoadError(f"{where}: not a usable model configuration: {error!r}") from error
