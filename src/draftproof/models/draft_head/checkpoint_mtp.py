"""Reader of the MTP layers that a model's own checkpoint holds."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, read_json
from draftproof.models.draft_head.config import LAYER_SIZES, DraftHeadConfig, TargetIdentity, chain_prefix
from draftproof.models.draft_head.mtp_forms import (
    MTP_FORMS,
    MtpForm,
    count_layers,
    declared_mtp_layers,
    find_form,
)
from draftproof.models.expected_tensors import split_draft_tensors
from draftproof.models.gguf.dense import config_from_gguf, gguf_weights, num_mtp_layers, stored_names
from draftproof.models.gguf.file import read_gguf
from draftproof.models.quantized.config import parse_quantization
from draftproof.models.quantized.read import read_stored
from draftproof.models.registry import config_from_hf, expected_tensors
from draftproof.models.rope import qk_to_pairs
from draftproof.models.safetensors_io import checkpoint_files, read_safetensors
from draftproof.models.weight_formats import FloatWeight, WeightTensor

MODEL_NORM = "model.norm.weight"
WITHOUT_MTP = (
    "use a checkpoint that keeps its MTP layers, train one with `draftproof train --kind mtp`, or choose "
    "another method"
)


def read_native_mtp(
    raw: Mapping[str, Any], model: Mapping[str, Tensor], draft: dict[str, Tensor]
) -> tuple[DraftHeadConfig, dict[str, WeightTensor]]:
    """Read the MTP layers of a model from its config.json (`raw`), its tensors and those of its MTP layers.

    Weights keep their stored formats, so the layers may be quantised while the model is not, or the other way
    round.
    """
    target = config_from_hf(raw)
    num_layers = target.num_layers
    form = find_form(draft, num_layers)
    if form is None:
        raise LoadError(_reason(raw, draft, num_layers))
    count = count_layers(form, draft, num_layers)
    extended = target.with_next_layers(1)
    layers = [_expected(form, extended, num_layers, draft, i) for i in range(count)]
    expected = {name: shape for shapes in layers for name, shape in shapes.items()}
    stored = {name: draft[name] for name in draft if "rotary_emb" not in name}
    quantization = parse_quantization(raw, "config.json")
    weights = read_stored(stored, expected, quantization, extended, "its MTP layer")
    chain: list[dict[str, WeightTensor]] = []
    for i, shapes in enumerate(layers):
        named = _rename({name: weights[name] for name in shapes}, form, num_layers, i)
        _drop_shared(named, model, target)
        if not form.norm:
            named["norm.weight"] = FloatWeight(model[MODEL_NORM])
        chain.append(named)
    return _chained(form, extended, chain)


def _chained(
    form: MtpForm, extended: ModelConfig, chain: Sequence[Mapping[str, WeightTensor]]
) -> tuple[DraftHeadConfig, dict[str, WeightTensor]]:
    """Return the configuration and the weights of a chain of layers."""
    if any(named.keys() != chain[0].keys() for named in chain):
        raise LoadError(
            "its MTP layers differ: all or none must have an embedding and an LM head of their own"
        )
    config = replace(_config(form, extended, chain[0]), chain_length=len(chain))
    return config, {chain_prefix(i) + name: w for i, named in enumerate(chain) for name, w in named.items()}


def read_gguf_mtp(path: Path) -> tuple[DraftHeadConfig, dict[str, WeightTensor]]:
    """Read the MTP layers of a GGUF file, whose matrices stay in its blocks."""
    file, form = read_gguf(path), MTP_FORMS["deepseek"]
    target, count = config_from_gguf(file), num_mtp_layers(file)
    extended, stored = target.with_next_layers(1), stored_names(file, target, mtp=True)
    if not count or not stored:
        raise LoadError(
            f"{path}: its metadata name {count} MTP layer(s), and the file holds no tensor of one "
            f"(such as blk.{target.num_layers}.nextn.eh_proj.weight); {WITHOUT_MTP}"
        )
    layers = [_expected(form, extended, target.num_layers, stored, i) for i in range(count)]
    expected = {name: shape for shapes in layers for name, shape in shapes.items()}
    weights = gguf_weights(file, target, torch.float32, mtp=expected)
    named = [
        _rename({name: weights[name] for name in shapes}, form, target.num_layers, i)
        for i, shapes in enumerate(layers)
    ]
    return _chained(form, extended, named)


def has_mtp_tensors(source: Path) -> bool:
    """Return whether a model folder holds the tensors of an MTP layer."""
    config = source / "config.json"
    if not config.is_file():
        return False
    raw = read_json(config)
    files = [read_safetensors(path) for path in checkpoint_files(source)]
    return any(split_draft_tensors(tensors, raw)[1] for tensors in files)


def mtp_tensors(weights: Mapping[str, Tensor], target: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of an MTP layer under DeepSeek's names, as a layer after the target's last one."""
    form = MTP_FORMS["deepseek"]
    prefix = form.prefix(0, target.num_layers)
    around = {f"{ours}.weight": f"{name}.weight" for ours, name in form.names(0, target.num_layers).items()}
    made = {around.get(n) or prefix + n.removeprefix("layers.0."): tensor for n, tensor in weights.items()}
    if target.reorders_qk:
        made = {name: qk_to_pairs(name, tensor, target) for name, tensor in made.items()}
    return made


def _reason(raw: Mapping[str, Any], draft: Mapping[str, Tensor], num_layers: int) -> str:
    """Return why no MTP layer can be read."""
    if draft:
        known = ", ".join(MTP_FORMS)
        return f"its MTP tensors ({next(iter(draft))}, …) have no known form; supported forms: {known}"
    return (
        f"config.json names {declared_mtp_layers(raw)} MTP layer(s), and the files hold no tensor of one "
        f"(such as model.layers.{num_layers}.eh_proj.weight): they were removed when the checkpoint was "
        f"converted or quantised; {WITHOUT_MTP}"
    )


def _expected(
    form: MtpForm, extended: ModelConfig, num_layers: int, stored: Container[str], index: int
) -> dict[str, tuple[int, ...]]:
    """Return stored name -> shape of one layer's tensors; copies of embedding and LM head are optional."""
    hidden, vocab = extended.hidden_size, extended.vocab_size
    around = {"enorm": (hidden,), "hnorm": (hidden,), "norm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    shapes: dict[str, tuple[int, ...]] = {}
    for ours, name in form.names(index, num_layers).items():
        if ours in around:
            shapes[f"{name}.weight"] = around[ours]
        elif f"{name}.weight" in stored:
            shapes[f"{name}.weight"] = (vocab, hidden)
    layer, prefix = f"model.layers.{num_layers}.", form.prefix(index, num_layers)
    for name, shape in expected_tensors(extended).items():
        if name.startswith(layer):
            shapes[prefix + name.removeprefix(layer)] = shape
    return shapes


def _rename(
    weights: Mapping[str, WeightTensor], form: MtpForm, num_layers: int, index: int
) -> dict[str, WeightTensor]:
    """Return the weights of one layer under the names of `DraftHeadConfig.tensors`."""
    prefix = form.prefix(index, num_layers)
    around = {f"{name}.weight": f"{ours}.weight" for ours, name in form.names(index, num_layers).items()}
    return {
        around.get(name) or "layers.0." + name.removeprefix(prefix): weight
        for name, weight in weights.items()
    }


def _drop_shared(named: dict[str, WeightTensor], model: Mapping[str, Tensor], target: ModelConfig) -> None:
    """Remove copies of the model's embedding and LM head, which are then shared."""
    table = "model.embed_tokens.weight"
    head = table if target.tie_embeddings and "lm_head.weight" not in model else "lm_head.weight"
    for ours, theirs in (("embed_tokens.weight", table), ("lm_head.weight", head)):
        own, shared = named.get(ours), model.get(theirs)
        if isinstance(own, FloatWeight) and shared is not None and torch.equal(own.data, shared):
            del named[ours]


def _config(form: MtpForm, extended: ModelConfig, named: Mapping[str, WeightTensor]) -> DraftHeadConfig:
    vocab, hidden = extended.vocab_size, extended.hidden_size
    return DraftHeadConfig(
        kind="mtp",
        **{name: getattr(extended, name) for name in LAYER_SIZES},
        intermediate_size=extended.intermediate_size,
        rms_norm_eps=extended.norm_eps,
        feature="last_normed" if form.has_normed_feature else "last",
        norm_output=form.has_normed_output,
        is_hidden_first=form.is_hidden_first,
        draft_vocab_size=vocab,
        share_lm_head="lm_head.weight" not in named,
        own_embedding="embed_tokens.weight" in named,
        target=TargetIdentity("", hidden, vocab, 0, ""),
        native=extended,
    )
