"""A bell: ends another thread's wait for sockets."""

from __future__ import annotations

import contextlib
import socket


class Bell:
    """`fileno` is to be polled by the one who waits; anybody may ring, at any time, in __del__ too."""

    def __init__(self) -> None:
        self._ear, self._rope = socket.socketpair()
        for end in (self._ear, self._rope):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._ear.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # it is full: then it rings already; or it is closed
            self._rope.send(b"!")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._ear.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self._ear.close()
        self._rope.close()
