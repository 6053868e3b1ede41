"""Reasoning section in tokens: where it begins and ends, by the bytes that the tokens add to the text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from draftproof.errors import RequestError
from draftproof.text.reasoning.formats import ReasoningFormat, find_format
from draftproof.text.tokenizer import Tokenizer
from draftproof.text.tool_calls.parser import SPACE

_SPACE = SPACE.encode()


class Phase(IntEnum):
    """Position of an output relative to its reasoning."""

    BEFORE = 0  # the text so far can become the start marker
    INSIDE = 1
    AFTER = 2


class SectionState(NamedTuple):
    """State after some tokens."""

    phase: Phase
    tail: bytes = b""  # last bytes, as many as an unfinished marker may need
    num_tokens: int = 0  # of the reasoning; the end marker's last token is not counted
    num_forced: int = 0  # tokens of the end marker that a budget has forced


class ReasoningSection:
    """Matcher of the section. It is shared by any number of requests; they keep their states."""

    def __init__(self, tokenizer: Tokenizer, starts: Iterable[str], ends: Iterable[str | int]) -> None:
        """Take the markers; an end that is an integer is a token id."""
        ends = list(ends)
        self._token_bytes = tokenizer.token_bytes
        self._starts = tuple(start.encode() for start in starts)
        self._ends = tuple(end.encode() for end in ends if isinstance(end, str))
        self._end_tokens = frozenset(end for end in ends if isinstance(end, int))
        self._reach = max((len(end) for end in self._ends), default=1) - 1

    def begin(self, is_open: bool) -> SectionState:
        """Return the state before the first token. `is_open`: the prompt ends inside the reasoning."""
        return SectionState(Phase.INSIDE if is_open else Phase.BEFORE)

    def advance(self, state: SectionState, token: int) -> SectionState:
        """Return the state after one more token."""
        if state.phase is Phase.AFTER:
            return state
        data = state.tail + self._token_bytes(token)
        if state.phase is Phase.BEFORE:
            data = data.lstrip(_SPACE)
            for start in self._starts:
                if data.startswith(start):
                    return self._inside(data[len(start) :], 0)
            can_start = any(start.startswith(data) for start in self._starts)
            return SectionState(Phase.BEFORE, data) if can_start else SectionState(Phase.AFTER)
        if token in self._end_tokens:
            return SectionState(Phase.AFTER, num_tokens=state.num_tokens)
        return self._inside(data, state.num_tokens, 1)

    def _inside(self, data: bytes, num_tokens: int, num_new: int = 0) -> SectionState:
        if any(end in data for end in self._ends):
            return SectionState(Phase.AFTER, num_tokens=num_tokens)
        return SectionState(Phase.INSIDE, data[-self._reach :] if self._reach else b"", num_tokens + num_new)

    def count(self, token_ids: Sequence[int], is_open: bool) -> int:
        """Return the number of reasoning tokens of an output, without the tokens of its markers."""
        pieces = [self._token_bytes(token) for token in token_ids]
        text, begin = b"".join(pieces), 0
        if not is_open:
            stripped = text.lstrip(_SPACE)
            start = next((start for start in self._starts if stripped.startswith(start)), None)
            if start is None:
                return 0
            begin = len(text) - len(stripped) + len(start)
        places = [place for end in self._ends if (place := text.find(end, begin)) >= 0]
        offsets = [0, *accumulate(map(len, pieces))]
        return max(0, bisect_left(offsets, min(places, default=len(text))) - bisect_left(offsets, begin))


class Reasoning:
    """Reasoning of one model: its format and its markers as tokens."""

    def __init__(self, form: ReasoningFormat, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.form = form
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        ends = form.ends if form.call_start is None else (*form.ends, form.call_start)
        self.section = ReasoningSection(tokenizer, form.starts, ends)
        markers = (*form.starts, *ends, form.label, *(form.answer or ()))
        own = {i for i in tokenizer.special_ids if _is_part(tokenizer.token_bytes(i), markers)}
        self.has_special_tokens = bool(own)  # the text of an output must contain them
        self._boundaries = tokenizer.special_ids - own

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends inside the reasoning.

        Only the text after the last special token counts, so that no earlier message is mistaken for it.
        """
        first = len(prompt)
        while first and prompt[first - 1] not in self._boundaries:
            first -= 1
        tail = b"".join(self._tokenizer.token_bytes(token) for token in prompt[first:])
        start = max(tail.rfind(start.encode()) for start in self.form.starts)
        end = max(tail.rfind(end.encode()) for end in self.form.ends)
        return self.form.is_always_open if start == end else start > end

    def end_ids(self) -> list[int]:
        """Return the tokens of the end marker."""
        return end_marker_ids(self.form.ends[0], self._tokenizer, self._vocab_size)


def _is_part(token: bytes, markers: Iterable[str]) -> bool:
    return bool(token) and any(token in marker.encode() for marker in markers)


def find_reasoning(name: str | None, tokenizer: Tokenizer | None, vocab_size: int) -> Reasoning | None:
    """Return the reasoning of a model, by the option `reasoning_parser` or from its chat template."""
    template = None if tokenizer is None else tokenizer.chat_template
    form = find_format(name, "" if template is None else template.source)
    return None if form is None or tokenizer is None else Reasoning(form, tokenizer, vocab_size)


def end_marker_ids(end: str | int, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the tokens to force for an end marker; RequestError if there are none."""
    ids = [end] if isinstance(end, int) else tokenizer.encode(end, add_special_tokens=False)
    text = b"".join(tokenizer.token_bytes(i) for i in ids)
    is_whole = isinstance(end, int) or text.endswith(end.encode())
    if not ids or max(ids) >= vocab_size or not is_whole:
        reason = f"the tokenizer has no tokens for {end!r}"
        raise RequestError(f"thinking_token_budget: {reason}", "thinking_token_budget")
    return ids
