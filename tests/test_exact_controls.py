"""Negative controls: an engine broken on purpose, in one way each, must be found out by the comparison.

The solo run is done by the same broken engine, so what is found is that speculation or company changed
the output, not merely that the engine is odd.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftproof.engine import loop, settle
from draftproof.models.runner import Runner
from draftproof.ops.torch_any import TorchOps
from draftproof.types import Windows
from draftproof.verify import process
from draftproof.verify.target_match import TargetMatch
from exact import MANY_ENDS, OPTIONS, Ask, Company, Where

PERFECT = {"method": "proposers:Perfect", "num_speculative_tokens": 5, "adaptive": False}
FLAKY = {"method": "proposers:Flaky", "num_speculative_tokens": 5, "adaptive": False}


def found(ask: Ask, spec=FLAKY, where=None, **company) -> list[str]:
    where = where or Where()
    neighbours = company.pop("neighbours", [])
    engine = where.engine(spec, debug=False, max_num_batched_tokens=company.pop("chunk", 64))
    return Company([*neighbours, ask], where, engine=engine, **company).differences(fresh=True)


def shallow(function, place):
    """`function` with the depth argument at `place` taken as 0: drafts in the window are not seen."""

    def broken(*args):
        return function(*args[:place], 0, *args[place + 1 :])

    return broken


@pytest.mark.parametrize("option", ["frequency", "presence", "repetition"])
def test_penalties_that_ignore_drafts_in_the_window(monkeypatch, option):
    ask = Ask(0, option, 0.7, length=20)
    assert not found(ask, PERFECT)
    whole = process._penalise

    def broken(logits, windows, rows):
        return whole(logits, replace(windows, depth=torch.zeros_like(windows.depth)), rows)

    monkeypatch.setattr(process, "_penalise", broken)
    assert any("logprobs" in line for line in found(ask, PERFECT))


def keyed_by_row(windows):
    return torch.arange(len(windows.owner))


def keyed_by_step(windows):
    out = windows.length - windows.columns.prompt_len[windows.slots]
    return out[windows.owner]


def keyed_by_slot(windows):
    return keyed_by_step(windows) + windows.depth + 100 * windows.slots[windows.owner]


@pytest.mark.parametrize("key", [keyed_by_row, keyed_by_step, keyed_by_slot])
def test_noise_with_the_wrong_key(monkeypatch, key):
    ask = Ask(0, "none", 1.3, length=20)
    neighbours = [Ask(1, "none", 1.3)]
    assert not found(ask, neighbours=neighbours)
    monkeypatch.setattr(Windows, "position", property(key))
    assert any("request 0: tokens" in line for line in found(ask, neighbours=neighbours))


def _off_by_rows(whole):
    def linear(self, x, packed, out_dtype=None):
        out = whole(self, x, packed, out_dtype)
        return out * (1 + 2**-20 * (len(x) % 3))

    return linear


@pytest.mark.parametrize("what", ["drafts", "chunks", "neighbours"])
def test_a_gemm_whose_bits_depend_on_the_number_of_rows(monkeypatch, what):
    """One part in a million in fp32: no token changes, the logprobs tell."""
    ask = Ask(0, "none", 0.0, length=40)
    spec, chunk = (FLAKY, 64) if what == "drafts" else (None, 16 if what == "chunks" else 64)
    company = {"neighbours": [Ask(1, "none", 0.0)] if what == "neighbours" else [], "chunk": chunk}
    where = Where(backend="torch")
    assert not found(ask, spec, where, **company)
    monkeypatch.setattr(TorchOps, "linear", _off_by_rows(TorchOps.linear))
    assert any("request 0: logprobs" in line for line in found(ask, spec, where, **company))


def test_acceptance_of_one_draft_too_many(monkeypatch):
    ask = Ask(0, "none", 0.7, length=20)
    whole = TargetMatch.accepts

    def broken(*args):
        stands = whole(*args)
        return stands | torch.nn.functional.pad(stands[:, :-1], (1, 0))

    monkeypatch.setattr(TargetMatch, "accepts", broken)
    assert any("tokens" in line for line in found(ask))


def test_the_token_after_the_drafts_from_the_wrong_row(monkeypatch):
    ask = Ask(0, "none", 0.7, length=20)
    whole = TargetMatch.tokens
    monkeypatch.setattr(TargetMatch, "tokens", lambda *args: whole(*args).roll(1, 1))
    assert any("tokens" in line for line in found(ask))


def test_kv_of_rejected_drafts_that_stays(monkeypatch):
    """Each position is stored once: after a rejection the KV of the fallen draft is read."""
    ask = Ask(0, "none", 0.0, length=20)
    assert not found(ask)
    whole = Runner.rows
    seen: dict[int, int] = {}

    def broken(self, tokens, positions, slots, page_table):
        rows = whole(self, tokens, positions, slots, page_table)
        fresh = positions > seen.get(id(self), -1)
        seen[id(self)] = max(int(positions.max()), seen.get(id(self), -1))
        return replace(rows, kv_index=torch.where(fresh, rows.kv_index, 0))

    monkeypatch.setattr(Runner, "rows", broken)
    assert any("logprobs" in line for line in found(ask))


def test_computed_that_runs_one_too_far(monkeypatch):
    """After a window with drafts the newest token is taken to have KV already."""
    ask = Ask(0, "none", 0.0, length=20, k=3)
    assert not found(ask)
    whole = loop.commit

    def broken(windows, verdict, limit):
        done = whole(windows, verdict, limit)
        windows.columns.computed[windows.slots] += windows.num_draft > 0
        return done

    monkeypatch.setattr(loop, "commit", broken)
    assert any("logprobs" in line for line in found(ask))


def test_logprobs_from_the_wrong_row(monkeypatch):
    ask = Ask(0, "none", 0.7, length=20)
    whole = settle.logprob_rows

    def broken(ops, logits, wanted):
        return whole(ops, logits, [replace(w, rows=w.rows[:1] * len(w.rows)) for w in wanted])

    monkeypatch.setattr(settle, "logprob_rows", broken)
    assert any("logprobs" in line for line in found(ask, PERFECT))


def test_min_tokens_looked_at_when_the_window_starts(monkeypatch):
    monkeypatch.setitem(
        OPTIONS, "ends", {"min_tokens": 4, "stop_token_ids": MANY_ENDS, "logit_bias": {5: 30.0}}
    )
    ask = Ask(0, "ends", 0.7, length=20)
    assert not found(ask, PERFECT)
    monkeypatch.setattr(process, "_forbid", shallow(process._forbid, 4))
    assert any("tokens" in line for line in found(ask, PERFECT))


@pytest.mark.parametrize("option", ["bad_words", "processor"])
def test_a_context_without_the_drafts(monkeypatch, option):
    ask = Ask(0, option, 1.3, length=20)
    assert not found(ask, PERFECT)
    monkeypatch.setattr(process, "_context", shallow(process._context, 2))
    assert any("logprobs" in line for line in found(ask, PERFECT))


def test_prompt_logprobs_that_forget_the_chunk(monkeypatch):
    """Rows of a later chunk judged as if they were the prompt's first."""
    ask = Ask(0, "none", 0.0, length=40)
    whole = settle.Settler.prompt_logprobs

    def broken(self, entries, first, hidden):
        outputs = whole(self, entries, first, hidden)
        return [replace(o, prompt_logprobs=o.prompt_logprobs[::-1]) for o in outputs]

    assert not found(ask, chunk=16)
    monkeypatch.setattr(settle.Settler, "prompt_logprobs", broken)
    assert any("prompt logprobs" in line for line in found(ask, chunk=16))
