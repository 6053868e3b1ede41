"""Incremental parser of generated text: content, reasoning and tool calls as deltas.

The parser of a format is a generator over a `TextReader`: straight-line code that pauses where it needs more
text. Every decision depends on the text alone, so the result is the same for every way to split it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # pauses where the text so far ends
SPACE = " \t\r\n"
NO_MATCH = "(?!)"  # pattern that matches nowhere


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """New text of the message."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of a reasoning channel."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Start of a call with its name, or new text of its arguments."""

    index: int
    name: str | None = None  # in the first delta of a call only
    id: str | None = None  # where the format has ids
    arguments: str = ""


Delta = ContentDelta | ReasoningDelta | CallDelta


class TextReader:
    """Text received so far, with the primitives that parsers of formats consist of."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """Read the output of a request. `tools`: JSON schema of the arguments, by name of the function."""
        self.tools = tools
        self.deltas: list[Delta] = []
        self.closed = False
        self.num_calls = 0
        self._text, self._at = "", 0
        self._mark: int | None = None
        self._space = ""  # whitespace that is dropped if a call or the end of a message follows

    # --- input --------------------------------------------------------------------------------------

    def push(self, text: str) -> None:
        """Append text; what was read and is not marked is dropped."""
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + text
        self._at -= keep
        if self._mark is not None:
            self._mark = 0

    def mark(self, back: int = 0) -> None:
        """Remember the position `back` characters before this one for `raw`."""
        self._mark = self._at - back

    def raw(self) -> str:
        """Return the text since the mark and remove the mark; "" if a call has started since."""
        text = "" if self._mark is None else self._text[self._mark : self._at]
        self._mark = None
        return text

    def peek(self) -> Steps[str]:
        """Return the next character; "" at the end of the text."""
        while self._at == len(self._text) and not self.closed:
            yield
        return self._text[self._at : self._at + 1]

    def skip_space(self, also: str = "") -> Steps[str]:
        """Skip whitespace and the characters `also`; return the next character, "" at the end."""
        while (char := (yield from self.peek())) and char in SPACE + also:
            self._at += 1
        return char

    def take(self) -> str:
        """Consume the character that `peek` returned."""
        self._at += 1
        return self._text[self._at - 1]

    def back(self, count: int) -> None:
        """Return the last `count` characters to the text."""
        self._at -= count

    def stream_until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Steps[str]:
        """Emit text as it arrives up to the first marker; consume and return the marker, "" at the end.

        No marker may be a prefix of another. A suffix that can begin a marker is held back.
        """
        pattern = re.compile("|".join(map(re.escape, markers)) or NO_MATCH)
        while True:
            found = pattern.search(self._text, self._at)
            if found:
                emit(self._text[self._at : found.start()])
                self._at = found.end()
                return found.group()
            end = len(self._text)
            if not self.closed:
                end -= max((_overlap(self._text, self._at, marker) for marker in markers), default=0)
            if end > self._at:
                emit(self._text[self._at : end])
                self._at = end
            if self.closed:
                return ""
            yield

    def take_until(self, markers: Sequence[str]) -> Steps[tuple[str, str]]:
        """Return the text up to the first marker and the marker, "" at the end."""
        parts: list[str] = []
        marker = yield from self.stream_until(markers, parts.append)
        return "".join(parts), marker

    def starts_with(self, marker: str) -> Steps[bool]:
        """Consume `marker` if the text goes on with it; return whether it does."""
        while len(self._text) - self._at < len(marker) and not self.closed:
            if not marker.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(marker, self._at):
            return False
        self._at += len(marker)
        return True

    # --- output -------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Emit content; trailing whitespace is held until more content follows."""
        text = self._space + text
        end = len(text.rstrip(SPACE))
        self._space = text[end:]
        if end:
            self.deltas.append(ContentDelta(text[:end]))

    def drop_space(self) -> None:
        """Drop the whitespace at the end of the content."""
        self._space = ""

    def reasoning(self, text: str) -> None:
        """Emit text of a reasoning channel."""
        if text:
            self.deltas.append(ReasoningDelta(text))

    def start_call(self, name: str, id: str | None = None) -> None:
        """Emit the start of a call; its text is not needed any more, so the mark is removed."""
        self._space, self._mark = "", None
        self.deltas.append(CallDelta(self.num_calls, name, id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Emit text of the arguments of the last call."""
        if text:
            self.deltas.append(CallDelta(self.num_calls - 1, arguments=text))

    def end(self) -> None:
        """Emit the held whitespace at the end of a text without calls."""
        if self._space and not self.num_calls:
            self.deltas.append(ContentDelta(self._space))
        self._space = ""


def _overlap(text: str, begin: int, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` that ends text[begin:]."""
    for length in range(min(len(marker) - 1, len(text) - begin), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class ToolCallParser:
    """Parser of one output: `feed` the text as it arrives, then `finish`."""

    def __init__(
        self, parse: Callable[[TextReader], Steps[None]], tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._reader = TextReader(tools)
        self._steps = parse(self._reader)
        self._ended = False

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that new text completes."""
        self._reader.push(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back; the text is complete."""
        self._reader.closed = True
        found = self._advance()
        self._reader.end()
        found += self._reader.deltas
        self._reader.deltas = []
        return merged(found)

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._reader.num_calls

    def _advance(self) -> list[Delta]:
        if not self._ended:
            try:
                next(self._steps)
            except StopIteration:
                self._ended = True
        found, self._reader.deltas = merged(self._reader.deltas), []
        return found


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Return the deltas with neighbours of the same kind joined; the start of a call stays apart."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            found[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + delta.text)
        elif isinstance(delta, CallDelta) and isinstance(last, CallDelta) and _continues(last, delta):
            found[-1] = CallDelta(delta.index, arguments=last.arguments + delta.arguments)
        else:
            found.append(delta)
    return found


def _continues(last: CallDelta, delta: CallDelta) -> bool:
    return last.name is None and delta.name is None and last.index == delta.index


@dataclass(slots=True)
class ParsedCall:
    """One whole call."""

    name: str
    arguments: str = ""
    id: str | None = None


@dataclass(slots=True)
class ParsedText:
    """Whole output: content, reasoning and calls."""

    content: str
    reasoning: str
    calls: list[ParsedCall]


def collect(deltas: Sequence[Delta]) -> ParsedText:
    """Return the whole output that deltas amount to."""
    parsed = ParsedText("", "", [])
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            parsed.content += delta.text
        elif isinstance(delta, ReasoningDelta):
            parsed.reasoning += delta.text
        elif delta.name is not None:
            assert delta.index == len(parsed.calls)
            parsed.calls.append(ParsedCall(delta.name, delta.arguments, delta.id))
        else:
            parsed.calls[delta.index].arguments += delta.arguments
    return parsed
