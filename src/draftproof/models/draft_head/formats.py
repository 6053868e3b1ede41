"""Draft head files: own format, SpecForge, `speculators`, the first EAGLE, MTP layers inside a model.

Every format is read into a `DraftHeadConfig` and weights under its names, checked against its shapes.
Public formats record little about the target model; what they record is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, read_json
from draftproof.models.draft_head.checkpoint_mtp import read_gguf_mtp, read_native_mtp
from draftproof.models.draft_head.config import LAYER_SIZES, DraftHeadConfig, TargetIdentity
from draftproof.models.draft_head.mtp_forms import declared_mtp_layers, find_form
from draftproof.models.expected_tensors import check_shapes, split_draft_tensors
from draftproof.models.gguf.file import is_gguf
from draftproof.models.hub import find_model
from draftproof.models.registry import config_from_hf
from draftproof.models.safetensors_io import checkpoint_files, read_safetensors
from draftproof.models.weight_formats import WeightTensor, read_weights

# Defaults of transformers: `speculators` stores only the values that differ from them.
_COMMON_DEFAULTS = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "qwen3": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Prefix in a public format -> prefix in ours; the first match applies.
_PREFIXES = (
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
_SPECULATORS_KINDS = ("eagle3", "mtp")
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def read_draft_head(where: str | Path, num_layers: int) -> tuple[DraftHeadConfig, dict[str, WeightTensor]]:
    """Read a draft head of a target with `num_layers` layers, from its own folder or that of its target."""
    folder = find_model(str(where), progress=False)
    if folder.is_file() and is_gguf(folder):
        return read_gguf_mtp(folder)
    if not folder.is_dir() or not (folder / "config.json").exists():
        raise LoadError(f"{where}: a head is a folder with config.json and a safetensors file")
    raw = read_json(folder / "config.json")
    tensors: dict[str, Tensor] = {}
    for path in checkpoint_files(folder):
        tensors |= read_safetensors(path)
    try:
        if "kind" in raw and "target" in raw:
            config, weights = DraftHeadConfig.from_json(raw), read_weights(tensors)
        elif (parts := _whole_model(tensors, raw)) is not None:
            return read_native_mtp(raw, *parts)
        else:
            config, tensors = _read_public(raw, tensors, num_layers)
            weights = read_weights(tensors)
        shapes = {name: weight.shape for name, weight in weights.items()}
        check_shapes(shapes, config.tensors(), "its tensors")
        _check_ids(config, weights)
    except LoadError as error:
        raise LoadError(f"{folder}: {error}") from error
    return config, weights


def load_draft_head(
    where: str | Path, target: TargetIdentity
) -> tuple[DraftHeadConfig, dict[str, WeightTensor]]:
    """Read a draft head and check that it was trained for `target`; LoadError names the differences."""
    config, weights = read_draft_head(where, target.num_layers)
    config.target.check(target, str(where))
    return config, weights


def named_weights(tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, WeightTensor]:
    """Return tensors of a head in any format as weights under our names, for an update."""
    if find_form(tensors, num_layers) is not None:
        raise LoadError("an MTP layer under its model's names is updated from files: give the model's folder")
    used = [name for name in tensors if name not in _UNUSED and "rotary_emb" not in name]
    return read_weights({_rename(name): tensors[name] for name in used})


def _whole_model(
    tensors: dict[str, Tensor], raw: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """Return the tensors of a model and of its MTP layers; None where the folder holds a head alone."""
    model, draft = split_draft_tensors(tensors, raw)
    is_whole = {"model.norm.weight", "model.embed_tokens.weight"} <= model.keys()
    return (model, draft) if is_whole and (draft or declared_mtp_layers(raw)) else None


def _check_ids(config: DraftHeadConfig, weights: Mapping[str, WeightTensor]) -> None:
    if not config.has_reduced_vocab:
        return
    ids = weights["d2t"].data
    in_vocab = (ids >= 0) & (ids < config.target.vocab_size)
    if ids.dtype != torch.int64 or not bool(in_vocab.all()) or len(ids.unique()) != len(ids):
        raise LoadError("d2t does not name each id of its draft vocabulary once")


# --- public formats -----------------------------------------------------------------------------------


def _read_public(
    raw: Mapping[str, Any], tensors: dict[str, Tensor], num_layers: int
) -> tuple[DraftHeadConfig, dict[str, Tensor]]:
    kind = raw.get("speculators_model_type")
    if kind is not None and kind not in _SPECULATORS_KINDS:
        known = ", ".join(_SPECULATORS_KINDS)
        raise LoadError(f"speculators of type {kind!r} are not supported; supported: {known}")
    mask = tensors.get("t2d")
    used = [name for name in tensors if name not in _UNUSED and "rotary_emb" not in name]
    named = {_rename(name): tensors[name] for name in used}
    if len(named) < len(used):
        raise LoadError("two of its tensors have the same meaning")
    inner = raw.get("transformer_layer_config", raw)
    decoder = _decoder(inner, named)
    common = _common(raw, decoder, named)
    if "eh_proj.weight" in named:
        config = DraftHeadConfig(kind="mtp", feature="last_normed", norm_output=True, **common)
    elif "layers.0.hidden_norm.weight" in named:
        config = _eagle3(raw, named, num_layers, common)
    elif "fc.weight" in named:
        norms = {"input_norm": "layers.0.input_layernorm.weight", "final_norm": "norm.weight"}
        there: dict[str, Any] = {field: name in named for field, name in norms.items()}
        bias = "fc.bias" in named
        config = DraftHeadConfig(kind="eagle", feature="last_normed", fc_bias=bias, **there, **common)
    else:
        raise LoadError("neither an EAGLE head nor an MTP layer: it has no tensor that joins two rows")
    if "d2t" in named:
        named["d2t"] = _ids_of(named["d2t"], mask)
        if not config.has_reduced_vocab:
            del named["d2t"]
    return config, named


def _rename(name: str) -> str:
    name = name.removeprefix("model.")
    for prefix, renamed in _PREFIXES:
        if name.startswith(prefix):
            return renamed + name.removeprefix(prefix)
    return name


def _decoder(raw: Mapping[str, Any], named: Mapping[str, Tensor]) -> ModelConfig:
    """Return the configuration of the layers; `model_type` and norms of q and k give the family."""
    kind = str(raw.get("model_type") or "llama")
    if kind not in _CLASSES:
        raise LoadError(f"layers of type {kind!r} are not supported; supported: {', '.join(_CLASSES)}")
    if kind == "llama" and any("q_norm" in name for name in named):
        kind = "qwen3"
    defaults: dict[str, Any] = {}
    if "architectures" not in raw and raw.get("model_type") in _DEFAULTS:
        defaults = _COMMON_DEFAULTS | _DEFAULTS[raw["model_type"]]
    if raw.get("quantization_config") and (stored := [n for n, t in named.items() if not _is_plain(t)]):
        raise LoadError(
            f"{stored[0]} is quantised: heads and MTP layers are read in fp32, bf16 or fp16, or in int8 as "
            "`draftproof train` writes them"
        )
    given = {key: value for key, value in raw.items() if value is not None}
    return config_from_hf({**defaults, **given, "architectures": [_CLASSES[kind]]}, where="its layers")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def _common(raw: Mapping[str, Any], decoder: ModelConfig, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields that all kinds have. Layers are counted by tensor names, not read from the config."""
    layers = {int(name.split(".")[1]) for name in named if name.startswith("layers.")}
    vocab = decoder.vocab_size
    ids = named.get("d2t")
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    names = verifier.get("architectures") or [""]
    wide = int(raw.get("target_hidden_size") or decoder.hidden_size)
    target = TargetIdentity(str(names[0]) if len(names) == 1 else "", wide, vocab, 0, "")
    return {
        **{name: getattr(decoder, name) for name in ("intermediate_size", "qk_norm", *LAYER_SIZES)},
        "num_layers": len(layers) or 1,
        "rms_norm_eps": decoder.norm_eps,
        "draft_vocab_size": vocab if ids is None else len(ids),
        "share_lm_head": "lm_head.weight" not in named,
        "own_embedding": "embed_tokens.weight" in named,
        "target": target,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in named,
        "o_bias": "layers.0.self_attn.o_proj.bias" in named,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in named,
        "window": decoder.windows[0],
    }


def _eagle3(
    raw: Mapping[str, Any], named: dict[str, Tensor], num_layers: int, common: dict[str, Any]
) -> DraftHeadConfig:
    """Build an EAGLE-3 head. `speculators` numbers the outputs of layers from 1, SpecForge from 0."""
    from_one = "speculators_model_type" in raw
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    if not from_one:
        ids = ids or (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
        from_one = True
    layers = tuple(int(i) - from_one for i in ids)
    if any(not 0 <= layer < num_layers for layer in layers):
        raise LoadError(f"it reads layers {list(ids)} of its target: this model has {num_layers}")
    norm = "each" if "feature_norm.0.weight" in named else "none"
    if "feature_norm.weight" in named:
        norm = "whole"
    flags: dict[str, Any] = {k: bool(raw.get(k, False)) for k in ("norm_before_residual", "norm_output")}
    return DraftHeadConfig(kind="eagle3", aux_layers=layers, feature_norm=norm, **flags, **common)


def _ids_of(stored: Tensor, mask: Tensor | None) -> Tensor:
    """Return the target id of each draft id; files store the difference to the draft id, or the id itself.

    `mask` [V]: target ids in the draft vocabulary, where the file has it, decides between the two.
    """
    ids = stored.to(torch.int64)
    added = ids + torch.arange(len(ids))
    if mask is None:
        return added
    for candidate in (added, ids):
        inside = (candidate >= 0) & (candidate < len(mask))
        if bool(inside.all()) and bool(mask.to(torch.bool)[candidate].all()):
            return candidate
    raise LoadError("d2t and t2d do not agree")
