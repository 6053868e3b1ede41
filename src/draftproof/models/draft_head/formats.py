"""Heads on disk: our own format, and those of SpecForge, of `speculators`, EAGLE's first and MTP layers.

Every format ends in the same thing, a `HeadConfig` and tensors under our own names, checked against the one
table there. Public formats say little of the model that a head was made for: what they say is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, config_from_hf, read_json
from draftproof.models.draft_head.config import HeadConfig, Target
from draftproof.models.draft_head.quantize import unpacked
from draftproof.models.hub import find_model
from draftproof.models.safetensors_io import checkpoint_files, read_safetensors
from draftproof.models.weights import check_shapes

# What transformers takes where a config is silent: `speculators` writes down what differs from it alone.
_SILENT: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# beginnings of other people's names -> ours; the first that fits counts
_NAMES = (
    ("midlayer.", "layers.0."),
    ("fc_norm.", "feature_norm."),
    ("input_norm.", "feature_norm."),
    ("mtp.fc.", "eh_proj."),
    ("mtp.norm.", "norm."),
    ("mtp.pre_fc_norm_hidden.", "hnorm."),
    ("mtp.pre_fc_norm_embedding.", "enorm."),
    ("mtp.layers.", "layers."),
    ("mtp_layers.0.input_proj.", "eh_proj."),
    ("mtp_layers.0.final_layernorm.", "norm."),
    ("mtp_layers.0.hidden_layernorm.", "hnorm."),
    ("mtp_layers.0.token_layernorm.", "enorm."),
    ("mtp_layers.", "layers."),
)
_SPECULATORS = ("eagle3", "mtp")
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def read_head(where: str | Path, num_layers: int) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head's description and tensors; `num_layers` of the model that it is to draft for."""
    folder = find_model(str(where), progress=False)
    if not folder.is_dir() or not (folder / "config.json").exists():
        raise LoadError(f"{where}: a head is a folder with config.json and a safetensors file")
    raw = read_json(folder / "config.json")
    tensors: dict[str, Tensor] = {}
    for path in checkpoint_files(folder):
        tensors |= read_safetensors(path)
    try:
        if "kind" in raw and "target" in raw:
            config, tensors = HeadConfig.from_json(raw), unpacked(tensors)
        else:
            config, tensors = _public(raw, tensors, num_layers)
        check_shapes({name: tuple(t.shape) for name, t in tensors.items()}, config.tensors(), "its tensors")
        _check_ids(config, tensors)
    except LoadError as error:
        raise LoadError(f"{folder}: {error}") from error
    return config, tensors


def load_head(where: str | Path, target: Target) -> tuple[HeadConfig, dict[str, Tensor]]:
    """`read_head`, of a head that was made for this model; LoadError with the reason if it was not."""
    config, tensors = read_head(where, target.num_layers)
    config.target.check(target, str(where))
    return config, tensors


def _check_ids(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    if not config.reduced:
        return
    ids = tensors["d2t"]
    known = (ids >= 0) & (ids < config.target.vocab_size)
    if ids.dtype != torch.int64 or not bool(known.all()) or len(ids.unique()) != len(ids):
        raise LoadError("d2t does not name each id of its draft vocabulary once")


# --- other people's -----------------------------------------------------------------------------------


def _public(
    raw: Mapping[str, Any], tensors: dict[str, Tensor], num_layers: int
) -> tuple[HeadConfig, dict[str, Tensor]]:
    kind = raw.get("speculators_model_type")
    if kind is not None and kind not in _SPECULATORS:
        known = ", ".join(_SPECULATORS)
        raise LoadError(f"speculators of type {kind!r} are not supported; supported: {known}")
    mask = tensors.get("t2d")
    named = {
        _ours(name): t for name, t in tensors.items() if name not in _UNUSED and "rotary_emb" not in name
    }
    if len(named) < sum(name not in _UNUSED and "rotary_emb" not in name for name in tensors):
        raise LoadError("two of its tensors mean the same")
    inner = raw.get("transformer_layer_config", raw)
    decoder = _decoder(inner, named)
    common = _common(raw, decoder, named)
    if "eh_proj.weight" in named:
        config = HeadConfig(kind="mtp", feature="last_normed", norm_output=True, **common)
    elif "layers.0.hidden_norm.weight" in named:
        config = _eagle3(raw, named, num_layers, common)
    elif "fc.weight" in named:
        norms = {"input_norm": "layers.0.input_layernorm.weight", "final_norm": "norm.weight"}
        there: dict[str, Any] = {field: name in named for field, name in norms.items()}
        bias = "fc.bias" in named
        config = HeadConfig(kind="eagle", feature="last_normed", fc_bias=bias, **there, **common)
    else:
        raise LoadError("neither an EAGLE head nor an MTP layer: it has no tensor that joins two rows")
    if "d2t" in named:
        named["d2t"] = _ids_of(named["d2t"], mask)
        if not config.reduced:
            del named["d2t"]
    return config, named


def _ours(name: str) -> str:
    name = name.removeprefix("model.")
    for begin, mine in _NAMES:
        if name.startswith(begin):
            return mine + name.removeprefix(begin)
    return name


def _decoder(raw: Mapping[str, Any], named: Mapping[str, Tensor]) -> ModelConfig:
    """Its layers. Which model's they are like is told by the type, and by the norms of q and k."""
    kind = str(raw.get("model_type") or "llama")
    if kind not in _CLASSES:
        raise LoadError(f"layers of type {kind!r} are not supported; supported: {', '.join(_CLASSES)}")
    if kind == "llama" and any("q_norm" in name for name in named):
        kind = "qwen3"
    silent = _SILENT.get(str(raw.get("model_type") or ""), {}) if "architectures" not in raw else {}
    told = {key: value for key, value in raw.items() if value is not None}
    return config_from_hf({**silent, **told, "architectures": [_CLASSES[kind]]}, where="its layers")


def _common(raw: Mapping[str, Any], decoder: ModelConfig, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """What all kinds have. Layers are counted, not believed."""
    layers = {int(name.split(".")[1]) for name in named if name.startswith("layers.")}
    vocab = decoder.vocab_size
    ids = named.get("d2t")
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    names = verifier.get("architectures") or [""]
    wide = int(raw.get("target_hidden_size") or decoder.hidden_size)
    target = Target(str(names[0]) if len(names) == 1 else "", wide, vocab, 0, "")
    return {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_heads": decoder.num_heads,
        "num_kv_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "num_layers": len(layers) or 1,
        "rms_norm_eps": decoder.norm_eps,
        "rope_theta": decoder.rope_theta,
        "rope_scaling": decoder.rope_scaling,
        "draft_vocab_size": vocab if ids is None else len(ids),
        "share_head": "lm_head.weight" not in named,
        "own_embedding": "embed_tokens.weight" in named,
        "target": target,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in named,
        "o_bias": "layers.0.self_attn.o_proj.bias" in named,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in named,
        "qk_norm": decoder.qk_norm,
        "window": decoder.windows[0],
    }


def _eagle3(
    raw: Mapping[str, Any], named: dict[str, Tensor], num_layers: int, common: dict[str, Any]
) -> HeadConfig:
    """`speculators` counts layers from 1, as what comes after so many; SpecForge from 0, as outputs."""
    later = "speculators_model_type" in raw
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    if not later:
        ids = ids or (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
        later = True
    layers = tuple(int(i) - later for i in ids)
    if any(not 0 <= layer < num_layers for layer in layers):
        raise LoadError(f"it reads layers {list(ids)} of its target: this model has {num_layers}")
    norm = "none"
    if "feature_norm.weight" in named:
        norm = "whole"
    elif "feature_norm.0.weight" in named:
        norm = "each"
    flags: dict[str, Any] = {
        name: bool(raw.get(name, False)) for name in ("norm_before_residual", "norm_output")
    }
    return HeadConfig(kind="eagle3", aux_layers=layers, feature_norm=norm, **flags, **common)


def _ids_of(stored: Tensor, mask: Tensor | None) -> Tensor:
    """Target ids of the draft ids. They are stored as what is to be added to the draft id.

    mask [V]: which target ids are among them, if it is there to tell.
    """
    ids = stored.to(torch.int64)
    added = ids + torch.arange(len(ids))
    if mask is None:
        return added
    for meant in (added, ids):
        inside = (meant >= 0) & (meant < len(mask))
        if bool(inside.all()) and bool(mask.to(torch.bool)[meant].all()):
            return meant
    raise LoadError("d2t and t2d do not agree")
