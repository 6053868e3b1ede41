"""draft_model with the target's own weights: every draft must stand, whatever happens in between.

A row too few or too many in the draft model's storage, a position or a draw of noise that is off by one, a
page that was not there: each loses a draft somewhere.
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
    "reject": [False, True],  # drafts at every third place are made wrong
    "batch": [1, 3],
}


class Spoilt(DraftModelProposer):
    """Right, but for drafts at every third place of the output, which it makes wrong on purpose."""

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
    method = "test_draft_model:Spoilt" if case["reject"] else "draft_model"
    spec = {"method": method, "model": heads.itself(case["arch"], case["dtype"])}
    spec |= {"num_speculative_tokens": case["k"], "adaptive": case["adaptive"]}
    sizes: dict[str, Any] = {"page_size": 8, "enable_prefix_caching": case["prefix"] != "off"}
    if case["pages"] != "many":
        sizes["kv_cache_tokens"] = (cases[-1].length + 24 + 15) // 8 * 8
    batch = Batch(
        cases,
        Setup(case["arch"], case["dtype"], backend),
        spec,
        chunk=case["chunk"],
        arrivals=[0, 0, 2],
        overlap=case["overlap"],
        sizes=sizes,
        warm=case["prefix"] == "hit",
        preempts_all=case["pages"] == "preempted",
    )
    assert batch.differences() == []
    return batch.records


def fallen(records: dict[str, Any], spoilt: bool) -> tuple[int, list[str]]:
    """Drafts that stood, and what is wrong: a right one fell, or a wrong one stood."""
    stood, wrong = 0, []
    for name, record in records.items():
        place = 0
        for step in record.steps:
            expected = step.num_draft
            if spoilt:
                expected = min(expected, (2 - place) % 3)
            ended = step.finish_reason is not None
            if step.num_accepted != expected and not (ended and step.num_accepted < expected):
                wrong.append(f"{name} at {place}: {step.num_accepted} of {step.num_draft} stood")
            stood += step.num_accepted
            place += len(step.token_ids)
    return stood, wrong


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(map(str, case.values())))
def test_every_right_draft_stands(case):
    stood, wrong = fallen(serve(case), case["reject"])
    assert not wrong, wrong[:4]
    assert stood or case["k"] == 1 or case["adaptive"] or case["option"] == "stop_ids"


PLAIN = {name: levels[0] for name, levels in FACTORS.items()} | {"k": 3, "option": "long", "batch": 3}
HARD = PLAIN | {"temperature": 1.0, "chunk": 8, "pages": "preempted", "prefix": "hit", "reject": True}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_on_other_backends(backend):
    slow = {"batch": 1, "pages": "many", "arch": "smollm2"} if backend == "reference" else {}
    stood, wrong = fallen(serve(HARD | slow, backend), True)
    assert stood and not wrong


@pytest.mark.parametrize("reject", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_and_padded(temperature, reject):
    case = HARD | {"overlap": True, "k": 5, "reject": reject, "temperature": temperature, "pages": "few"}
    stood, wrong = fallen(serve(case, "padded_ops:PaddedOps"), reject)
    assert stood and not wrong


@pytest.mark.parametrize("method", heads.WITH_MODELS)
def test_captured_at_start(method):
    """What is captured in advance is what is met later."""
    setup = Setup(backend="padded_ops:PaddedOps")
    spec = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    cases = [Case(i, "long", 0.7, length=12, prompt=False) for i in range(3)]
    batch = Batch(cases, setup, spec, chunk=64, overlap=True, sizes={"warm_up": True})
    assert batch.differences() == []
    assert batch.engine is not None
    keys = [key for key, _ in batch.engine.loop.device.graphs.items() if key.kind == "draft"]
    assert {key[3].rounds for key in keys} == {0, 1, 2, 3}


@pytest.mark.parametrize("bug", ["position", "noise", "page", "token", "newest", "chunk"])
def test_control_what_a_slip_costs(bug, monkeypatch):
    """No output changes, but drafts fall."""
    rows, take, behind = DraftRounds.rows, DraftRounds.sample, DraftModelProposer._committed_rows
    if bug == "position":
        monkeypatch.setattr(
            DraftRounds, "rows", lambda *a: replace(rows(*a), positions=rows(*a).positions - 1)
        )
    if bug == "noise":
        monkeypatch.setattr(DraftRounds, "sample", lambda self, j, x: take(_later(self), j, x))
    if bug == "page":
        monkeypatch.setattr(DraftRounds, "rows", lambda *a: replace(rows(*a), kv_index=rows(*a).kv_index * 0))
    if bug == "token":
        monkeypatch.setattr(DraftRounds, "rows", lambda *a: replace(rows(*a), tokens=rows(*a).tokens + 1))
    if bug == "newest":  # it does not see the token that came last

        def late(self, batch):
            made, last = behind(self, batch)
            return made, (last - 1).clamp(min=0)

        monkeypatch.setattr(DraftModelProposer, "_committed_rows", late)
    if bug == "chunk":  # what a prompt's chunk begins with is taken for known

        def skips(self, batch):
            return behind(self, replace(batch, chunk=torch.zeros_like(batch.chunk)))

        monkeypatch.setattr(DraftModelProposer, "_committed_rows", skips)
    assert fallen(serve(PLAIN | {"temperature": 1.0, "chunk": 8}), False)[1]


def _later(rounds: DraftRounds) -> DraftRounds:
    if not hasattr(rounds, "was"):
        rounds.was = True  # type: ignore[attr-defined]
        rounds.draft_rows = replace(rounds.draft_rows, output_index=rounds.draft_rows.output_index + 1)
    return rounds


def test_what_cannot_draft_is_refused():
    setup = Setup()
    with pytest.raises(ConfigError, match="needs a model"):
        setup.engine({"method": "draft_model", "model": None})
    with pytest.raises(ConfigError, match="draft_sampling must be one of shared, argmax"):
        setup.engine({"method": "draft_model", "draft_sampling": "beam"})
