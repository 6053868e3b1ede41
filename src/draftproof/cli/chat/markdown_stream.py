"""Markdown that arrives in pieces: finished blocks are printed once, the last one is redrawn in place."""

from __future__ import annotations

import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

REDRAW_SECONDS = 0.1
_PARSER = MarkdownIt().enable("table").enable("strikethrough")  # as rich.markdown parses


def finished_length(text: str) -> int:
    """Return the number of characters before the last block; later lines cannot change them."""
    complete = text[: text.rfind("\n") + 1]  # an incomplete line may still become another kind of block
    starts = [t.map[0] for t in _PARSER.parse(complete) if t.level == 0 and t.map and t.nesting >= 0]
    if len(starts) < 2:
        return 0
    return sum(map(len, complete.splitlines(keepends=True)[: starts[-1]]))


class _Block:
    """Rendered Markdown without blank lines around it; `max_lines` keeps its last lines."""

    def __init__(self, text: str, max_lines: int | None = None) -> None:
        self._text, self._max_lines = text, max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self._text), options.update(height=None), pad=False)
        filled = [i for i, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        if not filled:
            return
        lines = lines[filled[0] : filled[-1] + 1]
        for line in lines if self._max_lines is None else lines[-self._max_lines :]:
            yield from line
            yield Segment.line()


class MarkdownStream:
    """Writer of Markdown to a terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self._text = console, ""
        self._has_printed = False
        self._drawn_at = 0.0
        self._live: Live | None = None

    def write(self, text: str) -> None:
        """Add text; print the blocks that it finishes."""
        self._text += text
        if "\n" in text and (length := finished_length(self._text)):
            self._print(self._text[:length])
            self._text = self._text[length:]
        if self._text.strip() and time.monotonic() - self._drawn_at > REDRAW_SECONDS:
            self._draw()

    def close(self) -> None:
        """Print the last block."""
        if self._text.strip():
            self._print(self._text)
        self._stop()
        self._text = ""

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(_Block(self._text, max(1, self._console.height - 2)), refresh=True)
        self._drawn_at = time.monotonic()

    def _print(self, text: str) -> None:
        self._stop()
        if self._has_printed:
            self._console.print()  # as between the blocks of one document
        self._console.print(_Block(text), soft_wrap=False, end="")
        self._has_printed = True

    def _stop(self) -> None:
        """Remove the block that is redrawn."""
        if self._live is not None:
            self._live.stop()
            self._live = None
