"""Thinking budget: the end marker is forced after exactly that many tokens, with drafts as without.

The exactness matrix of grammars (test_exact.py) has budgets among its levels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import grammars
import proposers
import tiny
from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.text.grammar.compiler import GrammarCompiler
from draftproof.text.reasoning.budget import ThinkingBudgetState
from draftproof.text.reasoning.formats import ReasoningFormat
from draftproof.text.reasoning.section import Phase, Reasoning
from draftproof.types import Grammar
from draftproof.verify.grammar_guide import GrammarGuide, is_set
from exact import Setup, compare
from grammars import ARROW, TINY

METHODS = ["ngram", "suffix", "eagle3", "draft_model", "hybrid", "proposers:Perfect", "proposers:DeviceFlaky"]
NO_ARROW = {32: -50.0}  # the model never ends the reasoning by itself


def served(grammar: Grammar | None, method: str | None, answers: Any = None, **params: Any) -> Any:
    """Run four requests, two of them with the grammar."""
    proposers.set_outputs(answers or {})
    spec = {"method": method, "num_speculative_tokens": 5, "adaptive": False} if method else None
    values = SamplingParams(**{"max_tokens": 14, "logprobs": 3, "ignore_eos": True, **params})
    requests = [tiny.request(i, values, grammar=grammar if i % 2 else None) for i in range(4)]
    return tiny.run(Setup().engine(spec), requests)


def differences(plain: Any, got: Any) -> list[str]:
    return [line for name in plain for line in compare(name, plain[name], got[name])]


@pytest.mark.parametrize("method", METHODS)
def test_end_is_forced_after_the_budget_and_equal_without_drafts(method: str) -> None:
    for num_tokens in (0, 1, 4, 7):
        grammar = grammars.budget(num_tokens, is_open=True)
        plain = served(grammar, None, temperature=1.2)
        answers = {name: record.token_ids for name, record in plain.items()}
        got = served(grammar, method, answers, temperature=1.2)
        assert differences(plain, got) == []
        for name in ("1", "3"):
            tokens = got[name].token_ids
            end = next(i for i in range(len(tokens)) if tokens[i : i + 2] == ARROW)
            assert end <= num_tokens and len(tokens) == 14
    if method == "proposers:Perfect":
        assert _has_draft_over_the_end(got["1"])


def _has_draft_over_the_end(record: tiny.Record) -> bool:
    """Return whether one step committed tokens before, of and behind the end marker."""
    at = 0
    for step in record.steps:
        tokens = record.token_ids[: at + len(step.token_ids)]
        if len(step.token_ids) > 3 and ARROW[1] in tokens[at + 1 : -1]:
            return True
        at += len(step.token_ids)
    return False


def test_budget_that_is_not_reached_changes_nothing() -> None:
    free = served(None, None, temperature=0.8)
    for method in (None, "proposers:Perfect"):
        answers = {name: record.token_ids for name, record in free.items()}
        got = served(grammars.budget(99, is_open=True), method, answers, temperature=0.8)
        assert differences(free, got) == []


def test_control_forced_rows_without_the_drafts_before_them_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammar = grammars.budget(4, is_open=True)
    plain = served(grammar, None)
    answers = {name: record.token_ids for name, record in plain.items()}
    assert differences(plain, served(grammar, "proposers:Perfect", answers)) == []
    fill = GrammarGuide.fill

    def broken(self: GrammarGuide, drafts: Any, rows: torch.Tensor, seconds: float) -> dict[int, str]:
        errors = fill(self, [], rows[:1], seconds)
        rows[1:] = rows[0]
        return errors

    monkeypatch.setattr(GrammarGuide, "fill", broken)
    assert any("tokens" in line for line in differences(plain, served(grammar, "proposers:Perfect", answers)))


def test_control_drafts_that_stay_counted_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = grammars.budget(8, is_open=True)  # more than a window has
    plain = served(grammar, None, logit_bias=NO_ARROW)
    answers = {name: record.token_ids for name, record in plain.items()}
    assert differences(plain, served(grammar, "proposers:Flaky", answers, logit_bias=NO_ARROW)) == []

    def broken(self: ThinkingBudgetState, count: int) -> None:
        kept = self._states[-1].num_tokens
        del self._states[len(self._states) - count :]
        if self._states[-1].phase is Phase.INSIDE:
            self._states[-1] = self._states[-1]._replace(num_tokens=kept)

    monkeypatch.setattr(ThinkingBudgetState, "rollback", broken)
    got = served(grammar, "proposers:Flaky", answers, logit_bias=NO_ARROW)
    assert any("tokens" in line for line in differences(plain, got))


# --- the grammar itself -------------------------------------------------------------------------------------

FORM = ReasoningFormat("test", "", ("<",), ("=>",), ())


class Encoding(grammars.TinyTokenizer):
    """Tiny tokenizer that also encodes, a character a token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [grammars.token_of(char) for char in text]


@cache
def compiler() -> GrammarCompiler:
    tokenizer: Any = Encoding()
    return GrammarCompiler(tokenizer, tiny.VOCAB, [grammars.EOS], Reasoning(FORM, tokenizer, tiny.VOCAB))


def compiled(prompt: str, budget: int | None, **structure: Any) -> Any:
    params = SamplingParams(thinking_token_budget=budget, structured_outputs=structure or None)
    return compiler().compile(params, Encoding().encode(prompt))


def allowed(state: Any) -> str:
    """Return the tokens that may follow, as text; "*" for all of them."""
    row = torch.zeros(-(-tiny.VOCAB // 32), dtype=torch.int32)
    state.fill(row)
    ids = [token for token in range(tiny.VOCAB) if is_set(row, token)]
    return "*" if len(ids) == tiny.VOCAB else TINY.text(ids)


def test_masks_of_an_open_prompt_and_of_a_section_that_the_model_starts() -> None:
    for prompt, text, masks in (
        ("q<", "ab=>c", ["*", "*", "=", ">", "*", "*"]),
        ("q", "<ab=>c", ["*", "*", "*", "=", ">", "*", "*"]),
        ("q", "abcd", ["*"] * 5),
        ("q<", "=>abc", ["*"] * 6),  # "=" is counted, and the end is complete at the second token
        ("q<", "a==>c", ["*", "*", "=", ">", "*", "*"]),  # forced whole behind an unfinished marker
    ):
        state = compiled(prompt, 2).start()
        seen = [allowed(state)]
        for char in text:
            assert state.accept(grammars.token_of(char))
            seen.append(allowed(state))
        assert seen == masks, (prompt, text)
        state.rollback(len(text))
        assert allowed(state) == masks[0]


def test_forced_state_refuses_other_tokens_and_stays() -> None:
    state = compiled("q<", 0).start()
    assert not state.accept(40) and allowed(state) == "="
    assert state.accept(ARROW[0]) and not state.accept(ARROW[0]) and allowed(state) == ">"


def test_structured_output_begins_behind_the_reasoning_of_an_open_prompt() -> None:
    for budget in (None, 1):
        state = compiled("q<", budget, choice=["red"]).start()
        seen = [allowed(state)]
        for char in "a=>re":
            assert state.accept(grammars.token_of(char))
            seen.append(allowed(state))
        assert seen[-3:] == ["r", "e", "d"]
        assert seen[1] == "=" if budget else len(seen[1]) > 80
    closed = compiled("q", 1, choice=["red"]).start()
    assert allowed(closed) == "r"  # no reasoning is possible, so the budget is kept


def test_budget_is_refused_without_markers_and_with_wrong_values() -> None:
    with pytest.raises(RequestError, match="reasoning_parser") as caught:
        GrammarCompiler(TINY, tiny.VOCAB, [2]).compile(SamplingParams(thinking_token_budget=3))
    assert caught.value.param == "thinking_token_budget"
    for value in (-1, 1.5, True, "3"):
        with pytest.raises(RequestError, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=value)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be compiled"):
        tiny.engine().check(tiny.request(0, SamplingParams(thinking_token_budget=3)))
