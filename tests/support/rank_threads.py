"""Ranks of a tensor-parallel engine as threads: gloo and messages as between processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Pipe
from typing import Any
from unittest.mock import patch

import tiny
from draftproof.engine.parallel import follower, rank_processes
from draftproof.models.load import Checkpoint


class RankThread:
    """Stand-in of `rank_processes.RankProcess`."""

    def __init__(self, rank: int) -> None:
        self.rank, self.process = rank, self
        self.stdin = None
        messages, self.messages = Pipe(duplex=False)
        self.reports, self._reports = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._serve, args=(messages,), daemon=True)
        self._thread.start()

    def _serve(self, messages: Any) -> None:
        follower.serve(messages, self._reports)
        self._reports.close()

    def end(self) -> None:
        """Close the pipe and wait for the thread."""
        self.messages.close()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def exit_reason(self) -> str:
        """Return the reason of the end."""
        return "the thread ended"


@contextmanager
def rank_threads(dtype: str = "float32", load: Callable[[], Checkpoint] | None = None) -> Iterator[None]:
    """Start ranks as threads that load the tiny models of this dtype, or what `load` returns."""

    def load_for(config: Any, progress: bool) -> Checkpoint:
        return tiny.checkpoint(config.model, dtype) if load is None else load()

    with (
        patch.object(rank_processes, "RankProcess", RankThread),
        patch.object(follower, "load_for", load_for),
    ):
        yield
