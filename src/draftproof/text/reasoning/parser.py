"""Incremental splitting of an output into reasoning and content, before the parser of tool calls.

One section at the start of the output is reasoning. The whitespace at the edges of both parts is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from draftproof.text.reasoning.formats import Parse, ReasoningFormat
from draftproof.text.tool_calls.parser import SPACE, Steps, TextReader


def parse_reasoning(form: ReasoningFormat, is_open: bool, calls: Parse | None = None) -> Parse:
    """Return the parser of an output. `is_open`: the prompt has the start marker. `calls`: of the rest."""
    if form.parse is not None:
        return calls or form.parse

    def steps(reader: TextReader) -> Steps[None]:
        reader.mark()
        yield from reader.skip_space()
        is_inside = is_open
        for start in form.starts:
            if (yield from reader.starts_with(start)):
                is_inside = True
                break
        space = reader.raw() if not is_inside else ""
        if is_inside:
            reader.raw()
            yield from _reasoning(reader, form)
        reader.content(space)
        yield from (calls(reader) if calls is not None else _content(reader, form))

    return steps


def _reasoning(reader: TextReader, form: ReasoningFormat) -> Steps[None]:
    """Emit the reasoning up to its end, and skip the whitespace behind it."""
    if form.label:
        yield from reader.starts_with(form.label)
    ends = form.ends if form.call_start is None else (*form.ends, form.call_start)
    marker = yield from reader.stream_until(ends, _Trimmed(reader.reasoning))
    if marker and marker == form.call_start:
        reader.back(len(marker))
    yield from reader.skip_space()


def _content(reader: TextReader, form: ReasoningFormat) -> Steps[None]:
    """Emit content without tool calls, and without the markers around it."""
    if form.answer is not None and (yield from reader.starts_with(form.answer[0])):
        yield from reader.skip_space()
        if (yield from reader.stream_until((form.answer[1],), reader.content)):
            reader.drop_space()
    yield from reader.stream_until((), reader.content)


class _Trimmed:
    """Sink of text that drops the whitespace at both ends."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit, self._space, self._has_text = emit, "", False

    def __call__(self, text: str) -> None:
        """Emit the text up to its trailing whitespace, which is held until more text follows."""
        text = self._space + text if self._has_text else text.lstrip(SPACE)
        kept = text.rstrip(SPACE)
        self._has_text = self._has_text or bool(kept)
        self._space = text[len(kept) :]
        if kept:
            self._emit(kept)
