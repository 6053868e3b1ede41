"""Draft heads in public formats: names, numbering of layers, ids of a reduced vocabulary, and logits.

Where the `speculators` package is installed, a checkpoint written by its classes is loaded and its logits are
compared, round after round. Elsewhere its names and numbers are imitated.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import heads
import tiny
from draftproof.errors import LoadError
from draftproof.models.draft_head.config import DraftHeadConfig, TargetIdentity
from draftproof.models.draft_head.formats import load_draft_head, read_draft_head
from draftproof.models.draft_head.model import DraftHeadModel, TargetParts
from draftproof.models.weight_formats import dequantize_all
from draftproof.ops import Rows, resolve
from exact import Batch, Case, Setup

CPU = torch.device("cpu")


def decoder(config: DraftHeadConfig, kind: str) -> dict[str, Any]:
    """Return the configuration as transformers writes it."""
    return {
        "model_type": kind,
        "vocab_size": config.target.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_hidden_layers": 1,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": 512,
    }


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        for mine, theirs in names.items():
            if name.startswith(mine):
                name = theirs + name.removeprefix(mine)
                break
        out[name] = tensor
    return out


def offsets(tensors: dict[str, Tensor], vocab: int) -> dict[str, Tensor]:
    """Return d2t as differences to the draft ids, and the mask t2d, as public files hold them."""
    ids = tensors["d2t"]
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": mask}


def same(where: str, config: DraftHeadConfig, tensors: dict[str, Tensor], layers: int = 2) -> DraftHeadConfig:
    found, weights = read_draft_head(where, layers)
    got = dequantize_all(weights)
    assert replace(found, target=config.target) == config
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    return found


@pytest.mark.parametrize("norm", ["none", "whole", "each"])
def test_speculators_eagle3_is_read(tmp_path, norm):
    fields = {"share_lm_head": False, "own_embedding": True, "norm_before_residual": True}
    config = heads.head_config("eagle3", norm_output=norm == "each", feature_norm=norm, **fields)
    tensors = heads.head_tensors(config)
    theirs = {"feature_norm.": "input_norm." if norm == "whole" else "fc_norm."}
    raw = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": decoder(config, "llama"),
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [1, 2],  # numbered from 1
        "norm_before_residual": True,
        "norm_output": norm == "each",
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "x"}},
    }
    where = write(tmp_path / "head", raw, renamed(offsets(tensors, 97), theirs))
    found = same(where, config, tensors)
    assert found.target == TargetIdentity("LlamaForCausalLM", 32, 97, 0, "")
    with pytest.raises(LoadError, match="class is LlamaForCausalLM, this model's is Qwen2"):
        load_draft_head(where, replace(config.target, model_type="Qwen2ForCausalLM"))
    with pytest.raises(LoadError, match="it reads layers"):
        read_draft_head(where, 1)


def test_specforge_eagle3_is_read(tmp_path):
    config = heads.head_config("eagle3", share_lm_head=False)
    tensors = heads.head_tensors(config)
    raw = decoder(config, "llama") | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
        "sliding_window": None,
    }
    stored = renamed(offsets(tensors, 97), {"layers.0.": "midlayer."})
    same(write(tmp_path / "head", raw, stored), config, tensors)
    stored = {name: tensor for name, tensor in stored.items() if name != "t2d"}
    same(write(tmp_path / "head", raw, stored), config, tensors)
    stored["t2d"] = torch.zeros(97, dtype=torch.bool)
    with pytest.raises(LoadError, match="d2t and t2d do not agree"):
        read_draft_head(write(tmp_path / "head", raw, stored), 2)


def test_eagle3_without_layer_ids_reads_the_default_layers(tmp_path):
    config = heads.head_config("eagle3", aux_layers=(0, 1, 1), draft_vocab_size=97)
    tensors = heads.head_tensors(config)
    raw = decoder(config, "llama") | {"architectures": ["LlamaForCausalLMEagle3"]}
    found, _ = read_draft_head(write(tmp_path / "head", raw, tensors), 30)
    assert found.aux_layers == (1, 14, 26)


def test_first_eagle_format_is_read(tmp_path):
    norms = {"input_norm": False, "final_norm": False}
    config = heads.head_config("eagle", feature="last_normed", share_lm_head=True, num_layers=1, **norms)
    tensors = heads.head_tensors(config)
    raw = decoder(config, "llama") | {"architectures": ["LlamaForCausalLM"], "bias": True}
    same(write(tmp_path / "head", raw, tensors), config, tensors)


@pytest.mark.parametrize("names", ["speculators", "inside a model"])
def test_mtp_layer_names_are_read(tmp_path, names):
    config = heads.head_config("mtp")
    tensors = heads.head_tensors(config)
    if names == "speculators":
        raw = {"speculators_model_type": "mtp", "transformer_layer_config": decoder(config, "qwen3")}
        table = {"eh_proj.": "input_proj.", "norm.": "final_layernorm.", "hnorm.": "hidden_layernorm."}
        table |= {"enorm.": "token_layernorm.", "layers.0.": ""}
        table = {mine: "mtp_layers.0." + theirs for mine, theirs in table.items()}
    else:
        raw = decoder(config, "qwen3") | {"architectures": ["Qwen3ForCausalLM"]}
        table = {"eh_proj.": "mtp.fc.", "norm.": "mtp.norm.", "hnorm.": "mtp.pre_fc_norm_hidden."}
        table |= {"enorm.": "mtp.pre_fc_norm_embedding.", "layers.0.": "mtp.layers.0."}
    same(write(tmp_path / "head", raw, renamed(tensors, table)), config, tensors)


def test_unsupported_head_is_named_in_the_error(tmp_path):
    config = heads.head_config("eagle3", share_lm_head=False)
    raw = {"speculators_model_type": "dflash", "transformer_layer_config": decoder(config, "llama")}
    with pytest.raises(LoadError, match="speculators of type 'dflash' are not supported"):
        read_draft_head(write(tmp_path / "head", raw, heads.head_tensors(config)), 2)
    raw = decoder(config, "gpt_oss") | {"architectures": ["LlamaForCausalLMEagle3"]}
    with pytest.raises(LoadError, match="layers of type 'gpt_oss' are not supported"):
        read_draft_head(write(tmp_path / "head", raw, heads.head_tensors(config)), 2)


# --- with the `speculators` package ---------------------------------------------------------------------


def made_by_speculators(folder: Path, kind: str, **flags: Any) -> Any:
    """Return a small EAGLE-3 model of `speculators` with random weights, saved by its own classes."""
    pytest.importorskip("speculators")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layers = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**sizes, attn_implementation="eager")
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=61,
        eagle_aux_hidden_state_layer_ids=[1, 2],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
        **flags,
    )
    torch.manual_seed(4)
    model = Eagle3DraftModel(config)
    mask = torch.zeros(97, dtype=torch.bool)
    mask[torch.randperm(97)[:61]] = True
    ids = mask.nonzero()[:, 0]
    model.load_vocab_mappings(mask, ids - torch.arange(61))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
            if parameter.dim() == 1:
                parameter += 1
        embedding = tiny.checkpoint("llama").tensors["model.embed_tokens.weight"]
        model.embed_tokens.weight.copy_(embedding)
    model.save_pretrained(str(folder))
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("llama", {}),
        ("llama", {"norm_before_residual": True, "norm_output": True}),
        ("qwen3", {"fc_norm": True}),
        ("llama", {"norm_before_fc": True}),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_speculators_checkpoint_gives_equal_logits(kind, flags, tmp_path):
    theirs = made_by_speculators(tmp_path, kind, **flags)
    target = heads.target_of("llama", "float32")
    config, tensors = load_draft_head(tmp_path, target)
    made, ops = tiny.checkpoint("llama"), resolve("torch", CPU)
    parts = TargetParts(
        made.config, target, torch.float32, made.tensors["model.embed_tokens.weight"], None, lambda ids: ids
    )
    ours = DraftHeadModel(config, tensors, ops, 64, parts, 12)

    count = 12
    tokens, features = torch.randint(97, (count,)), torch.randn(count, 64)
    logits: list[Tensor] = []
    hook = theirs.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0]))
    with torch.no_grad():
        documents = torch.zeros((1, count), dtype=torch.int64)
        theirs(features[None], tokens[None], documents, ttt_steps=2)
    hook.remove()

    table = torch.arange(1, 5, dtype=torch.int32)[None]
    at = torch.arange(count)
    caches = [torch.zeros(2, 5, 8, config.num_kv_heads, config.head_dim)]
    rows = Rows(tokens, at, torch.zeros_like(at), 8 + at, table)
    row = ours.forward(rows, ours.feature(features), caches)
    got, after = ours.logits(row), ours.next_feature(row)
    assert torch.allclose(got[:, ours.ids], logits[0], atol=1e-4)
    assert got.isinf().sum() == count * 36
    for p in range(count - 2, -1, -1):  # one round after each row, with the next token
        row = Rows(tokens[p + 1 :][:1], at[p + 1 :][:1], at[:1] * 0, 8 + at[p + 1 :][:1], table)
        made = ours.forward(row, after[p : p + 1], caches)
        assert torch.allclose(ours.logits(made)[0, ours.ids], logits[1][p], atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_speculators_checkpoint_drafts_without_changing_outputs(tmp_path):
    made_by_speculators(tmp_path, "llama")
    requests = [Case(i, "none", 0.7, length=20, prompt=False) for i in range(2)]
    spec = {"method": "eagle3", "model": str(tmp_path), "adaptive": False}
    batch = Batch(requests, Setup("llama", "float32"), spec)
    assert batch.differences() == []
    assert sum(step.num_draft for record in batch.records.values() for step in record.steps) > 20
