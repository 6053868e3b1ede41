"""How many requests are open, by API key, over all server processes of one engine.

A few integers that the processes have mapped: a line for each of them, which it alone writes, and a column
for each key. Whoever lets a request in counts it first and looks at the sums afterwards, so two processes
never both take the last place (both may be refused it). The line of a process that died is cleared by the
one that looks after them.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from draftproof.serve.settings import Settings

SIZE = 8  # bytes of an integer


class Seats:
    """As one process sees them. Without a file they are this process's alone."""

    def __init__(self, settings: Settings, line: int = 0, lines: int = 1, fd: int | None = None) -> None:
        names = dict.fromkeys(["all", "-", *settings.api_keys.names])  # "-": without a key
        self._columns = {name: i for i, name in enumerate(names)}
        self._width = len(names)
        size = lines * self._width * SIZE
        room = bytearray(size) if fd is None else mmap.mmap(fd, size)
        self._table = memoryview(room).cast("q")  # [lines, columns], one line after the other
        self._line = line * self._width

    def take(self, key: str) -> tuple[int, int]:
        """One more; returns how many there are now, of all keys and of this one."""
        self._count(key, 1)
        total, mine = (sum(self._table[self._columns[name] :: self._width]) for name in ("all", key))
        return total, mine

    def give(self, key: str) -> None:
        self._count(key, -1)

    def _count(self, key: str, number: int) -> None:
        for name in ("all", key):
            self._table[self._line + self._columns[name]] += number

    def clear(self, line: int) -> None:
        """Its process is dead."""
        for place in range(line * self._width, (line + 1) * self._width):
            self._table[place] = 0


def shared(settings: Settings, lines: int) -> tuple[int, Seats]:
    """Room for so many processes: a file without a name, for them to inherit, and the table in it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("draftproof-seats")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.write(fd, bytes(lines * (2 + len(settings.api_keys.names)) * SIZE))
    return fd, Seats(settings, 0, lines, fd)
