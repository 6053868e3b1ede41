"""Grammar masks of every row against trying every token, and masks of draft windows.

The oracle (`words`) holds finitely many words and checks for every token whether a word begins so.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import grammars
import tiny
from draftproof.sampling_params import SamplingParams
from draftproof.types import Grammar
from draftproof.verify.grammar_guide import OPEN_WORD, GrammarGuide, is_set
from grammars import EOS, TINY, words
from words import Words

W = -(-tiny.VOCAB // 32)
LAST = (1 << tiny.VOCAB % 32) - 1  # bits of the last word that are tokens


def every(*parts: list[str]) -> list[str]:
    return ["".join(line) for line in itertools.product(*parts)]


AB, TAILS = [*"ab"], ["", "-00", "-01", "-10", "-11"]
A = [{"a": a} for a in (1, 12, "true", None)]
DOCUMENTS = [json.dumps(x) for x in [*A, *({**x, "b": b} for x in A for b in (True, False))]]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "choice": ({"choice": ["red", "green", "greenish", 'b"\\=>x']}, ["red", "green", "greenish", 'b"\\=>x']),
    "regex": (
        {"regex": "[ab]{1,3}(-[01]{2})?"},
        every([*AB, *every(AB, AB), *every(AB, AB, AB)], TAILS),
    ),
    "json": (
        {
            "json": {
                "type": "object",
                "properties": {"a": {"enum": [1, 12, "true", None]}, "b": {"type": "boolean"}},
                "required": ["a"],
            },
            "disable_any_whitespace": True,
        },
        DOCUMENTS,
    ),
    "ebnf": (
        {"grammar": 'root ::= "{" x "}" | "=" ">x"?\nx ::= "true" | [0-9]'},
        ["=", "=>x", *every(["{"], ["true", *"0123456789"], ["}"])],
    ),
    "lark": ({"grammar": 'start: "a" B?\nB: /[xy]{2}/\n'}, ["a", *every(["a"], [*"xy"], [*"xy"])]),
}
ENDS = ["", "=>", "==>", "a"]
ENDING = [grammars.token_of(text) for text in ("=", ">", "a", "=>x", "=>{")]


def compiled(name: str, end: str | int = "") -> Grammar:
    wanted = {**CASES[name][0], **({"reasoning_end": end} if end != "" else {})}
    found = grammars.grammars().compile(SamplingParams(structured_outputs=wanted))
    assert found is not None
    return found


def mask_of(state: Any) -> Tensor:
    row = torch.full((W,), 12345, dtype=torch.int32)
    state.fill(row)
    row[-1] &= LAST
    return row


def allowed(mask: Tensor) -> list[int]:
    """Return `is_set` of every token at once."""
    bits = mask[:, None] >> torch.arange(32, dtype=torch.int32) & 1
    return bits.view(-1)[: tiny.VOCAB].nonzero()[:, 0].tolist()


def walks(oracle: Words, chance: random.Random) -> Iterator[list[int]]:
    """Yield token sequences that an output may begin with."""
    seen = set()
    for _ in range(30):
        tokens: list[int] = []
        for _ in range(14):
            if tuple(tokens) not in seen:
                seen.add(tuple(tokens))
                yield list(tokens)
            allowed_tokens = oracle.allowed_tokens(tokens)
            likely = [t for t in ENDING if t in allowed_tokens]  # else a free section seldom ends
            tokens.append(chance.choice(likely if likely and chance.random() < 0.6 else allowed_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", CASES)
def test_masks_equal_trying_every_token(name: str, end: str) -> None:
    oracle, grammar = words(*CASES[name][1], end=end), compiled(name, end)
    chance, seen, tight = random.Random(name + end), 0, 0
    for tokens in walks(oracle, chance):
        state, theirs = grammar.start(), oracle.start()
        for token in tokens:
            assert state.accept(token) and theirs.accept(token)
        want = mask_of(theirs)
        assert allowed(mask_of(state)) == allowed(want), TINY.text(tokens)
        for token in chance.sample(range(tiny.VOCAB), 12):
            if token in TINY.special_ids:
                continue  # the matcher logs a warning
            assert state.accept(token) == is_set(want, token), (tokens, token)
            if is_set(want, token):
                state.rollback(1)
            assert torch.equal(mask_of(state), want), "rollback restores the mask"
        if tokens:
            back = chance.randint(1, len(tokens))
            state.rollback(back)
            theirs.rollback(back)
            assert torch.equal(mask_of(state), mask_of(theirs))
        seen += 1
        tight += len(allowed(want)) < tiny.VOCAB // 2
    assert seen > 15 and tight > 5


def test_token_that_completes_the_free_section_and_continues() -> None:
    """Only tokens that the grammar allows first may follow the end in the same token."""
    for choice, fits in (("xy", "=>x"), ("{}", "=>{")):
        grammar = grammars.grammars().compile(
            SamplingParams(structured_outputs={"choice": [choice], "reasoning_end": "=>"})
        )
        assert grammar is not None
        found = allowed(mask_of(grammar.start()))
        assert [grammars.token_of(t) in found for t in ("=>x", "=>{")] == [t == fits for t in ("=>x", "=>{")]
        assert len(found) == tiny.VOCAB - 1
        state = grammar.start()
        assert not state.accept(grammars.token_of("=>x" if fits == "=>{" else "=>{"))
        assert state.accept(grammars.token_of(fits))
        assert allowed(mask_of(state)) == [grammars.token_of(choice[1])]
        state.rollback(1)
        assert allowed(mask_of(state)) == found


def test_only_eos_is_allowed_after_the_end() -> None:
    state = compiled("choice").start()
    for text in "red":
        state.accept(grammars.token_of(text))
    assert allowed(mask_of(state)) == [EOS]
    for _ in range(3):
        assert state.accept(EOS)
        assert allowed(mask_of(state)) == [EOS] and not state.accept(50)
    state.rollback(4)
    assert allowed(mask_of(state)) == [grammars.token_of("d")]


def test_grammar_of_the_compiler_process_equals_a_local_one() -> None:
    import xgrammar

    info = xgrammar.TokenizerInfo(
        [b"" if i in TINY.special_ids else TINY.token_bytes(i) for i in range(tiny.VOCAB)],
        xgrammar.VocabType.RAW,
        vocab_size=tiny.VOCAB,
        stop_token_ids=[EOS],
    )
    here = xgrammar.GrammarCompiler(info).compile_json_schema(
        json.dumps(grammars.SCHEMA), max_whitespace_cnt=1
    )
    there = grammars.grammar("json")
    chance, mask = random.Random(4), xgrammar.allocate_token_bitmask(1, tiny.VOCAB)
    for _ in range(40):
        assert there is not None
        state, matcher = there.start(), xgrammar.GrammarMatcher(here)
        while not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask)
            got = allowed(mask_of(state))
            assert got == allowed(mask[0])
            token = chance.choice(got)
            assert state.accept(token) and matcher.accept_token(token)


# --- a guide: masks of a window ---


def window(guide: GrammarGuide, drafts: list[int]) -> Tensor:
    rows = torch.zeros((len(drafts) + 1, W), dtype=torch.int32)
    assert guide.fill(drafts, rows) == {}
    return rows


def random_drafts(oracle: Words, tokens: list[int], chance: random.Random) -> list[int]:
    """Return drafts of which the first ones fit the grammar."""
    out: list[int] = []
    for _ in range(chance.randint(0, 5)):
        allowed_tokens = [t for t in oracle.allowed_tokens([*tokens, *out]) if t >= 3]
        fits = allowed_tokens and chance.random() < 0.8
        out.append(chance.choice(allowed_tokens) if fits else chance.randrange(tiny.VOCAB))
    return out


def wrong_windows(oracle: Words, guide: GrammarGuide, rounds: int, seed: int) -> int:
    """Count wrong masks of windows in a random output."""
    chance, wrong, tokens = random.Random(seed), 0, []
    for _ in range(rounds):
        drafts = random_drafts(oracle, tokens, chance)
        rows, state = window(guide, drafts), oracle.start()
        for token in tokens:
            assert state.accept(token)
        for row, draft in zip(rows, [*drafts, None], strict=True):
            want = mask_of(state)
            row[-1] &= LAST
            wrong += not torch.equal(row, want)
            if draft is None or not state.accept(draft):
                break
        new = []
        for _ in range(chance.randint(1, 3)):
            new.append(chance.choice(oracle.allowed_tokens([*tokens, *new])))
        guide.commit(new)
        tokens += new
    return wrong


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("end", ["", "=>"])
def test_rows_of_a_window_follow_the_drafts_before_them(name: str, end: str) -> None:
    oracle = words(*CASES[name][1], end=end)
    for seed in range(6):
        assert wrong_windows(oracle, GrammarGuide(compiled(name, end)), 7, seed) == 0


def test_rows_after_a_draft_that_breaks_the_grammar_are_open() -> None:
    guide = GrammarGuide(compiled("choice"))
    r, e = grammars.token_of("r"), grammars.token_of("e")
    rows = window(guide, [r, e, r, e])
    assert allowed(rows[2]) == [grammars.token_of("d")]
    assert (rows[3:] == OPEN_WORD).all()
    rows = window(guide, [EOS, e])
    assert (rows[1:] == OPEN_WORD).all()


def _no_op(self: GrammarGuide, *given: object) -> None:
    """Replace a method."""


def _fill_from_the_first_row(
    self: GrammarGuide, drafts: list[int], rows: Tensor, *limit: float
) -> dict[int, str]:
    fill(self, [], rows[:1])
    rows[1:] = rows[0]
    return {}


fill = GrammarGuide.fill


@pytest.mark.parametrize(
    ("name", "defect"), [("_roll_back", _no_op), ("fill", _fill_from_the_first_row), ("commit", _no_op)]
)
def test_control_broken_guide_is_detected(name: str, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarGuide, name, defect)
    oracle = words(*CASES["regex"][1])
    with pytest.raises((AssertionError, RuntimeError)):
        assert not any(wrong_windows(oracle, GrammarGuide(compiled("regex")), 7, seed) for seed in range(6))
