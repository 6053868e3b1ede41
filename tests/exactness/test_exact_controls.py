"""Negative controls: an engine broken on purpose, in one way each, must be found out by the comparison.

The solo run is done by the same broken engine, so what is found is that speculation or company changed
the output, not merely that the engine is odd.
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch

from draftproof.engine.step import host_logprobs
from draftproof.ops.torch.forward import TorchForward
from draftproof.types import PICK, Choice, Windows
from draftproof.verify import logits_processing
from draftproof.verify.target_match import TargetMatch
from exact import MANY_ENDS, OPTIONS, Batch, Case, Setup, plant
from exact_faults import one_too_many

PERFECT = {"method": "proposers:Perfect", "num_speculative_tokens": 5, "adaptive": False}
FLAKY = {"method": "proposers:Flaky", "num_speculative_tokens": 5, "adaptive": False}


def found(case: Case, spec=FLAKY, setup=None, **batch) -> list[str]:
    setup = setup or Setup()
    neighbours = batch.pop("neighbours", [])
    engine = setup.engine(spec, debug=False, max_num_batched_tokens=batch.pop("chunk", 64))
    return Batch([*neighbours, case], setup, engine=engine, **batch).differences(fresh=True)


def at_the_window(windows: Windows) -> Windows:
    """As if every row were its window's first: drafts before it are not seen."""
    none = torch.zeros_like(windows.depth)
    return replace(windows, depth=none, position=windows.position - windows.depth)


@pytest.mark.parametrize("option", ["frequency", "presence", "repetition"])
def test_penalties_that_ignore_drafts_in_the_window(monkeypatch, option):
    case = Case(0, option, 0.7, length=20)
    assert not found(case, PERFECT)
    plant(monkeypatch, "apply_penalties", lambda whole, ops, logits, w: whole(ops, logits, at_the_window(w)))
    assert any("logprobs" in line for line in found(case, PERFECT))


def keyed_by_row(windows):
    return torch.arange(len(windows.slot))


def keyed_by_step(windows):
    return windows.position - windows.depth


def keyed_by_slot(windows):
    return windows.position + 100 * windows.slot


@pytest.mark.parametrize("key", [keyed_by_row, keyed_by_step, keyed_by_slot])
def test_noise_with_the_wrong_key(monkeypatch, key):
    case = Case(0, "none", 1.3, length=20)
    neighbours = [Case(1, "none", 1.3)]
    assert not found(case, neighbours=neighbours)

    def broken(layout, ops, plan, columns, page_size, out):
        layout(ops, plan, columns, page_size, out)
        out.windows.position.copy_(key(out.windows))

    plant(monkeypatch, "layout", broken)
    assert any("request 0: tokens" in line for line in found(case, neighbours=neighbours))


def _off_by_rows(whole):
    def linear(self, x, packed, out_dtype=None):
        out = whole(self, x, packed, out_dtype)
        return out * (1 + 2**-20 * (len(x) % 3))

    return linear


@pytest.mark.parametrize("what", ["drafts", "chunks", "neighbours"])
def test_a_gemm_whose_bits_depend_on_the_number_of_rows(monkeypatch, what):
    """One part in a million in fp32: no token changes, the logprobs tell."""
    case = Case(0, "none", 0.0, length=40)
    spec, chunk = (FLAKY, 64) if what == "drafts" else (None, 16 if what == "chunks" else 64)
    batch = {"neighbours": [Case(1, "none", 0.0)] if what == "neighbours" else [], "chunk": chunk}
    setup = Setup(backend="torch")
    assert not found(case, spec, setup, **batch)
    monkeypatch.setattr(TorchForward, "linear", _off_by_rows(TorchForward.linear))
    assert any("request 0: logprobs" in line for line in found(case, spec, setup, **batch))


def test_acceptance_of_one_draft_too_many(monkeypatch):
    case = Case(0, "none", 0.7, length=20)
    monkeypatch.setattr(TargetMatch, "decide", one_too_many(TargetMatch.decide))
    assert any("tokens" in line for line in found(case))


def test_the_token_after_the_drafts_from_the_wrong_row(monkeypatch):
    case = Case(0, "none", 0.7, length=20)

    def broken(self, windows, scores):
        before = torch.where(windows.depth > 0, scores.sampled.roll(1), scores.sampled)
        return Choice(before, windows.draft == scores.sampled)

    monkeypatch.setattr(TargetMatch, "decide", broken)
    assert any("tokens" in line for line in found(case))


def test_kv_of_rejected_drafts_that_stays(monkeypatch):
    """Each position is stored once: after a rejection the KV of the fallen draft is read."""
    case = Case(0, "none", 0.0, length=20)
    assert not found(case)
    seen = WeakKeyDictionary()

    def broken(layout, ops, plan, columns, page_size, out):
        layout(ops, plan, columns, page_size, out)
        rows, newest = out.rows, seen.get(ops, -1)
        rows.kv_index[rows.positions <= newest] = 0
        seen[ops] = max(newest, int(rows.positions.max()))

    plant(monkeypatch, "layout", broken)
    assert any("logprobs" in line for line in found(case))


def test_computed_that_runs_one_too_far(monkeypatch):
    """After a window with drafts the newest token is taken to have KV already."""
    case = Case(0, "none", 0.0, length=20, k=3)
    assert not found(case)

    def broken(commit, ops, plan, windows, choice, bad, out):
        commit(ops, plan, windows, choice, bad, out)
        real = windows.slots >= 0
        windows.columns.computed[windows.slots[real]] += windows.num_draft[real] > 0

    plant(monkeypatch, "commit", broken)
    assert any("logprobs" in line for line in found(case))


def test_logprobs_from_the_wrong_row(monkeypatch):
    case = Case(0, "none", 0.7, length=20)
    assert not found(case, PERFECT)

    def broken(commit, ops, plan, windows, choice, bad, out):
        commit(ops, plan, windows, choice, bad, out)
        real = out.pick_rows >= 0
        out.pick_rows[real] -= windows.depth[out.pick_rows[real]]

    plant(monkeypatch, "commit", broken)
    assert any("logprobs" in line for line in found(case, PERFECT))


def test_logprobs_handed_to_the_neighbour(monkeypatch):
    """PICK counted from another entry's first."""
    case, other = Case(0, "none", 0.7, length=20), Case(1, "none", 0.7, length=9)
    assert not found(case, PERFECT, neighbours=[other])

    def broken(commit, ops, plan, windows, choice, bad, out):
        commit(ops, plan, windows, choice, bad, out)
        out.table[:, PICK] = 0

    plant(monkeypatch, "commit", broken)
    assert any("request 0: logprobs" in line for line in found(case, PERFECT, neighbours=[other]))


def test_min_tokens_looked_at_when_the_window_starts(monkeypatch):
    monkeypatch.setitem(
        OPTIONS, "ends", {"min_tokens": 4, "stop_token_ids": MANY_ENDS, "logit_bias": {5: 30.0}}
    )
    case = Case(0, "ends", 0.7, length=20)
    assert not found(case, PERFECT)
    plant(monkeypatch, "apply_bans", lambda whole, ops, base, w: whole(ops, base, at_the_window(w)))
    assert any("tokens" in line for line in found(case, PERFECT))


@pytest.mark.parametrize("option", ["bad_words", "processor"])
def test_a_context_without_the_drafts(monkeypatch, option):
    case = Case(0, option, 1.3, length=20)
    assert not found(case, PERFECT)
    whole = logits_processing._context
    monkeypatch.setattr(
        logits_processing, "_context", lambda windows, row: whole(at_the_window(windows), row)
    )
    assert any("logprobs" in line for line in found(case, PERFECT))


def test_prompt_logprobs_that_forget_the_chunk(monkeypatch):
    """Rows of a later chunk judged as if they were the prompt's first."""
    case = Case(0, "none", 0.0, length=40)
    assert not found(case, chunk=16)
    whole = host_logprobs.prompt_logprobs
    monkeypatch.setattr(
        host_logprobs,
        "prompt_logprobs",
        lambda runner, request, computed, hidden: whole(runner, request, 0, hidden),
    )
    assert any("prompt logprobs" in line for line in found(case, chunk=16))
