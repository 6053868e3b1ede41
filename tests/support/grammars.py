"""GrammarCompiler over the tiny models' vocabulary: a character a token, a few tokens of several."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import tiny
from draftproof.sampling_params import SamplingParams
from draftproof.types import Grammar
from words import Words

if TYPE_CHECKING:
    from draftproof.text.grammar.compiler import GrammarCompiler

EOS = 2
_SPECIAL = 3
# Tokens in place of characters that the grammars do not need.
_LONG = {"@": '":', "#": '{"', "$": "true", "%": "=>x", "&": "=>{", "`": '"}', "^": "ree", "~": "=="}


def token_of(text: str) -> int:
    return next(i for i in range(tiny.VOCAB) if TINY.token_bytes(i) == text.encode())


class TinyTokenizer:
    """Minimal tokenizer for grammars."""

    special_ids = frozenset(range(_SPECIAL))

    def token_bytes(self, token: int) -> bytes:
        if token < _SPECIAL:
            return (b"<pad>", b"<s>", b"</s>")[token]
        char = chr(token - _SPECIAL + 32)
        return _LONG.get(char, char).encode()

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.token_bytes(t) for t in tokens if t not in self.special_ids).decode()


TINY: Any = TinyTokenizer()
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -20, "maximum": 300},
        "b": {"enum": ["x", "yz", True]},
        "c": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
    },
    "required": ["a", "b"],
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA, "max_whitespace": 1},
    "regex": {"regex": "[a-f]{2,5}(-[0-9]+)?"},
    "choice": {"choice": ["red", "green", "greenish", 'b"\\lue']},
    "ebnf": {"grammar": 'root ::= "(" root ")" | [xyz]'},
    "lark": {"grammar": 'start: WORD ("," WORD)*\nWORD: /[a-c]+/\n'},
    "json_object": {"json_object": True, "disable_any_whitespace": True},
    "reasoning_token": {"choice": ["red", "green", "blue"], "reasoning_end": 33},  # ">"
    "reasoning_text": {"json": SCHEMA, "max_whitespace": 1, "reasoning_end": "=>"},
}
OTHERWISE = ("red", "green", "greenish", "abcab-12", "abcab", '{"a": 12}', '{"a": 1, "b": true}', "[true]")
ARROW = [32, 33]  # "=", ">"
# Thinking budgets: tokens, whether the prompt is open, and a key of STRUCTURES for the answer.
BUDGETS: dict[str, tuple[int, bool, str]] = {
    "budget_0": (0, True, ""),
    "budget_1": (1, True, ""),
    "budget_6": (6, True, ""),
    "budget_started": (2, False, ""),
    "budget_answer": (3, True, "reasoning_text"),
}
# Makes JSON short, so that requests of 14 tokens end by the grammar: " ", "}" and "true".
SHORT_JSON = {3: -6.0, 96: 4.0, 7: 7.0}
# Makes the end of the free section likely.
BIAS: dict[str, dict[int, float]] = {
    "json": SHORT_JSON,
    "reasoning_token": {33: 6.0},
    "reasoning_text": {32: 5.0, 33: 5.0, 8: 4.0, 9: 8.0, **SHORT_JSON},
    "budget_6": {32: 3.0, 33: 3.0},
}


@cache
def grammars(vocab_size: int = tiny.VOCAB) -> GrammarCompiler:
    from draftproof.text.grammar.compiler import GrammarCompiler  # needs tokenizers

    return GrammarCompiler(TINY, vocab_size, [EOS])


@cache
def grammar(name: str) -> Grammar | None:
    if name in BUDGETS:
        return budget(*BUDGETS[name])
    wanted = STRUCTURES.get(name)
    if wanted is not None and find_spec("xgrammar") is None:  # a GPU machine without it
        return words(*OTHERWISE, end=">" if "reasoning_end" in wanted else "")
    return grammars().compile(SamplingParams(structured_outputs=wanted)) if wanted else None


def budget(num_tokens: int, is_open: bool, answer: str = "") -> Grammar:
    """Return a thinking budget. The reasoning ends with "=>" and begins with any of most letters."""
    from draftproof.text.reasoning.budget import ThinkingBudget
    from draftproof.text.reasoning.section import ReasoningSection

    section = ReasoningSection(TINY, tuple(map(chr, range(34, 110))), ("=>",))
    return ThinkingBudget(section, is_open, num_tokens, ARROW, grammar(answer) if answer else None)


def words(*several: str, end: str = "") -> Words:
    """Return the oracle's grammar of these words."""
    produced = [TINY.token_bytes(i) for i in range(tiny.VOCAB)]
    return Words(several, produced, TINY.special_ids, EOS, end)
