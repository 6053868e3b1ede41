"""A program on a pseudo-terminal, and a small terminal that interprets its output."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl

TIMEOUT_SECONDS = 300  # reached by a test that hangs only
INTERRUPT_INTERVAL_SECONDS = 3
_SEQUENCE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\]8;[^\x1b\x07]*(?:\x1b\\|\x07)|\x1b[()=>][0-9A-B]?")


class Screen:
    """Lines of a terminal without a limit of height."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0

    def feed(self, text: str) -> Screen:
        at = 0
        while at < len(text):
            match = _SEQUENCE.match(text, at)
            if match:
                self._control(match)
                at = match.end()
            else:
                self._put(text[at])
                at += 1
        return self

    def _control(self, match: re.Match[str]) -> None:
        number = int(match[1]) if (match[1] or "").isdigit() else 0
        if match[2] == "A":
            self.row = max(0, self.row - max(1, number))
        elif match[2] == "K":
            del self.lines[self.row][self.column if number == 0 else 0 :]
        elif match[2] == "J":
            del self.lines[self.row][self.column :], self.lines[self.row + 1 :]
        elif match[2] == "C":
            self.column += max(1, number)

    def _put(self, char: str) -> None:
        if char == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append([])
        elif char == "\r":
            self.column = 0
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char >= " ":
            line = self.lines[self.row]
            line += " " * (self.column + 1 - len(line))
            line[self.column] = char
            self.column += 1

    @property
    def text(self) -> str:
        lines = ["".join(line).rstrip() for line in self.lines]
        return "\n".join(lines).strip("\n")


class Terminal:
    """A running program and what it has written."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process, self._fd, self.raw, self._seen = process, fd, "", 0

    def expect(self, text: str, *, interrupt: bool = False) -> str:
        """Wait until the program writes `text`; return the output since the last call.

        With `interrupt` the wait begins with Ctrl-C. Python loses a signal that arrives just before it
        waits for input, so Ctrl-C is repeated until the text appears.
        """
        start = time.monotonic()
        num_interrupts = 0
        while (at := self.raw.find(text, self._seen)) < 0:
            waited = time.monotonic() - start
            assert waited < TIMEOUT_SECONDS, f"no {text!r} in {self.raw[self._seen :]!r}"
            if interrupt and waited >= num_interrupts * INTERRUPT_INTERVAL_SECONDS:
                self.send("\x03")
                num_interrupts += 1
            if select.select([self._fd], [], [], 1.0)[0]:
                try:
                    data = os.read(self._fd, 65536)
                except OSError:  # the program has ended
                    data = b""
                assert data, f"the program ended without {text!r}: {self.raw!r}"
                self.raw += data.decode("utf-8", "replace").replace("\r\n", "\n")
        found = self.raw[self._seen : at + len(text)]
        self._seen = at + len(text)
        return found

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait(self) -> int:
        """Read to the end and return the exit status."""
        while True:
            try:
                data = os.read(self._fd, 65536)
            except OSError:
                break
            if not data:
                break
            self.raw += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return self.process.wait(TIMEOUT_SECONDS)


@contextmanager
def on_terminal(*arguments: str, **variables: str) -> Iterator[Terminal]:
    """Run `draftproof` with arguments on a terminal of 80 columns."""
    parent, child = pty.openpty()
    ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "", "PYTHONUNBUFFERED": "1", **variables}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "draftproof", *arguments]
    process = subprocess.Popen(
        command,
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment,
        start_new_session=True,
        preexec_fn=_own_terminal,
    )
    os.close(child)
    try:
        yield Terminal(process, parent)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_SECONDS)
        os.close(parent)


def _own_terminal() -> None:
    """Make the terminal that of the new session, so that Ctrl-C sends a signal."""
    ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for commands in the background
