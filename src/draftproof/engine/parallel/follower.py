"""Entry point of the process of a rank: `python -m draftproof.engine.parallel.follower`, started by rank 0.

It loads its part of the model, then runs the calls that rank 0 sends until its standard input is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from draftproof.config import EngineConfig
from draftproof.engine.build import check_formats
from draftproof.engine.live.sleep import SleepMode, SleepTag
from draftproof.engine.parallel.rank_checkpoint import cut_checkpoint, load_for, plan_cuts, rank_ops
from draftproof.engine.parallel.rank_processes import Call
from draftproof.engine.sizing import Sizes, resolve_sizes
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.models.weight_formats import WeightTensor
from draftproof.models.weights.update import apply_update
from draftproof.ops import Rows
from draftproof.ops.parallel.communicator import ProcessCommunicator
from draftproof.ops.parallel.forward import use_communicator

EXIT_FAILED = 70


class Follower:
    """Model part of a rank and the calls that it runs."""

    def __init__(
        self, runner: Runner, sizes: Sizes, sleep: SleepMode | None, reload: Callable[[], None]
    ) -> None:
        """Take the model part; `reload` reads its weights from the checkpoint again."""
        self._runner, self.ops = runner, runner.ops
        self._sleep, self._reload = sleep, reload
        shape = (sizes.num_seqs, sizes.max_pages)
        self._page_table = torch.zeros(shape, dtype=torch.int32, device=self.ops.device)
        self._hidden = self._empty(0)
        self._graphs: dict[int, Callable[[], object]] = {}

    def run(self, call: Call) -> None:
        """Run one call."""
        getattr(self, call[0])(*call[1:])

    def fill_pages(self, pages: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Set the page tables of slots."""
        table = torch.zeros((len(pages), self._page_table.shape[1]), dtype=torch.int32)
        for line, (_, ids) in zip(table, pages, strict=True):
            line[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        send = self.ops.runtime.send
        self._page_table.index_copy_(0, send(torch.tensor([slot for slot, _ in pages])), send(table))

    def add_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Add pages: (slot, index in its page table, page)."""
        lines, places, ids = self.ops.runtime.send(torch.tensor(pages)).unbind(1)
        self._page_table.index_put_((lines, places), ids.to(torch.int32))

    def forward(self, num_rows: int, num_output_rows: int) -> None:
        """Run a forward pass over the rows of rank 0."""
        lines = torch.empty((4, num_rows), dtype=torch.int64, device=self.ops.device)
        self.ops.communicator.broadcast(lines)
        tokens, positions, slots, kv_index = lines.unbind()
        rows = Rows(tokens, positions, slots, kv_index, self._page_table)
        if not num_output_rows:
            self._hidden = self._runner.forward(rows)
            return
        output_rows = torch.empty(num_output_rows, dtype=torch.int64, device=self.ops.device)
        self.ops.communicator.broadcast(output_rows)
        self._hidden = self._runner.forward_selected(rows, output_rows)

    def logits(self, num_rows: int) -> None:
        """Compute this rank's logits of hidden rows of rank 0, or, with 0 rows, of those of the last pass."""
        hidden = self._hidden
        if num_rows:
            hidden = self._empty(num_rows)
            self.ops.communicator.broadcast(hidden)
        self._runner.logits(hidden)

    def capture(self, number: int, calls: Sequence[Call]) -> None:
        """Capture a graph of calls."""
        self._graphs[number] = self.ops.runtime.graph(lambda: self._run_all(calls))

    def replay(self, number: int) -> None:
        """Run a captured graph."""
        self._graphs[number]()

    def compile(self, calls: Sequence[Call]) -> None:
        """Compile the kernels of calls."""
        unique = dict.fromkeys(calls)
        self.ops.runtime.compile([lambda: self._run_all(list(unique))], lambda *_: None)

    def update_weights(self, weights: Mapping[str, WeightTensor]) -> None:
        """Copy new weights of some layers into the storage of the old ones."""
        apply_update(self._runner.model.entries, weights)

    def finish_update(self, is_complete: bool) -> None:
        """End an update; `is_complete`: it had every weight."""
        if self._sleep is not None and is_complete:
            self._sleep.needs_weights = False

    def sleep(self, level: int) -> None:
        """Release the memory of weights and KV."""
        assert self._sleep is not None
        self._sleep.sleep(level)

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """Restore the memory of `tags`."""
        assert self._sleep is not None
        self._sleep.wake_up(tags, self._reload)

    def _run_all(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.run(call)

    def _empty(self, num_rows: int) -> Tensor:
        shape = (num_rows, self._runner.model.config.hidden_size)
        return torch.empty(shape, dtype=self._runner.dtype, device=self.ops.device)


def build_follower(
    config: EngineConfig, rank: int, path: str, reports: Connection, messages: Any
) -> Follower:
    """Load the part of a rank and agree on the sizes with rank 0."""
    ops = rank_ops(config, rank)
    reports.send(("report", None))
    communicator = ProcessCommunicator(path, rank, config.tensor_parallel_size, ops.device)
    use_communicator(ops, communicator)
    whole = load_for(config, progress=False)
    cuts = plan_cuts(config, whole, ops, rank)
    checkpoint = cut_checkpoint(config, whole, ops, cuts)
    check_formats(checkpoint.weights, ops)
    reports.send(("report", resolve_sizes(config, checkpoint, ops).num_pages))
    sizes: Sizes = messages.recv()
    model = create_model(checkpoint.config, checkpoint.weights, ops, sizes.max_len)
    runner = Runner(
        model,
        ops,
        checkpoint.dtype,
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        max_rows=sizes.max_rows,
        kv_cache_dtype=config.kv_cache_dtype,
        captures=False,
    )
    sleep = SleepMode(ops, runner, None) if config.enable_sleep_mode else None

    def reload() -> None:
        again = cut_checkpoint(config, load_for(config, progress=False), ops, cuts)
        apply_update(model.entries, again.weights)

    reports.send(("report", None))
    return Follower(runner, sizes, sleep, reload)


def serve(messages: Connection, reports: Connection) -> int:
    """Build the model part and run calls until rank 0 closes the pipe; return the exit status."""
    try:
        config, rank, path = messages.recv()
        with torch.inference_mode():
            follower = build_follower(config, rank, path, reports, messages)
            with follower.ops.runtime.step_context():
                while True:
                    follower.run(messages.recv())
    except EOFError:  # rank 0 has closed the pipe
        return 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            reports.send((type(error).__name__, f"{type(error).__name__}: {error}"))
        return EXIT_FAILED


def _watch_parent_pipe() -> None:
    """End this process when rank 0 has closed its standard input, also within a collective."""
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)


def main(messages_fd: int, reports_fd: int) -> int:
    """Run the process of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group: rank 0 acts
    threading.Thread(target=_watch_parent_pipe, name="draftproof-life", daemon=True).start()
    return serve(Connection(messages_fd, writable=False), Connection(reports_fd, readable=False))


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
