"""Warm-up: capture the graphs of usual steps at start and time them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from draftproof.engine.drafting import draft_warmup
from draftproof.engine.sizing import sample_row_counts
from draftproof.engine.step.device_step import DeviceStep
from draftproof.engine.step.graph_cache import GraphTask
from draftproof.ops import Rows
from draftproof.types import DraftSpec, StepFeatures

Progress = Callable[[str, int, int], None]  # what, how much is done, of how much
TIMING_ROUNDS = 3  # timings of each size where steps are not captured; the fastest counts


class WarmUp:
    """Captures and times the steps of a `DeviceStep`."""

    def __init__(self, step: DeviceStep) -> None:
        self._step = step
        self._ops = step.ops
        self._drafting = step.drafting

    def prepare(
        self, features: Sequence[StepFeatures], max_rows: int, progress: Progress
    ) -> dict[int, float]:
        """Capture decode steps of up to `max_rows` rows and prompt steps of any size.

        Returns the seconds of a step by its rows.
        """
        step, ops = self._step, self._ops
        if not ops.runtime.asynchronous:
            sizes = sample_row_counts(max_rows)
            # All sizes in turn, several times: a busy moment of the machine then affects one timing only.
            rounds = [
                [ops.runtime.seconds(partial(self.run_forward, n), times=1) for n in sizes]
                for _ in range(TIMING_ROUNDS)
            ]
            return dict(zip(sizes, np.min(rounds, axis=0).tolist(), strict=True))
        sizes = sorted({ops.runtime.bucket(n) for n in range(1, step.max_rows + 1)}, reverse=True)
        decoding = [n for n in sizes if n <= ops.runtime.bucket(max_rows)]
        tasks = [step.draft_task(*size) for size in draft_warmup.captured_graphs(self._drafting, sizes)]
        tasks += [step.forward_task(size) for size in sizes]
        for one, size in product(features, decoding):
            tasks += [step.decode_task(size, one), step.verify_task(size, one)]
        compile_only = [
            step.draft_task(*size).function for size in draft_warmup.compiled_drafts(self._drafting, sizes)
        ]
        self.capture(tasks, progress, compile_only)
        timed = [step.decode_task(n, features[0]) for n in decoding]
        return {
            task.key.rows: ops.runtime.seconds(step.graphs.get(task.key, task.function)) for task in timed
        }

    def capture(
        self,
        tasks: Sequence[GraphTask],
        progress: Progress,
        compile_only: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Compile the kernels of `tasks` and `compile_only` in parallel, then capture `tasks`."""
        step, proposer = self._step, self._drafting.proposer
        functions = [task.function for task in tasks]
        self._ops.runtime.compile(
            [step.load_empty_plan, *functions, *compile_only], partial(progress, "compiling")
        )
        self._drafting.restore(proposer)  # compilation runs no kernel, so a failure there says nothing
        for done, task in enumerate(tasks):
            progress("capturing", done, len(tasks))
            step.graphs.get(task.key, task.function, task.own_pool)
        progress("capturing", len(tasks), len(tasks))

    def draft_seconds(self, sizes: Iterable[int]) -> dict[int, float]:
        """Return seconds of the drafts behind a step besides storing KV, by entries."""
        self._step.load_empty_plan()
        return draft_warmup.time_drafts(self._drafting, sizes, self.time_drafts)

    def time_drafts(self, rows: int, entries: int, spec: DraftSpec) -> float:
        """Return the seconds of drafts behind a step of `rows` rows, with cold caches."""
        rows = min(rows, self._step.max_rows)
        task = self._step.draft_task(rows, entries, spec)
        draft = self._step.graphs.get(task.key, task.function, own_pool=True)
        batch_rows = self._step.buffers.layout(rows, 0, None).rows
        with draft_warmup.fake_requests(self._drafting, self._step.plan, batch_rows, entries) as flush_caches:
            return self._ops.runtime.seconds(lambda: (flush_caches(), draft()), times=3)

    def run_forward(self, size: int) -> None:
        """Run the costly part of a step of `size` rows without requests: K and V go to page 0."""
        slots, runner = self._step.slots, self._step.runner
        lines = torch.zeros((4, size), dtype=torch.int64, device=slots.device)
        torch.arange(size, out=lines[1])
        rows = Rows(lines[0], lines[1], lines[2], lines[3], torch.zeros_like(slots.columns.page_table))
        runner.logits(runner.forward(rows))
