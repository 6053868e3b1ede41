"""Structured outputs in the engine: exact under speculation, finishes, faults, negative controls.

The exactness matrix (test_exact.py) has grammars as one of its factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import grammars
import proposers
import tiny
from draftproof.engine.step import grammar_masks
from draftproof.engine.step.device_step import DeviceStep
from draftproof.sampling_params import SamplingParams
from draftproof.types import Grammar
from draftproof.verify import STRATEGIES
from draftproof.verify.grammar_guide import GrammarGuide
from exact import Batch, Case, Setup, compare, plant
from grammars import EOS, TINY, words
from words import Breaking

SPECS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    **{
        name: {"method": f"proposers:{name}", "num_speculative_tokens": 5, "adaptive": False}
        for name in ("Junk", "Perfect", "Flaky", "DevicePerfect", "DeviceFlaky")
    },
}
DRAFTED = [name for name in SPECS if name != "plain"]


def served(
    grammar: Grammar | None, spec: str = "plain", answers: dict[str, list[int]] | None = None, **params: Any
) -> dict[str, tiny.Record]:
    """Run requests with this grammar; `answers`: tokens that test proposers draft."""
    proposers.set_outputs(answers or {})
    values = SamplingParams(**{"max_tokens": 40, "logprobs": 3, "logprobs_mode": "processed", **params})
    target = tiny.engine(speculative=SPECS[spec])
    return tiny.run(target, [tiny.request(i, values, grammar=grammar) for i in range(4)])


def both(grammar: Grammar | None, spec: str, **params: Any) -> dict[str, tiny.Record]:
    """Return the records with drafts, after a check that they equal those without."""
    plain = served(grammar, **params)
    got = served(grammar, spec, {name: record.token_ids for name, record in plain.items()}, **params)
    assert differences(plain, got) == []
    return got


def differences(plain: dict[str, tiny.Record], got: dict[str, tiny.Record]) -> list[str]:
    return [line for name in plain for line in compare(name, plain[name], got[name])]


# --- ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_complete_grammar_ends_the_request_inside_a_window(spec: str) -> None:
    records = both(grammars.grammar("choice"), spec).values()
    for record in records:
        assert record.finish == ("stop", None, None) and record.token_ids[-1] == EOS
        assert TINY.text(record.token_ids) in grammars.STRUCTURES["choice"]["choice"]
        assert EOS not in record.token_ids[:-1]
    if spec == "Perfect":  # some drafts follow the end
        assert any(r.steps[-1].num_draft > r.steps[-1].num_accepted > 0 for r in records)


@pytest.mark.parametrize("spec", ["plain", "Perfect"])
def test_ignore_eos_allows_only_the_end_token_after_the_grammar(spec: str) -> None:
    for record in both(words("ab", "c"), spec, ignore_eos=True, max_tokens=9).values():
        assert record.finish[0] == "length" and len(record.token_ids) == 9
        assert TINY.text(record.token_ids) in ("ab", "c") and record.token_ids[-1] == EOS


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "params", [{"min_tokens": 9}, {"allowed_token_ids": [grammars.token_of(c) for c in "abd"]}], ids=str
)
def test_request_fails_if_options_forbid_all_tokens_of_the_grammar(spec: str, params: dict[str, Any]) -> None:
    for record in both(words("ab" if "allowed_token_ids" not in params else "abcd"), spec, **params).values():
        assert record.finish[0] == "error" and "forbid every one" in str(record.finish[2])
        assert TINY.text(record.token_ids) == "ab"


@pytest.mark.parametrize("spec", ["plain", "Flaky"])
def test_processed_logprobs_are_normalised_over_allowed_tokens(spec: str) -> None:
    for record in both(words("ab", "cd"), spec, temperature=1.0).values():
        first, second = record.logprobs[:2]
        pairs = zip(first.token_ids, first.logprobs, strict=True)
        allowed = {logprob for token, logprob in pairs if TINY.token_bytes(token) in b"ac"}
        assert abs(sum(torch.tensor(x).exp() for x in allowed) - 1) < 1e-5
        assert second.logprobs[0] == 0.0 and second.ranks[0] == 1


@pytest.mark.parametrize("policy", ["accept_all", "reject_all", "synthetic"])
def test_accept_policy_commits_no_forbidden_token(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {**(SPECS["Junk"] or {}), "accept_policy": policy}
    if policy == "synthetic":
        spec["synthetic_acceptance_length"] = 4.0
    monkeypatch.setitem(SPECS, "policy", spec)
    for record in served(grammars.grammar("choice"), "policy").values():
        assert TINY.text(record.token_ids) in grammars.STRUCTURES["choice"]["choice"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("spec", ["Junk", "Flaky"])
def test_verify_strategy_commits_no_forbidden_token(
    strategy: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPECS, "verified", {**(SPECS[spec] or {}), "verify_strategy": strategy})
    texts = ["red", "green", "greenish", "blue"]
    answers = {str(i): [grammars.token_of(c) for c in texts[i]] for i in range(4)}
    records = served(words(*texts), "verified", answers, temperature=1.5)
    assert all(TINY.text(r.token_ids) in texts and r.token_ids[-1] == EOS for r in records.values())
    if spec == "Flaky":
        assert sum(step.num_accepted for r in records.values() for step in r.steps) > 0


# --- faults -------------------------------------------------------------------------------------------

WHEN: dict[str, Callable[[str, list[int]], bool]] = {
    "start": lambda name, tokens: name == "start",
    "fill at once": lambda name, tokens: name == "fill",
    "fill later": lambda name, tokens: name == "fill" and len(tokens) == 3,
    "accept": lambda name, tokens: name == "accept" and len(tokens) == 3,
}
WORDS = ("aaaaaa", "abcabc", "fedfed", "ffffff")


@cache
def plain_words() -> dict[str, tiny.Record]:
    """Return the records without drafts of requests for one of the words."""
    return served(words(*WORDS))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("when", WHEN)
def test_grammar_that_raises_fails_its_own_request_alone(when: str, spec: str) -> None:
    whole, plain = words(*WORDS), plain_words()
    answers = {name: record.token_ids for name, record in plain.items()}
    proposers.set_outputs(answers)
    params = SamplingParams(max_tokens=40, logprobs=3, logprobs_mode="processed")
    requests = [tiny.request(i, params, grammar=whole) for i in range(4)]
    requests[1] = replace(requests[1], grammar=Breaking(whole, WHEN[when]))
    requests[3] = replace(requests[3], grammar=None, params=replace(params, max_tokens=10))
    got = tiny.run(tiny.engine(speculative=SPECS[spec], debug=False), requests)
    for name in ("0", "2"):
        assert compare(name, plain[name], got[name]) == []
    produced = {"start": 0, "fill at once": 0, "fill later": 3, "accept": 3}[when]
    assert got["1"].token_ids == answers["1"][:produced] and len(got["1"].logprobs) == produced
    reason = f"the grammar raised ValueError: {when.split()[0]} failed"
    assert got["1"].finish == ("error", None, reason)
    assert got["3"].finish[0] in ("stop", "length")


@pytest.mark.parametrize("spec", DRAFTED)
def test_grammar_failure_on_a_rejected_draft_fails_no_request(spec: str) -> None:
    whole = words("aaaaaa", "abcabc", "fedfed", "ffffff", "bbbbbb")
    plain = served(whole)
    produced = {tuple(r.token_ids[:n]) for r in plain.values() for n in range(len(r.token_ids) + 1)}
    broken = Breaking(
        whole, lambda name, tokens: name in ("fill", "accept") and tuple(tokens) not in produced
    )
    # drafts that the grammar allows and the model rejects
    others = {name: [grammars.token_of(c) for c in "bbbbbb"] for name in plain}
    assert differences(plain, served(broken, spec, others)) == []


@pytest.mark.parametrize("spec", DRAFTED)
def test_grammar_that_cannot_roll_back_is_rebuilt(spec: str) -> None:
    whole, plain = words(*WORDS), plain_words()
    broken = Breaking(whole, lambda name, tokens: name == "rollback" and len(tokens) > 1)
    answers = {name: record.token_ids for name, record in plain.items()}
    assert differences(plain, served(broken, spec, answers)) == []


# --- negative controls ------------------------------------------------------------------------------------

PERFECT, FLAKY = SPECS["Perfect"], SPECS["Flaky"]
CASES = [Case(i, "none", 1.3, length=9, grammar=name) for i, name in enumerate(("json", "regex", "none"))]
REGEX_CASES = [Case(i, "none", 1.3, length=9, grammar="regex") for i in range(7)]


def found(spec: dict[str, Any] | None, cases: list[Case] = CASES) -> list[str]:
    setup = Setup()
    return Batch(cases, setup, engine=setup.engine(spec, debug=False)).differences(fresh=True)


def test_correct_engine_has_no_differences() -> None:
    assert found(PERFECT) == found(FLAKY) == []


def test_control_masks_that_ignore_drafts_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GrammarGuide.fill

    def broken(self: GrammarGuide, drafts: Any, rows: torch.Tensor, *limit: float) -> dict[int, str]:
        errors = whole(self, [], rows[:1])
        rows[1:] = rows[0]
        return errors

    monkeypatch.setattr(GrammarGuide, "fill", broken)
    assert any("request 0: tokens" in line for line in found(PERFECT))


def test_control_guide_that_does_not_roll_back_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(FLAKY, REGEX_CASES) == []
    monkeypatch.setattr(GrammarGuide, "_roll_back", lambda self, count: None)
    assert any("tokens" in line for line in found(FLAKY, REGEX_CASES))


def test_control_masks_of_other_rows_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DeviceStep.set_masks
    monkeypatch.setattr(
        DeviceStep, "set_masks", lambda self, places, masks: whole(self, places, masks.roll(1, 0))
    )
    assert any("request 0: tokens" in line for line in found(PERFECT))


def test_control_masks_of_another_slot_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:

    def broken(mask: Any, ops: Any, base: torch.Tensor, windows: Any) -> None:
        assert windows.allowed is not None
        newest = windows.allowed[int(windows.slot.max()) : int(windows.slot.max()) + 1]
        mask(ops, base, replace(windows, allowed=newest.expand_as(windows.allowed).contiguous()))

    plant(monkeypatch, "apply_grammar_mask", broken)
    assert any("tokens" in line for line in found(FLAKY))


def test_control_mask_on_a_request_without_grammar_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:

    def broken(mask: Any, ops: Any, base: torch.Tensor, windows: Any) -> None:
        windows.columns.adjust.bitwise_or_(16)
        windows.allowed[windows.slot[windows.slot >= 0][-1], 1:] = 1 << 20
        mask(ops, base, windows)

    plant(monkeypatch, "apply_grammar_mask", broken)
    assert any("request 2: tokens" in line for line in found(PERFECT))


def test_control_guide_without_accepted_drafts_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grammar_masks.commit_tokens

    def broken(planned: Any, table: Any, here: Any) -> None:
        last = table.copy()
        for line in last:
            count = int(line[0])
            if count > 1:
                line[6] = line[6 + count - 1]
                line[0] = 1
        whole(planned, last, here)

    monkeypatch.setattr(grammar_masks, "commit_tokens", broken)
    assert any("request 0" in line for line in found(PERFECT))
