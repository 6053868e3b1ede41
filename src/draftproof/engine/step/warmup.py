"""Warm-up: capture the graphs of usual steps and drafts at start-up, and time them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from draftproof.engine.drafting.device_proposer import MAX_FEW_ENTRIES, DraftRunner
from draftproof.engine.sizing import sample_row_counts
from draftproof.engine.step.device_step import DeviceStep, StepTensors
from draftproof.engine.step.graph_cache import GraphTask
from draftproof.ops import Rows
from draftproof.types import DraftSpec, FinishStatus, PlanColumns, StepFeatures

Progress = Callable[[str, int, int], None]  # what, how much is done, of how much
TIMING_ROUNDS = 3  # timings of a size where steps are not captured; the fastest counts
MAX_TIMED_ROWS = 64  # above, only the largest size is timed, and once: such steps take most of the time
CACHE_FLUSH_BYTES = 128 << 20  # more than the cache of any chip
TOKEN_STRIDE = 7919  # between the tokens of timed rows; a prime
PROMPT_ROWS = 64, 256  # rows of prompts beside full windows with captured drafts: few entries, more
LONG_PROMPT_ROWS = 128, 256, 512
DraftGraph = tuple[int, int, DraftSpec]  # rows, entries, spec


class WarmUp:
    """Captures and times the steps of a `DeviceStep`."""

    def __init__(self, step: DeviceStep) -> None:
        self._step = step
        self._ops = step.ops
        self._drafting = step.drafting

    def prepare(
        self, features: Sequence[StepFeatures], max_rows: int, progress: Progress
    ) -> dict[int, float]:
        """Capture decode steps up to `max_rows` rows and all prompt steps; return the seconds by rows."""
        step, ops = self._step, self._ops
        if not ops.runtime.asynchronous:
            small = [n for n in sample_row_counts(max_rows) if n <= MAX_TIMED_ROWS]
            seconds = dict.fromkeys(small, math.inf)
            # All sizes in turn, several times: a busy moment of the machine then affects one timing only.
            for n in small * TIMING_ROUNDS:
                seconds[n] = min(seconds[n], ops.runtime.seconds(partial(self.run_forward, n), times=1))
            if max_rows > MAX_TIMED_ROWS:
                seconds[max_rows] = ops.runtime.seconds(partial(self.run_forward, max_rows), times=1)
            return seconds
        sizes = sorted({ops.runtime.bucket(n) for n in range(1, step.max_rows + 1)}, reverse=True)
        decoding = [n for n in sizes if n <= ops.runtime.bucket(max_rows)]
        tasks: list[GraphTask[Any]] = [
            step.draft_task(*size) for size in captured_graphs(self._drafting, sizes)
        ]
        if self._drafting.defers_kv:
            tasks += [step.deferred_kv.task(size) for size in step.deferred_kv.sizes]
        tasks += [step.forward_task(size, step.num_output_rows(size)) for size in sizes]
        for one, size in product(features, decoding):
            tasks += [step.decode_task(size, one), step.verify_task(size, one)]
        compile_only = [step.draft_task(*size).function for size in compiled_drafts(self._drafting, sizes)]
        self.capture(tasks, progress, compile_only)
        timed = {n: step.graphs.get(step.decode_task(n, features[0])) for n in decoding}
        return {n: ops.runtime.seconds(graph) for n, graph in timed.items()}

    def capture(
        self,
        tasks: Sequence[GraphTask[Any]],
        progress: Progress,
        compile_only: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Compile the kernels of `tasks` and `compile_only` in parallel, then capture `tasks`."""
        step, proposer = self._step, self._drafting.proposer
        functions = [_with_logprobs(task.function) for task in tasks]
        self._ops.runtime.compile(
            [step.load_empty_plan, *functions, *compile_only], partial(progress, "compiling")
        )
        self._drafting.set_proposer(proposer)  # compilation runs no kernel, so a failure there says nothing
        for done, task in enumerate(tasks):
            progress("capturing", done, len(tasks))
            step.capture(task)
        progress("capturing", len(tasks), len(tasks))

    def draft_seconds(self, sizes: Iterable[int]) -> dict[int, float]:
        """Return seconds of the drafts behind a step, by entries, besides those of steps without drafts.

        A model that stops early is timed for the first round, a member of a hybrid for half of them.
        """
        self._step.load_empty_plan()
        runner = self._drafting
        if not runner.runs_behind_steps or runner.proposer is None:
            return {}
        num_slots, k = runner.slots.columns.draft.shape
        found = {}
        for count in (n for n in sizes if n <= num_slots):
            rows = self._ops.runtime.bucket(count * (1 + k))
            entries = runner.captured_entries(count, rows)
            found[count] = self.time_drafts(rows, entries, DraftSpec(runner.timed_rounds))
            if runner.is_hybrid_member or not runner.defers_kv:
                without = self.time_drafts(rows, entries, DraftSpec(0, runs_model=not runner.defers_kv))
                found[count] = max(0.0, found[count] - without)
        return found

    def time_drafts(self, rows: int, entries: int, spec: DraftSpec) -> float:
        """Return the seconds of drafts behind a step of `rows` rows, with cold caches."""
        rows = min(rows, self._step.max_rows)
        task = self._step.draft_task(rows, entries, spec)
        draft = self._step.graphs.get(task)
        batch_rows = self._step.buffers.layout(rows, 0, None).rows
        with fake_requests(self._drafting, self._step.plan, batch_rows, entries) as flush_caches:
            return self._ops.runtime.seconds(lambda: (flush_caches(), draft()), times=3)

    def run_forward(self, size: int) -> None:
        """Run the costly part of a step of `size` rows without requests: K and V go to page 0.

        The page table is that of all steps: a captured pass is recorded anew for another one.
        """
        slots, runner = self._step.slots, self._step.runner
        lines = torch.zeros((4, size), dtype=torch.int64, device=slots.device)
        torch.arange(size, out=lines[1])
        # Tokens that differ: rows of one token would select the same few experts.
        torch.remainder(lines[1] * TOKEN_STRIDE, runner.model.config.vocab_size, out=lines[0])
        rows = Rows(lines[0], lines[1], lines[2], lines[3], slots.columns.page_table)
        runner.forward_logits(rows)


def _with_logprobs(function: Callable[[], object]) -> Callable[[], object]:
    """Return a function that runs a step and the logprob pass that the step leaves out."""

    def run() -> None:
        tensors = function()
        if isinstance(tensors, StepTensors) and tensors.write_logprobs is not None:
            tensors.write_logprobs()

    return run


def captured_graphs(runner: DraftRunner, sizes: Sequence[int]) -> list[DraftGraph]:
    """Return the graphs to capture at start-up; one captured later would stall all requests."""
    ops, (num_slots, k) = runner.slots.ops, runner.slots.columns.draft.shape
    found: dict[DraftGraph, None] = {}
    for count in range(1, num_slots + 1) if runner.runs_behind_steps else ():
        full = ops.runtime.bucket(count * (1 + k))
        prompt_rows = PROMPT_ROWS[count > MAX_FEW_ENTRIES]
        low, high = ops.runtime.bucket(count), ops.runtime.bucket(count * (1 + k) + prompt_rows)
        for rows, wanted in product((n for n in sizes if low <= n <= high), range(k + 1)):
            rounds = runner.captured_rounds(count, wanted, rows > full)
            has_prompts = rows > full and runner.depends_on_prompts
            runs_model = rounds > 0 or has_prompts or not runner.defers_kv
            may_defer = runner.is_hybrid_member and runner.defers_kv and not rounds
            passes = (runs_model, False) if may_defer else (runs_model,)
            for runs in passes:
                if runs or runner.is_hybrid_member:
                    spec = DraftSpec(rounds, runs, has_prompts)
                    found[rows, runner.captured_entries(count, rows), spec] = None
    return list(found)


def compiled_drafts(runner: DraftRunner, sizes: Sequence[int]) -> list[DraftGraph]:
    """Return drafts beside longer prompts: their kernels are compiled, but not captured."""
    num_slots, k = runner.slots.columns.draft.shape
    rows = {n for n in sizes if n in (*LONG_PROMPT_ROWS, max(sizes))} if runner.runs_behind_steps else ()
    rounds = dict.fromkeys((0, runner.captured_rounds(1, (k + 1) // 2, True), k))
    return [
        (size, runner.captured_entries(count, size), DraftSpec(number))
        for size, count, number in product(sorted(rows), dict.fromkeys((1, num_slots)), rounds)
    ]


@contextmanager
def fake_requests(
    runner: DraftRunner, plan: PlanColumns, rows: Rows, entries: int
) -> Iterator[Callable[[], object]]:
    """Fill so many slots with a request of two tokens that gets all its drafts; restore them afterwards.

    Rounds without entries end early, so an empty plan cannot be timed. KV goes to the scrap page 0. Yields a
    function that flushes the caches, as a step does that reads all weights of the target.
    """
    columns, k = runner.slots.columns, runner.slots.columns.draft.shape[1]
    max_len = columns.tokens.shape[1]
    size = max(0, min(entries, len(rows.slots))) if max_len > 2 else 0
    values = {"length": 2, "computed": 1, "finish_status": int(FinishStatus.RUNNING), "seed": -1}
    values["max_length"] = min(k + 4, max_len)
    values |= dict.fromkeys(("page_table", "num_draft", "draft"), 0)
    lines = [(getattr(columns, name), value) for name, value in values.items()]
    lines += [(line, 0) for line in (plan.chunk, rows.tokens, rows.positions, rows.kv_index)]
    lines += [(plan.budget, k)]
    # two different tokens: of equal ones a search would find drafts
    lines += [(columns.tokens[:, i : i + 1], i) for i in range(2)]
    slot_lines = plan.slots, rows.slots
    state = runner.proposer.state_tensors if runner.proposer is not None else ()
    saved = [(line, line.clone()) for line in (*slot_lines, *state, *(line for line, _ in lines))]
    flush = _flush_buffer(rows.slots.device, runner.slots.ops.runtime.asynchronous)
    try:
        for line, value in lines:
            line[:size] = value
        for line in slot_lines:
            line[:size] = torch.arange(size, device=line.device)
        yield flush.zero_
    finally:
        for line, before in saved:
            line.copy_(before)


def _flush_buffer(device: torch.device, asynchronous: bool) -> Tensor:
    """Return bytes to overwrite the caches with; none without memory for them."""
    try:
        return torch.empty(CACHE_FLUSH_BYTES * asynchronous, dtype=torch.uint8, device=device)
    except RuntimeError:
        return torch.empty(0, dtype=torch.uint8, device=device)
