"""Rank 0: the engine's own model part, which announces every forward pass to the other ranks.

The rows of a pass are broadcast on the device, so the other ranks need no slots, no sampler and no drafts:
they compute, and rank 0 alone samples, verifies and commits. A message on the host carries the size of a pass
alone, or the number of a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftproof.engine.parallel.rank_processes import RankProcesses
from draftproof.engine.sequence import Sequence as EngineSequence
from draftproof.engine.slots import Slots
from draftproof.models.runner import Runner
from draftproof.ops import GraphPool, Rows, Runtime

T = TypeVar("T")


class LeaderRunner(Runner):
    """Runner of rank 0."""

    def __init__(self, ranks: RankProcesses, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, captures=False)
        self._ranks = ranks
        self._hidden: Tensor | None = None  # of the last pass, which the other ranks have too

    def _announce(self, rows: Rows, output_rows: Tensor | None = None) -> None:
        lines = torch.stack([rows.tokens, rows.positions, rows.slots, rows.kv_index])  # [4, R]
        self._ranks.call("forward", len(rows.tokens), 0 if output_rows is None else len(output_rows))
        self.ops.communicator.broadcast(lines)
        if output_rows is not None:
            self.ops.communicator.broadcast(output_rows)

    def forward(self, rows: Rows) -> Tensor:
        return self.forward_tapped(rows)[0]

    def forward_selected(self, rows: Rows, output_rows: Tensor) -> Tensor:
        self._announce(rows, output_rows.contiguous())
        self._hidden = super().forward_selected(rows, output_rows)
        return self._hidden

    def forward_tapped(self, rows: Rows) -> tuple[Tensor, ...]:
        self._announce(rows)
        found = super().forward_tapped(rows)
        self._hidden = found[0]
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        if hidden is self._hidden:
            self._ranks.call("logits", 0)
        else:
            self._ranks.call("logits", len(hidden))
            self.ops.communicator.broadcast(hidden.contiguous())
        return super().logits(hidden)

    def check_ranks(self, error: BaseException | None = None) -> None:
        self._ranks.check(error)


class LeaderSlots(Slots):
    """Slots of rank 0: page tables are sent to the other ranks."""

    def __init__(self, ranks: RankProcesses, *sizes: Any) -> None:
        super().__init__(*sizes)
        self._ranks = ranks

    def fill(self, admitted: Sequence[EngineSequence]) -> None:
        if admitted:
            self._ranks.call("fill_pages", [(each.slot, list(each.pages)) for each in admitted])
        super().fill(admitted)

    def grow(self, pages: Sequence[tuple[int, int, int]]) -> None:
        if pages:
            self._ranks.call("add_pages", list(pages))
        super().grow(pages)


def mirror_graphs(runtime: Runtime, ranks: RankProcesses) -> None:
    """Let the other ranks compile, capture and replay the graphs of rank 0 that hold forward passes."""
    capture, compile_kernels = runtime.graph, runtime.compile
    numbers = count()

    def graph(function: Callable[[], T], pool: GraphPool = GraphPool.STEP) -> Callable[[], T]:
        with ranks.recording(sends=True) as calls:
            function()
        if not calls:
            return capture(function, pool)
        number = next(numbers)
        ranks.call("capture", number, calls)
        with ranks.recording(sends=False):  # the other ranks make the same runs
            replay = capture(function, pool)

        def replay_all() -> T:
            ranks.call("replay", number)
            return replay()

        return replay_all

    def compile_all(functions: Sequence[Callable[[], object]], tick: Callable[[int, int], None]) -> None:
        with ranks.recording(sends=False) as calls:
            compile_kernels(functions, tick)
        ranks.call("compile", calls)

    setattr(runtime, "graph", graph)  # noqa: B010 - of this instance
    setattr(runtime, "compile", compile_all)  # noqa: B010
