"""Tensor layouts of checkpoints that differ between families.

Fused projections, experts in one tensor, models with images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, MoeConfig

_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
_IMAGE_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_FUSED = re.compile(r"(.*\.)(self_attn\.qkv_proj|mlp\.gate_up_proj)\.(\w+)")
_STACKED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
# suffix of a tensor with all experts -> name of the part of one projection
_STACKED_PARTS = {None: "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}


# Buffers that old exporters wrote into checkpoints; they are computed from the config instead.
_BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*")
_MIXTRAL_ROUTER = "block_sparse_moe.gate"  # in files; mlp.gate in models of transformers
_GPT_OSS = "GptOssForCausalLM"


def model_names(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint or of a transformers model under the names of `expected_tensors`.

    Fused projections and stacked experts are split. Buffers are dropped, as are the tensors of images.
    """
    found = {name: tensor for name, tensor in tensors.items() if not _BUFFERS.fullmatch(name)}
    if "embed_tokens.weight" in found:  # a decoder without its LM head, as embedding models are saved
        found = {name if name.startswith("lm_head.") else f"model.{name}": t for name, t in found.items()}
    found = split_stacked_experts(split_fused(text_tensors(found), config), config)
    if config.moe is None or config.moe.router != _MIXTRAL_ROUTER:
        return found
    return {name.replace(".mlp.gate.", f".{_MIXTRAL_ROUTER}."): tensor for name, tensor in found.items()}


def stored_norms(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors with the offset of the family added to the weights of norms, in fp32."""
    if not config.norm_offset:
        return dict(tensors)
    return {
        name: tensor.float() + config.norm_offset if name.endswith("norm.weight") else tensor
        for name, tensor in tensors.items()
    }


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
    found: dict[str, Tensor] = {}
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
        _add(found, {f"{match[1]}{part}.{match[3]}": p for part, p in zip(names, pieces, strict=True)}, name)
    return found


def split_stacked_experts(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors with those of all experts together split by expert. The parts are views.

    gpt-oss stores a float matrix as [E, inputs, outputs], one in mxfp4 as blocks [E, outputs, inputs / 32,
    16] and scales [E, outputs, inputs / 32]; rows of gate and up alternate. Models of transformers have
    [E, outputs, inputs] for every other family; the rows of gate precede those of up.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        if config.moe is None or len(tensor) != config.moe.routing.num_experts:
            raise LoadError(f"{name} {list(tensor.shape)} does not hold one entry an expert")
        _add(found, dict(_expert_parts(match, tensor, config, config.moe)), name)
    return found


def _expert_parts(
    match: re.Match[str], tensor: Tensor, config: ModelConfig, moe: MoeConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a tensor of all experts with their names."""
    part, alternates = _STACKED_PARTS[match[3]], config.architecture == _GPT_OSS
    if part == "weight" and alternates:
        tensor = tensor.transpose(1, 2)  # [E, outputs, inputs]
    elif part == "weight_blocks":
        tensor = tensor.flatten(2)  # [E, outputs, inputs / 2]
    gate, up, down = moe.projections
    for expert, own in enumerate(tensor):
        prefix = f"{match[1]}{moe.experts}.{expert}."
        if match[2] == "down_proj":
            yield f"{prefix}{down}.{part}", own
            continue
        middle = len(own) // 2
        yield f"{prefix}{gate}.{part}", own[0::2] if alternates else own[:middle]
        yield f"{prefix}{up}.{part}", own[1::2] if alternates else own[middle:]


def _add(found: dict[str, Tensor], parts: Mapping[str, Tensor], name: str) -> None:
    """Add the parts of a tensor; LoadError if one is there already."""
    if twice := next((part for part in parts if part in found), None):
        raise LoadError(f"{twice} is given twice: by itself and in {name}")
    found.update(parts)
