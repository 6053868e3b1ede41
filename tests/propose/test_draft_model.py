"""Draft model with the target's weights: every draft must be accepted.

A row too few or too many in its KV cache, a position or noise off by one, or a missing page loses a draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import heads
from covering import pairwise
from draftproof.errors import ConfigError
from draftproof.propose.draft_model import DraftModelProposer
from draftproof.propose.draft_rounds import DraftRounds
from exact import OPTIONS, Batch, Case, Setup

FACTORS = {
    "temperature": [0.0, 1.0],
    "k": [1, 3, 5],
    "arch": ["llama", "qwen2", "qwen3", "mistral", "llama3"],
    "dtype": ["float32", "bfloat16"],
    "chunk": [8, 16, 512],
    "overlap": [False, True],
    "prefix": ["miss", "hit", "off"],
    "pages": ["many", "few", "preempted"],
    "adaptive": [False, True],
    "option": ["long", "top_k", "stop_ids", "draft_logprobs"],
    "reject": [False, True],  # EveryThirdWrong
    "batch": [1, 3],
}


class EveryThirdWrong(DraftModelProposer):
    """Draft model whose drafts at every third place of the output are wrong."""

    def draft(self, batch: Any) -> Any:
        made = super().draft(batch)
        columns, line = batch.columns, batch.slots.clamp(min=0)
        place = columns.length[line][:, None] - columns.prompt_len[line][:, None]
        place = place + torch.arange(made.tokens.shape[1], device=line.device)
        return replace(made, tokens=torch.where(place % 3 == 2, (made.tokens + 1) % 97, made.tokens))


@pytest.fixture(autouse=True)
def _long(monkeypatch):
    monkeypatch.setitem(OPTIONS, "long", {"ignore_eos": True, "max_tokens": 24})


def serve(case: dict[str, Any], backend: str = "auto") -> dict[str, Any]:
    cases = [
        Case(i, case["option"], case["temperature"], length=20 + 9 * i, prompt=False)
        for i in range(case["batch"])
    ]
    method = "test_draft_model:EveryThirdWrong" if case["reject"] else "draft_model"
    spec = {"method": method, "model": heads.target_copy(case["arch"], case["dtype"])}
    spec |= {"num_speculative_tokens": case["k"], "adaptive": case["adaptive"]}
    sizes: dict[str, Any] = {"page_size": 8, "enable_prefix_caching": case["prefix"] != "off"}
    if case["pages"] != "many":
        sizes["kv_cache_tokens"] = (cases[-1].length + 24 + 15) // 8 * 8
    how = {"chunk": case["chunk"], "overlap": case["overlap"], "preempts_all": case["pages"] == "preempted"}
    setup, warm = Setup(case["arch"], case["dtype"], backend), case["prefix"] == "hit"
    batch = Batch(cases, setup, spec, arrivals=[0, 0, 2], sizes=sizes, warm=warm, **how)
    assert batch.differences() == []
    return batch.records


def count_accepted(records: dict[str, Any], spoilt: bool) -> tuple[int, list[str]]:
    """Return the number of accepted drafts, and errors: a right draft rejected or a wrong one accepted."""
    num_accepted, wrong = 0, []
    for name, record in records.items():
        place = 0
        for step in record.steps:
            expected = step.num_draft
            if spoilt:
                expected = min(expected, (2 - place) % 3)
            ended = step.finish_reason is not None
            if step.num_accepted != expected and not (ended and step.num_accepted < expected):
                wrong.append(f"{name} at {place}: {step.num_accepted} of {step.num_draft} accepted")
            num_accepted += step.num_accepted
            place += len(step.token_ids)
    return num_accepted, wrong


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(map(str, case.values())))
def test_every_right_draft_is_accepted(case):
    num_accepted, wrong = count_accepted(serve(case), case["reject"])
    assert not wrong, wrong[:4]
    assert num_accepted or case["k"] == 1 or case["adaptive"] or case["option"] == "stop_ids"


PLAIN = {name: levels[0] for name, levels in FACTORS.items()} | {"k": 3, "option": "long", "batch": 3}
HARD = PLAIN | {"temperature": 1.0, "chunk": 8, "pages": "preempted", "prefix": "hit", "reject": True}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_every_right_draft_is_accepted_on_other_backends(backend):
    slow = {"batch": 1, "pages": "many", "arch": "smollm2"} if backend == "reference" else {}
    num_accepted, wrong = count_accepted(serve(HARD | slow, backend), True)
    assert num_accepted and not wrong


@pytest.mark.parametrize("reject", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_right_draft_is_accepted_in_captured_padded_steps(temperature, reject):
    case = HARD | {"overlap": True, "k": 5, "reject": reject, "temperature": temperature, "pages": "few"}
    num_accepted, wrong = count_accepted(serve(case, "padded_ops:PaddedOps"), reject)
    assert num_accepted and not wrong


@pytest.mark.parametrize("chunk", [8, 512])
@pytest.mark.parametrize("backend", ["auto", "padded_ops:PaddedOps"])
def test_draft_model_drafts_beside_a_search(backend, chunk):
    """Let prompts end in steps without room for one row more, which the first draft needs."""
    model = {"method": "draft_model", "model": heads.target_copy("llama", "float32")}
    spec = {"method": "hybrid", "proposers": [model, {"method": "ngram"}], "num_speculative_tokens": 3}
    cases = [Case(i, "long", 0.7, length=16 + 8 * i, prompt=False) for i in range(3)]
    batch = Batch(cases, Setup(backend=backend), {**spec, "adaptive": False}, arrivals=[0, 0, 2], chunk=chunk)
    assert batch.differences() == []
    steps = [step for record in batch.records.values() for step in record.steps]
    assert sum(step.num_accepted for step in steps) > len(steps)


@pytest.mark.parametrize("method", heads.WITH_MODELS)
def test_warm_up_captures_all_rounds(method):
    setup = Setup(backend="padded_ops:PaddedOps")
    spec = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    cases = [Case(i, "long", 0.7, length=12, prompt=False) for i in range(3)]
    batch = Batch(cases, setup, spec, chunk=64, overlap=True, sizes={"warm_up": True})
    assert batch.differences() == []
    assert batch.engine is not None
    captured = batch.engine.loop.device.graphs.captured
    assert {key[3].rounds for key in captured if key.kind == "draft"} == {0, 1, 2, 3}
    drafting = batch.engine.loop.device.drafting
    assert any(key.kind == "catch up" for key in captured) == drafting.defers_kv
    behind_prompts = [key for key in captured if key.kind == "draft" and key[3].has_prompts]
    assert bool(behind_prompts) == drafting.depends_on_prompts


@pytest.mark.parametrize("bug", ["position", "noise", "page", "token", "newest", "chunk"])
def test_control_defect_in_the_draft_model_loses_drafts(bug, monkeypatch):
    """No output changes, but drafts are rejected."""
    rows, sample, committed_rows = DraftRounds.rows, DraftRounds.sample, DraftModelProposer._committed_rows
    if bug == "position":
        monkeypatch.setattr(
            DraftRounds, "rows", lambda *a: replace(rows(*a), positions=rows(*a).positions - 1)
        )
    if bug == "noise":
        monkeypatch.setattr(DraftRounds, "sample", lambda self, j, x: sample(_shift_noise(self), j, x))
    if bug == "page":
        monkeypatch.setattr(DraftRounds, "rows", lambda *a: replace(rows(*a), kv_index=rows(*a).kv_index * 0))
    if bug == "token":
        monkeypatch.setattr(DraftRounds, "rows", lambda *a: replace(rows(*a), tokens=rows(*a).tokens + 1))
    if bug == "newest":

        def ignore_newest(self, batch):
            made, last = committed_rows(self, batch)
            return made, (last - 1).clamp(min=0)

        monkeypatch.setattr(DraftModelProposer, "_committed_rows", ignore_newest)
    if bug == "chunk":

        def ignore_chunk(self, batch):
            return committed_rows(self, replace(batch, chunk=torch.zeros_like(batch.chunk)))

        monkeypatch.setattr(DraftModelProposer, "_committed_rows", ignore_chunk)
    num_accepted, wrong = count_accepted(serve(PLAIN | {"temperature": 1.0, "chunk": 8}), False)
    assert wrong or not num_accepted


def _shift_noise(rounds: DraftRounds) -> DraftRounds:
    if not hasattr(rounds, "was"):
        rounds.was = True  # type: ignore[attr-defined]
        rounds.draft_rows = replace(rounds.draft_rows, output_index=rounds.draft_rows.output_index + 1)
    return rounds


def test_invalid_options_are_refused():
    setup = Setup()
    with pytest.raises(ConfigError, match="needs a model"):
        setup.engine({"method": "draft_model", "model": None})
    with pytest.raises(ConfigError, match="draft_sampling must be one of shared, argmax"):
        setup.engine({"method": "draft_model", "draft_sampling": "beam"})
