"""Budget of grammar matching: a grammar that is slow to match fails its own request and delays no other."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

import grammars
import proposers
import tiny
from draftproof.engine.step.mask_thread import MaskTask, MaskThread
from draftproof.errors import GRAMMAR_TOO_SLOW, ConfigError
from draftproof.sampling_params import SamplingParams
from draftproof.types import Grammar, GrammarState
from draftproof.verify.grammar_guide import GrammarGuide
from exact import compare
from grammars import words
from words import Words, WordsState

W = -(-tiny.VOCAB // 32)
TEXTS = ("aaaaaa", "abcabc", "fedfed", "ffffff")
AMBIGUOUS = {
    "regex": {"regex": "([a-z ]*[a-z ]*[a-z ]*[a-z ]*)*0"},
    "grammar": {"grammar": 'root ::= root root root | [a-z] | ""'},
}
SPECS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "Perfect": {"method": "proposers:Perfect", "num_speculative_tokens": 5, "adaptive": False},
}
PARAMS = SamplingParams(max_tokens=80, logprobs=2)


class Slow(Words):
    """Grammar of words. From `after` tokens on, advancing by a token takes a second of CPU time or more."""

    after = 3

    def start(self) -> GrammarState:
        return SlowState(self)


class SlowState(WordsState):
    def accept(self, token: int) -> bool:
        if len(self.tokens) >= Slow.after:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # without the interpreter lock, as xgrammar
        return super().accept(token)


def slow_words() -> Grammar:
    whole = words(*TEXTS)
    return Slow(TEXTS, whole.produced, whole.silent, whole.eos)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_ambiguous_grammar_fails_its_request_alone(kind: str, spec: str) -> None:
    true = grammars.token_of("true")
    ambiguous = grammars.grammars().compile(SamplingParams(structured_outputs=AMBIGUOUS[kind]))
    params = replace(PARAMS, allowed_token_ids=[true])
    target = tiny.engine(speculative=SPECS[spec], max_grammar_seconds=0.02)
    usual = [tiny.request(i, PARAMS, grammar=grammars.grammar("json")) for i in range(2)]
    alone = tiny.run(tiny.engine(speculative=None), usual)
    proposers.set_outputs({name: record.token_ids for name, record in alone.items()} | {"2": [true] * 80})
    got = tiny.run(target, [*usual, tiny.request(2, params, grammar=ambiguous)])
    assert got["2"].finish[0] == "error" and GRAMMAR_TOO_SLOW in str(got["2"].finish[2])
    assert 0 < len(got["2"].token_ids) < 80
    for name, record in alone.items():
        assert compare(name, record, got[name]) == []


def test_call_beyond_the_limit_is_abandoned_and_the_other_masks_are_computed() -> None:
    thread = MaskThread(step_seconds=0.05)
    guides = [GrammarGuide(grammar, 0.05) for grammar in (words(*TEXTS), slow_words(), words(*TEXTS))]
    tokens = [grammars.token_of(c) for c in "abca"]
    for guide in guides:
        guide.commit(tokens)
    expected, _ = thread.fill([MaskTask(guides[0], [])], W)
    masks, errors = thread.fill([MaskTask(guide, []) for guide in guides], W)
    assert [list(own) for own in errors] == [[], [0], []] and GRAMMAR_TOO_SLOW in errors[1][0]
    assert torch.equal(masks[0:1], expected) and torch.equal(masks[2:3], expected)
    assert not masks[1].any()
    masks, errors = thread.fill([MaskTask(guide, []) for guide in guides], W)
    assert [list(own) for own in errors] == [[], [0], []], "a failed request stays failed, at no cost"


def test_requests_of_a_step_share_its_budget() -> None:
    thread = MaskThread(step_seconds=0.05)
    guides = [GrammarGuide(slow_words(), budget_seconds=100.0) for _ in range(2)]
    for guide in guides:
        guide.commit([grammars.token_of(c) for c in "abca"])
    _, errors = thread.fill([MaskTask(guide, []) for guide in guides], W)
    assert [list(own) for own in errors] == [[0], [0]]


def test_ordinary_grammars_are_not_charged() -> None:
    for name in grammars.STRUCTURES:
        grammar = grammars.grammar(name)
        assert grammar is not None
        guide, mask = GrammarGuide(grammar, 1.0), torch.zeros((1, W), dtype=torch.int32)
        for _ in range(30):
            assert guide.fill([], mask) == {}
            bits = mask[0][:, None] >> torch.arange(32, dtype=torch.int32) & 1
            guide.commit([int(bits.view(-1)[: tiny.VOCAB].nonzero()[0, 0])])
        assert guide.seconds_left > 0.9


@pytest.mark.parametrize("value", [0, -1, True, "2"])
def test_budget_must_be_positive(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_grammar_seconds must be a positive number"):
        tiny.engine(max_grammar_seconds=value)
