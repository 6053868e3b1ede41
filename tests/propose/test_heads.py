"""Draft heads: stored KV and features after every step, and a head that must always be accepted.

`Audited` computes the committed tokens of every request again after each step, target and head, and compares
bit by bit with the features and the KV of the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import heads
import tiny
from audited_head import Audited
from covering import pairwise
from draftproof.errors import ConfigError, LoadError
from draftproof.ops.cpu.draft_rounds import CpuRounds
from draftproof.propose.draft_rounds import DraftRounds
from draftproof.propose.head import Eagle3Proposer, EagleProposer, MtpProposer
from exact import OPTIONS, Batch, Case, Setup


class AuditedEagle3(Audited, Eagle3Proposer):
    pass


class AuditedEagle(Audited, EagleProposer):
    pass


class AuditedMtp(Audited, MtpProposer):
    pass


FACTORS = {
    "kind": ["eagle3", "eagle", "mtp"],
    "arch": ["llama", "qwen3", "mistral"],
    "dtype": ["float32", "bfloat16"],
    "temperature": [0.0, 1.3],
    "k": [1, 2, 5],
    "chunk": [8, 512],
    "overlap": [False, True],
    "pages": ["many", "few", "preempted"],
    "option": ["none", "top_k", "draft_logprobs"],
}


BASE = {name: levels[0] for name, levels in FACTORS.items()} | {"k": 3, "temperature": 1.3}


def serve_audited(case: dict[str, Any], cached: bool = False, **options: Any) -> Batch:
    kind, arch, dtype = case["kind"], case["arch"], case["dtype"]
    cases = [
        Case(i, case["option"], case["temperature"], length=14 + 9 * i, prompt=False, enabled=i != 1)
        for i in range(3)
    ]
    spec = {"method": f"test_heads:Audited{kind.title()}", "model": heads.head(kind, arch, dtype)}
    spec |= {"weights": f"{arch}/{dtype}", "num_speculative_tokens": case["k"], "adaptive": False}
    spec["cached"] = cached
    sizes: dict[str, Any] = {"page_size": 8, "enable_prefix_caching": cached}
    if case["pages"] != "many":
        sizes["kv_cache_tokens"] = 64
    how = {"chunk": case["chunk"], "overlap": case["overlap"], "preempts_all": case["pages"] == "preempted"}
    setup = Setup(arch, dtype, **options)
    batch = Batch(cases, setup, spec, arrivals=[0, 0, 2], sizes=sizes, warm=cached, **how)
    assert batch.differences() == []
    return batch


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(map(str, case.values())))
def test_stored_kv_is_that_of_the_committed_tokens(case):
    before = Audited.rows_checked
    serve_audited(case)
    assert Audited.rows_checked > before + 100


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_stored_kv_is_right_with_a_prefix_cache(kind):
    engine = serve_audited(BASE | {"kind": kind, "pages": "preempted"}, cached=True).engine
    assert engine is not None and engine.stats().num_cached_tokens > 0


def test_stored_kv_is_right_on_the_torch_backend():
    serve_audited(BASE | {"pages": "preempted"}, backend="torch")


@pytest.mark.parametrize("bug", ["token", "position", "stays", "keeps"])
def test_control_audit_detects_a_defect(bug, monkeypatch):
    shift_rows = CpuRounds.shift_rows

    def broken(self: Any, given: Any, *others: Any) -> Any:
        rows, last = shift_rows(self, given, *others)
        if bug == "token":  # the token of the row instead of the next
            return replace(rows, tokens=torch.where(rows.slots >= 0, given.tokens, 0)), last
        if bug == "position":
            return replace(rows, positions=torch.where(rows.slots >= 0, rows.positions + 1, 0)), last
        if bug == "stays":  # without the row of the newest token
            gone = torch.zeros_like(rows.slots, dtype=torch.bool)
            gone[last[last >= 0]] = True
            return replace(
                rows, slots=torch.where(gone, -1, rows.slots), kv_index=rows.kv_index * ~gone
            ), last
        return rows, last

    monkeypatch.setattr(CpuRounds, "shift_rows", broken)
    if bug == "keeps":  # the features of the step before
        runner = "draftproof.engine.drafting.device_proposer.DraftRunner"
        monkeypatch.setattr(f"{runner}.store_target_features", lambda self, *rows: None)
    with pytest.raises(AssertionError, match="differs"):
        serve_audited(BASE)


# --- a head that must be accepted ---

ONE = {"architecture": "MistralForCausalLM", "num_layers": 1, "windows": (9,)}


@pytest.fixture
def head_equal_to_the_model(monkeypatch):
    """Return the folder of a head whose layer is that of a one-layer model with a window of nine tokens.

    The row of the head at position p has token p + 1: all keys rotate alike, which changes last bits only.
    """
    monkeypatch.setitem(tiny.ARCHITECTURES, "one", ONE)
    monkeypatch.setitem(OPTIONS, "long", {"ignore_eos": True, "max_tokens": 40})
    made = tiny.checkpoint("one", "float32")
    size = made.config.hidden_size
    config = heads.head_config(
        "eagle", "one", num_layers=1, window=9, fc_bias=False, share_lm_head=True, intermediate_size=48
    )
    eye = torch.eye(size)
    tensors = {"fc.weight": torch.cat([eye, torch.zeros_like(eye)], 1), "norm.weight": torch.ones(size)}
    for name, tensor in made.tensors.items():
        if name.startswith("model.layers."):
            tensors[name.removeprefix("model.")] = tensor.clone()
    return heads.save_head("perfect", config, tensors)


def drafts_of(head: str, temperature: float, **how: Any) -> tuple[int, int]:
    cases = [Case(i, "long", temperature, length=20 + 9 * i, prompt=False) for i in range(3)]
    options = {"adaptive": how.pop("adaptive", False), **how.pop("options", {})}
    spec = {"method": "eagle", "model": head, "num_speculative_tokens": how.pop("k", 4), **options}
    sizes = {"page_size": 8, "enable_prefix_caching": False, **how.pop("sizes", {})}
    batch = Batch(cases, Setup("one", "float32"), spec, sizes=sizes, **how)
    assert batch.differences() == []
    steps = [step for record in batch.records.values() for step in record.steps]
    return sum(step.num_draft for step in steps), sum(step.num_accepted for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "how",
    [
        {"chunk": 512},
        {"chunk": 16, "arrivals": [0, 0, 2], "overlap": True},
        {"chunk": 16, "preempts_all": True, "sizes": {"kv_cache_tokens": 96}},
        {"chunk": 32, "sizes": {"kv_cache_tokens": 96}, "overlap": True, "k": 7, "adaptive": True},
    ],
)
def test_head_equal_to_the_model_is_always_accepted(head_equal_to_the_model, temperature, how):
    drafted, accepted = drafts_of(head_equal_to_the_model, temperature, **how)
    assert drafted == accepted > 50


@pytest.mark.parametrize("bug", ["position", "noise", "token"])
def test_control_defect_in_draft_rounds_loses_drafts(head_equal_to_the_model, bug, monkeypatch):
    """Outputs stay equal, but drafts are rejected."""
    rows, windows = DraftRounds.rows, DraftRounds.windows
    if bug == "position":
        monkeypatch.setattr(
            DraftRounds, "rows", lambda *a: replace(rows(*a), positions=rows(*a).positions + 1)
        )
    if bug == "token":
        monkeypatch.setattr(DraftRounds, "rows", lambda *a: replace(rows(*a), tokens=rows(*a).tokens // 2))
    if bug == "noise":

        def other_seed(self: Any, j: int) -> Any:
            made = windows(self, j)
            return replace(made, columns=replace(made.columns, seed=made.columns.seed + 1))

        monkeypatch.setattr(DraftRounds, "windows", other_seed)
    drafted, accepted = drafts_of(head_equal_to_the_model, 1.0, chunk=16)
    assert accepted < 0.9 * drafted


def test_shared_noise_is_accepted_more_often_than_argmax(head_equal_to_the_model):
    shared = drafts_of(head_equal_to_the_model, 1.0, chunk=512)
    greedy = drafts_of(head_equal_to_the_model, 1.0, chunk=512, options={"draft_sampling": "argmax"})
    assert shared[1] / shared[0] > greedy[1] / greedy[0] + 0.2


# --- refusals ---


def refuse(
    kind: str, match: str, error: type[Exception] = LoadError, method: str = "", **fields: Any
) -> None:
    config = heads.head_config(kind, **fields)
    head = heads.save_head("refused", config, heads.head_tensors(config))
    with pytest.raises(error, match=match):
        Setup().engine({"method": method or kind, "model": head})


def test_head_of_another_model_is_refused_with_the_reason():
    target = heads.target_of("llama", "float32")
    refuse("mtp", "made for another model: its target's digest", target=replace(target, digest="0" * 32))
    refuse("mtp", "number of layers is 3, this model's is 2", target=replace(target, num_layers=3))
    refuse("eagle3", "vocabulary is 300, this model's is 97", target=replace(target, vocab_size=300))
    refuse("mtp", "class is Qwen2", target=replace(target, model_type="Qwen2ForCausalLM"))
    wide = replace(target, hidden_size=64)
    refuse("mtp", "hidden size is 64, this model's is 32", hidden_size=64, target=wide)
    refuse("mtp", "kind 'mtp': use method 'mtp'", ConfigError, method="eagle3")
    with pytest.raises(ConfigError, match="needs a head"):
        Setup().engine({"method": "mtp", "model": None})


def test_invalid_head_folder_is_refused(tmp_path):
    with pytest.raises(LoadError, match="a head is a folder"):
        Setup().engine({"method": "mtp", "model": str(tmp_path)})
    with pytest.raises(LoadError, match="no tensor that joins"):
        Setup().engine({"method": "mtp", "model": heads.small("float32")})
    config = heads.head_config("eagle3")
    tensors = heads.head_tensors(config)
    tensors["d2t"][3] = tensors["d2t"][4]
    with pytest.raises(LoadError, match="d2t does not name each id"):
        Setup().engine({"method": "eagle3", "model": heads.save_head("twice", config, tensors)})
    del tensors["fc.weight"]
    with pytest.raises(LoadError, match="missing fc.weight"):
        Setup().engine({"method": "eagle3", "model": heads.save_head("twice", config, tensors)})
