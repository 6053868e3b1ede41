"""Streamed Markdown against rich's rendering of the whole text."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.markdown import Markdown

from draftproof.cli.chat import markdown_stream
from draftproof.cli.chat.markdown_stream import MarkdownStream, finished_length
from draftproof.cli.chat.views import printable
from terminal import Screen

TEXT = """Intro with *emphasis*
over two lines.

Heading
-------

1. first
2. second

   continued

```python
def f(x):

    return x  # a comment
```

| a | b |
|---|---|
| 1 | 2 |

> quoted
#tag is no heading

Last line"""


def console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=60, height=12, highlight=False), file


def without_blank_runs(text: str) -> str:
    """Return what a terminal shows; rich leaves several blank lines around tables."""
    return re.sub(r"\n{3,}", "\n\n", Screen().feed(text).text)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_are_rendered_like_the_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown_stream, "REDRAW_SECONDS", -1.0)
    whole, expected = console()
    whole.print(Markdown(TEXT))
    target, written = console()
    stream = MarkdownStream(target)
    for at in range(0, len(TEXT), size):
        stream.write(TEXT[at : at + size])
    stream.close()
    assert without_blank_runs(written.getvalue()) == without_blank_runs(expected.getvalue())


def test_block_longer_than_the_terminal_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown_stream, "REDRAW_SECONDS", -1.0)
    target, written = console()
    stream = MarkdownStream(target)
    for i in range(30):
        stream.write(f"- item {i}\n")
    stream.close()
    lines = Screen().feed(written.getvalue()).text.splitlines()
    assert [line.strip() for line in lines] == [f"• item {i}" for i in range(30)]


def test_unfinished_line_finishes_no_block() -> None:
    """Negative control for the split: `#` alone may become the text `#tag` of the same paragraph."""
    assert finished_length("text\n#") == 0
    assert finished_length("text\n# title\n") == len("text\n")


def test_control_characters_are_removed() -> None:
    assert printable("a\x1b[2Jb\x07\n\tc\x9b1m") == "a[2Jb\n\tc1m"
