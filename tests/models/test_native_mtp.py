"""MTP layers of a model's own checkpoint: formulas, unchanged outputs, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

import mtp_models
import tiny
from covering import pairwise
from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.engine.engine import Engine
from draftproof.errors import LoadError
from draftproof.models.draft_head.formats import read_draft_head
from draftproof.models.draft_head.model import DraftHeadModel
from draftproof.models.draft_head.mtp_forms import MTP_FORMS
from draftproof.models.load import load_checkpoint
from draftproof.models.quantized.write import OUTPUT_FORMATS, quantization_config, quantized_tensors
from draftproof.models.registry import MODELS
from draftproof.propose.draft_rounds import DraftRounds
from draftproof.propose.head import MtpProposer
from draftproof.propose.mtp_chain import ChainRows, MtpChain
from draftproof.sampling_params import SamplingParams
from exact import Batch, Case, Setup


class RecordedMtp(MtpProposer):
    """Proposer that records committed tokens, drafts and their logprobs."""

    records: ClassVar[list[tuple[list[int], list[int], list[float]]]] = []

    def draft(self, batch: Any) -> Any:
        made = super().draft(batch)
        for b, slot in enumerate(batch.slots.tolist()):
            if slot >= 0 and (count := int(made.count[b])):
                tokens = batch.columns.tokens[slot, : int(batch.columns.length[slot])].tolist()
                self.records.append(
                    (tokens, made.tokens[b, :count].tolist(), made.logprobs[b, :count].tolist())
                )
        return made


def engine(folder: str, spec: dict[str, Any] | None, **options: Any) -> Engine:
    """Return an engine for a folder, without a `model` key unless `spec` has one."""
    sizes = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "warm_up": False, **options}
    speculative = SpeculativeConfig.parse(spec) if spec else None
    return Engine(EngineConfig(model=folder, speculative=speculative, **sizes), load_checkpoint(folder))


def largest_difference(form: str, k: int, layers: int = 1) -> float:
    """Return `difference` of the tiny model with MTP layers of this form."""
    return difference(mtp_models.model(form, layers=layers), mtp_models.plain_reading(form, layers), k)


def difference(folder: str, plain: mtp_models.PlainMtp, k: int, **options: Any) -> float:
    """Serve requests greedily; return the largest difference between draft logprobs and the plain reading."""
    spec = {"method": "test_native_mtp:RecordedMtp", "num_speculative_tokens": k, "adaptive": False}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, include_draft_logprobs=True)
    served = engine(folder, spec, max_num_batched_tokens=16, overlap=False, **options)
    RecordedMtp.records.clear()
    tiny.run(served, [tiny.request(i, params, 5 + 18 * i) for i in range(2)])
    largest = 0.0
    assert len(RecordedMtp.records) >= 4
    assert {len(drafts) for _, drafts, _ in RecordedMtp.records} >= {k}
    for tokens, drafts, logprobs in RecordedMtp.records:
        wanted = torch.log_softmax(plain.logits(tokens, drafts), dim=-1)
        found = wanted.gather(1, torch.tensor(drafts)[:, None])[:, 0]
        best = wanted.max(-1).values - found  # 0 for greedy drafts
        largest = max(largest, float(best.max()), float((found - torch.tensor(logprobs)).abs().max()))
    return largest


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("form", MTP_FORMS)
def test_drafts_are_those_of_the_published_definition(form: str, k: int) -> None:
    assert largest_difference(form, k) < 1e-4


@pytest.mark.parametrize(("layers", "k"), [(2, 1), (2, 2), (2, 4), (3, 3), (3, 4)])
@pytest.mark.parametrize("form", MTP_FORMS)
def test_each_layer_of_a_chain_makes_one_draft_and_the_last_the_others(
    form: str, layers: int, k: int
) -> None:
    assert largest_difference(form, k, layers) < 1e-4


@pytest.mark.control
@pytest.mark.parametrize("bug", ["first layer again", "nothing kept", "rows of drafts"])
def test_control_defect_in_a_chain_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "first layer again":
        monkeypatch.setattr(MtpChain, "layer_of", lambda self, draft: draft % len(self.models))
    if bug == "nothing kept":  # from one step to the next
        run_step = MtpChain.run_step

        def forgetful(self: Any, *given: Any) -> Any:
            self._has_last.fill_(False)
            return run_step(self, *given)

        monkeypatch.setattr(MtpChain, "run_step", forgetful)
    if bug == "rows of drafts":  # only the last of them is computed
        before = ChainRows.before

        def last_row(self: Any, others: Any, entries: int) -> Any:
            return before(self, others, entries).last_of(entries)

        monkeypatch.setattr(ChainRows, "before", last_row)
    assert largest_difference("deepseek", 4, 3) > 1e-2


@pytest.mark.parametrize("family", [f for f in mtp_models.FAMILIES if f"{f}ForCausalLM" in MODELS])
def test_experts_and_latent_attention_work_inside_mtp_layers(family: str, tmp_path: Path) -> None:
    model = mtp_models.save_family(tmp_path, family, layers=2)
    plain = mtp_models.PlainMtp(str(tmp_path), mtp_models.FAMILIES[family][0], model, layers=2)
    assert difference(str(tmp_path), plain, 3, backend="torch") < 1e-4
    params = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, logprobs=1)
    requests = [tiny.request(i, params) for i in range(2)]
    spec = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    outputs = [tiny.run(engine(str(tmp_path), used, backend="torch"), requests) for used in (None, spec)]
    assert [outputs[0][r.id].same() for r in requests] == [outputs[1][r.id].same() for r in requests]


@pytest.mark.control
@pytest.mark.parametrize("bug", ["position", "feature", "next feature", "order"])
def test_control_defect_in_the_formula_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = "mimo"
    if bug == "position":  # of every draft but the first: a shift of all rows would change nothing
        rows = DraftRounds.rows

        def shifted(self: Any, j: int) -> Any:
            made = rows(self, j)
            return replace(made, positions=made.positions + 1)

        monkeypatch.setattr(DraftRounds, "rows", shifted)
    if bug == "order":
        monkeypatch.setitem(MTP_FORMS, form, replace(MTP_FORMS[form], is_hidden_first=False))
    if bug == "feature":
        form = "deepseek"
        monkeypatch.setitem(MTP_FORMS, form, replace(MTP_FORMS[form], has_normed_feature=False))
    if bug == "next feature":
        monkeypatch.setattr(DraftHeadModel, "next_feature", lambda self, row: row)
    assert largest_difference(form, 3) > 1e-2


# --- outputs ---

FACTORS: dict[str, list[Any]] = {
    "form": list(MTP_FORMS),
    "layers": [1, 3],
    "proposers": [("mtp",), ("mtp", "ngram"), ("mtp", "suffix", "ngram")],
    "dtype": ["float32", "bfloat16"],
    "temperature": [0.0, 1.0],
    "k": [1, 4],
    "chunk": [16, 512],
    "pages": ["many", "few", "preempted"],
    "cached": [True, False],
    "option": ["none", "draft_logprobs", "top_k"],
}


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(map(str, case.values())))
def test_outputs_do_not_change_with_mtp_prefix_cache_preemption_and_hybrid(case: dict[str, Any]) -> None:
    form, dtype = case["form"], case["dtype"]
    members = [{"method": name} for name in case["proposers"]]
    members[0]["model"] = mtp_models.model(form, dtype, case["layers"])
    spec: dict[str, Any] = members[0] if len(members) == 1 else {"method": "hybrid", "proposers": members}
    spec = {**spec, "num_speculative_tokens": case["k"], "adaptive": False}
    cases = [Case(i, case["option"], case["temperature"], length=14 + 9 * i, prompt=False) for i in range(3)]
    sizes: dict[str, Any] = {"page_size": 8, "enable_prefix_caching": case["cached"]}
    if case["pages"] != "many":
        sizes["kv_cache_tokens"] = 64
    how = {"chunk": case["chunk"], "preempts_all": case["pages"] == "preempted", "warm": case["cached"]}
    arch = mtp_models.FORM_ARCHITECTURES[form]
    batch = Batch(cases, Setup(arch, dtype), spec, arrivals=[0, 0, 2], sizes=sizes, **how)
    assert batch.differences() == []
    steps = [step for record in batch.records.values() for step in record.steps]
    assert sum(step.num_draft for step in steps) > 10


def test_embedding_and_lm_head_of_their_own_are_used(tmp_path: Path) -> None:
    tensors = mtp_models.write_model(tmp_path, "llama", "deepseek")
    path = tmp_path / "model.safetensors"
    stored, at = load_file(path), "model.layers.2."
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    save_file(stored | {at + own: stored[name].clone() for own, name in copies.items()}, path)
    config, weights = read_draft_head(tmp_path, 2)  # copies of the model's are shared
    assert (config.share_lm_head, config.own_embedding) == (True, False)
    assert len(weights) == len(tensors)
    save_file(stored | {at + own: 2 * stored[name] for own, name in copies.items()}, path)
    config, weights = read_draft_head(tmp_path, 2)
    assert (config.share_lm_head, config.own_embedding) == (False, True)
    assert {"embed_tokens.weight", "lm_head.weight"} <= weights.keys()


@pytest.mark.parametrize("quantized", ["model", "MTP layer", "both", "on load"])
def test_quantised_model_and_mtp_layer_are_independent(tmp_path: Path, quantized: str) -> None:
    layer = mtp_models.write_model(tmp_path, "llama", "deepseek", "bfloat16")
    path, form = tmp_path / "model.safetensors", OUTPUT_FORMATS["int8"]
    kept = {"model": set(layer), "MTP layer": load_file(path).keys() - layer.keys(), "both": set()}
    options: dict[str, Any] = {"quantization": "int8"} if quantized == "on load" else {}
    if not options:
        save_file(dict(quantized_tensors(load_file(path), form, 0, kept[quantized])), path)
        raw = json.loads((tmp_path / "config.json").read_text())
        raw["quantization_config"] = quantization_config(form, 0)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        _, weights = read_draft_head(tmp_path, 2)
        is_quantized = weights["layers.0.mlp.down_proj.weight"].format == "w8a8"
        assert is_quantized == (quantized != "model")
        target = load_checkpoint(tmp_path).weights["model.layers.0.mlp.down_proj.weight"].format
        assert (target == "w8a8") == (quantized != "MTP layer")
    params = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, logprobs=1)
    requests = [tiny.request(i, params) for i in range(2)]
    plain = tiny.run(engine(str(tmp_path), None, **options), requests)
    spec = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    drafted = tiny.run(engine(str(tmp_path), spec, **options), requests)
    assert {key: plain[key].same() for key in plain} == {key: drafted[key].same() for key in drafted}
    assert sum(step.num_draft for record in drafted.values() for step in record.steps) > 20


# --- refusals ---


def test_config_with_mtp_layers_without_tensors_is_an_error_with_the_reason(tmp_path: Path) -> None:
    mtp_models.write_model(tmp_path, "llama", "deepseek")
    path = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if "layers.2." not in name}
    save_file(kept, path)
    engine(str(tmp_path), None)  # loads without drafts
    reason = r"config.json names 1 MTP layer.*no tensor of one \(such as model\.layers\.2\.eh_proj"
    with pytest.raises(LoadError, match=reason):
        engine(str(tmp_path), {"method": "mtp"})


def test_wrong_mtp_tensors_are_named_in_the_error(tmp_path: Path) -> None:
    mtp_models.write_model(tmp_path, "qwen2", "mimo")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    down = "model.mtp_layers.0.mlp.down_proj.weight"
    save_file({name: tensor for name, tensor in stored.items() if name != down}, path)
    with pytest.raises(LoadError, match=f"its MTP layer: missing {down}"):
        engine(str(tmp_path), {"method": "mtp"})
    second = down.replace("mtp_layers.0", "mtp_layers.1")
    save_file(stored | {second: stored[down].clone()}, path)
    with pytest.raises(LoadError, match=r"its MTP layer: missing model\.mtp_layers\.1\.token_layernorm"):
        engine(str(tmp_path), {"method": "mtp"})
    unknown = {name.replace("mtp_layers", "mtp_other"): tensor for name, tensor in stored.items()}
    save_file(unknown, path)
    with pytest.raises(LoadError, match="have no known form; supported forms: deepseek"):
        engine(str(tmp_path), {"method": "mtp"})


def test_layers_beyond_the_last_are_refused_unless_the_config_names_them(tmp_path: Path) -> None:
    mtp_models.write_model(tmp_path, "llama", "deepseek", num_nextn_predict_layers=0)
    with pytest.raises(LoadError, match=r"no place for model\.layers\.2\."):
        load_checkpoint(tmp_path)
