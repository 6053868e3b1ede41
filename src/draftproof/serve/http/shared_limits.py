"""Numbers of open requests by API key, over all HTTP processes of one engine.

They are integers in shared memory: one row per process, which only that process writes, and one column per
key. A process increments its own entry first and checks the sums afterwards, so two processes never both
admit a request to the last place (both may be rejected). The row of a process that ended is cleared by the
process that supervises them.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from draftproof.serve.settings import Settings

ENTRY_BYTES = 8


class OpenRequestCounts:
    """Counts as one process sees them. Without a file they are local to this process."""

    def __init__(self, settings: Settings, row: int = 0, num_rows: int = 1, fd: int | None = None) -> None:
        names = dict.fromkeys(["all", "-", *settings.api_keys.names])  # "-": without a key
        self._columns = {name: i for i, name in enumerate(names)}
        self._width = len(names)
        size = num_rows * self._width * ENTRY_BYTES
        memory = bytearray(size) if fd is None else mmap.mmap(fd, size)
        self._table = memoryview(memory).cast("q")  # [num_rows, columns], row by row
        self._row_start = row * self._width

    def increment(self, key: str) -> tuple[int, int]:
        """Add one request; return the number of open requests in total and of this key."""
        self._add(key, 1)
        total, of_key = (sum(self._table[self._columns[name] :: self._width]) for name in ("all", key))
        return total, of_key

    def decrement(self, key: str) -> None:
        """Remove one request."""
        self._add(key, -1)

    def _add(self, key: str, number: int) -> None:
        for name in ("all", key):
            self._table[self._row_start + self._columns[name]] += number

    def clear(self, row: int) -> None:
        """Set the row of an ended process to zero."""
        for place in range(row * self._width, (row + 1) * self._width):
            self._table[place] = 0


def create_shared_counts(settings: Settings, num_rows: int) -> tuple[int, OpenRequestCounts]:
    """Create counts for `num_rows` processes; return the file to inherit and the counts."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("draftproof-open-requests")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.write(fd, bytes(num_rows * (2 + len(settings.api_keys.names)) * ENTRY_BYTES))
    return fd, OpenRequestCounts(settings, 0, num_rows, fd)
