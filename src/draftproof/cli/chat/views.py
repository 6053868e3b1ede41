"""Views of a reply in the terminal: rendered Markdown, tokens coloured by origin, or plain text."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from draftproof.cli.chat.markdown_stream import MarkdownStream
from draftproof.cli.output_rendering import STYLES

VIEWS = ("markdown", "drafts", "plain")
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return text without control characters, which could change the terminal's state."""
    return text.translate(_CONTROL)


class ReplyView:
    """View of one reply: reasoning dimmed, then content."""

    def __init__(self, console: Console, kind: str) -> None:
        self._console, self._kind = console, kind
        self._has_reasoning = self._has_content = False
        self._ends_line = True
        self._markdown = MarkdownStream(console) if kind == "markdown" else None

    def reasoning(self, text: str) -> None:
        """Show new text of the reasoning."""
        self._has_reasoning = True
        self._print(text, "dim")

    def content(self, text: str, origin: str) -> None:
        """Show new text of the message; `origin` is the provenance of its token."""
        if not text:
            return
        if not self._has_content and self._has_reasoning:
            self.end_line()
            text = text.lstrip("\n")
        self._has_content = True
        if self._markdown is not None:
            self._markdown.write(printable(text))
        else:
            self._print(text, STYLES.get(origin.partition(":")[0], "") if self._kind == "drafts" else "")

    def end_line(self) -> None:
        """End the line that was begun."""
        if not self._ends_line:
            self._console.print()
        self._ends_line = True

    def close(self) -> None:
        """Complete the reply."""
        if self._markdown is not None:
            self._markdown.close()
        self.end_line()

    def _print(self, text: str, style: str) -> None:
        if not text:
            return
        self._ends_line = text.endswith("\n")
        if not self._console.is_terminal:  # exactly the text
            self._console.file.write(text)
            self._console.file.flush()
        else:
            self._console.print(Text(printable(text), style=style), end="")
