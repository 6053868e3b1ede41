"""Tensor layouts of checkpoints that differ between families.

Fused projections, experts in one tensor, models with images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig

_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
_IMAGE_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_FUSED = re.compile(r"(.*\.)(self_attn\.qkv_proj|mlp\.gate_up_proj)\.(\w+)")
_STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
# suffix of a tensor with all experts -> name of the part of one projection
_STACKED_PARTS = {None: "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}


def text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the decoder of a model with images, under the names of a model without."""
    if not any(name.startswith(_TEXT_PREFIXES) for name in tensors):
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(_IMAGE_PREFIXES):
            continue
        prefix = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), "")
        name = f"model.{name.removeprefix(prefix)}" if prefix else name.removeprefix("language_model.")
        found[name] = tensor
    return found


def split_fused(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors with fused projections split by output rows; parts share a single number."""
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    inner = config.intermediate_size
    parts = {
        "self_attn.qkv_proj": ([f"self_attn.{x}_proj" for x in "qkv"], [n * config.head_dim for n in heads]),
        "mlp.gate_up_proj": (["mlp.gate_proj", "mlp.up_proj"], [inner, inner]),
    }
    found = {}
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        names, sizes = parts[match[2]]
        if tensor.numel() == 1:
            pieces = (tensor,) * len(names)
        elif tensor.shape[0] == sum(sizes):
            pieces = tensor.split(sizes)
        else:
            raise LoadError(
                f"{name} {list(tensor.shape)} has other rows than {sum(sizes)}: it cannot be split"
            )
        found |= {f"{match[1]}{part}.{match[3]}": piece for part, piece in zip(names, pieces, strict=True)}
    return found


def split_stacked_experts(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors with those of all experts together, as gpt-oss has them, split by expert.

    Rows of gate and up alternate. A float matrix is stored as [E, inputs, outputs], one in mxfp4 as blocks
    [E, outputs, inputs / 32, 16] and scales [E, outputs, inputs / 32]. The parts are views.
    """
    found = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        if config.moe is None or len(tensor) != config.moe.routing.num_experts:
            raise LoadError(f"{name} {list(tensor.shape)} does not hold one entry an expert")
        part = _STACKED_PARTS[match[3]]
        if part == "weight":
            tensor = tensor.transpose(1, 2)  # [E, outputs, inputs]
        elif part == "weight_blocks":
            tensor = tensor.flatten(2)  # [E, outputs, inputs / 2]
        for expert, own in enumerate(tensor):
            pieces = {"down_proj": own}
            if match[2] == "gate_up_proj":
                pieces = {"gate_proj": own[0::2], "up_proj": own[1::2]}
            found |= {f"{match[1]}{expert}.{each}.{part}": piece for each, piece in pieces.items()}
    return found
