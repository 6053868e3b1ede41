"""Socket pair that ends another thread's poll."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """Pollable wake-up flag. `wake` may be called from any thread, at any time, in __del__ too."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable."""
        with contextlib.suppress(OSError):  # the buffer is full, so it is readable already; or it is closed
            self._writer.send(b"!")

    def clear(self) -> None:
        """Read everything that was written, so that the next poll blocks."""
        with contextlib.suppress(BlockingIOError):
            while len(self._reader.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
