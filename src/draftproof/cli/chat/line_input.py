"""Input of messages: line editing, history, completion of commands, messages of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

PROMPT, CONTINUATION = "> ", ". "
BLOCK = '"""'  # opens and closes a message of several lines
HISTORY_LINES = 1000


def history_file() -> Path:
    """Return the file of earlier messages, in the state folder of the user."""
    named = os.environ.get("XDG_STATE_HOME")
    base = Path(named) if named else Path.home() / ".local" / "state"
    return base / "draftproof" / "chat_history"


class LineInput:
    """Reader of messages from standard input; without a terminal it reads lines and prints no prompt."""

    def __init__(self, commands: Sequence[str]) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._commands = commands
        self._path = history_file()
        if self.is_interactive:
            self._set_up_readline()

    def _set_up_readline(self) -> None:
        with contextlib.suppress(ImportError):  # not every Python has it
            import readline

            readline.set_completer(self._complete)
            readline.set_completer_delims(" ")
            readline.parse_and_bind("tab: complete")
            readline.set_history_length(HISTORY_LINES)
            with contextlib.suppress(OSError):
                readline.read_history_file(self._path)

    def close(self) -> None:
        """Save the history, readable by its user only."""
        if not self.is_interactive:
            return
        with contextlib.suppress(ImportError, OSError):
            import readline

            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._path)

    def read(self) -> str:
        """Return the next message; EOFError at the end, KeyboardInterrupt for Ctrl-C.

        A line that ends in a backslash is continued. Three double quotes open a message of several lines
        and close it.
        """
        line = self.line(PROMPT)
        if line.startswith(BLOCK):
            return self._block(line.removeprefix(BLOCK))
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self.line(CONTINUATION)
        return line.strip()

    def _block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(self.line(CONTINUATION))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")

    def line(self, prompt: str) -> str:
        """Return one line of input."""
        if self.is_interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _complete(self, text: str, state: int) -> str | None:
        found = [name for name in self._commands if text.startswith("/") and name.startswith(text)]
        return found[state] if state < len(found) else None
