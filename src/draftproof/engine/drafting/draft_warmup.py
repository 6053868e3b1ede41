"""Start-up work for a draft model: which of its graphs to capture, and what its drafts cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from draftproof.engine.drafting.device_proposer import MAX_FEW_ENTRIES, DraftRunner
from draftproof.types import DraftSpec, FinishStatus, PlanColumns, Rows

CACHE_FLUSH_BYTES = 128 << 20  # more than the cache of any chip
PROMPT_ROWS = 64, 256  # rows of prompts beside full windows with captured drafts: few entries, more
LONG_PROMPT_ROWS = 128, 256, 512
DraftGraph = tuple[int, int, DraftSpec]  # rows, entries, spec


def captured_graphs(runner: DraftRunner, sizes: Sequence[int]) -> list[DraftGraph]:
    """Return the graphs to capture at start-up for steps of these sizes.

    A graph that is captured later stalls all requests. Beside a long prompt drafts are not captured.
    """
    ops, (num_slots, k) = runner.slots.ops, runner.slots.columns.draft.shape
    found: dict[DraftGraph, None] = {}
    for count in range(1, num_slots + 1) if runner.runs_every_step else ():
        full = ops.runtime.bucket(count * (1 + k))
        prompt_rows = PROMPT_ROWS[count > MAX_FEW_ENTRIES]
        low, high = ops.runtime.bucket(count), ops.runtime.bucket(count * (1 + k) + prompt_rows)
        for rows, wanted in product((n for n in sizes if low <= n <= high), range(k + 1)):
            rounds = runner.captured_rounds(count, wanted, rows > full)
            found[rows, runner.captured_entries(count, rows), DraftSpec(rounds)] = None
    return list(found)


def compiled_drafts(runner: DraftRunner, sizes: Sequence[int]) -> list[DraftGraph]:
    """Return drafts beside longer prompts: their kernels are compiled, but not captured."""
    num_slots, k = runner.slots.columns.draft.shape
    rows = {n for n in sizes if n in (*LONG_PROMPT_ROWS, max(sizes))} if runner.runs_every_step else ()
    rounds = dict.fromkeys((0, runner.captured_rounds(1, (k + 1) // 2, True), k))
    return [
        (size, runner.captured_entries(count, size), DraftSpec(number))
        for size, count, number in product(sorted(rows), dict.fromkeys((1, num_slots)), rounds)
    ]


def time_drafts(
    runner: DraftRunner, sizes: Iterable[int], seconds: Callable[[int, int, DraftSpec], float]
) -> dict[int, float]:
    """Return the seconds of drafts besides storing KV, by entries; `seconds` times one graph.

    A model that stops early is timed for the first round, a member of a hybrid for half of them.
    """
    if not runner.runs_every_step or runner.proposer is None:
        return {}
    ops, (num_slots, k) = runner.slots.ops, runner.slots.columns.draft.shape
    rounds = 1 if runner.proposer.stops_early else (k + 1) // 2 if runner.is_gated else k
    found = {}
    for count in (n for n in sizes if n <= num_slots):
        rows = ops.runtime.bucket(count * (1 + k))
        entries = runner.captured_entries(count, rows)
        drafting, storing = (seconds(rows, entries, DraftSpec(number)) for number in (rounds, 0))
        found[count] = max(0.0, drafting - storing)
    return found


@contextmanager
def fake_requests(
    runner: DraftRunner, plan: PlanColumns, rows: Rows, entries: int
) -> Iterator[Callable[[], object]]:
    """Fill so many slots with a request of two tokens that gets all its drafts; restore them afterwards.

    Rounds without entries end early, so they cannot be timed on an empty plan. KV goes to the scrap page 0.
    Yields a function that flushes the caches, as a step does that reads all weights of the target.
    """
    columns, k = runner.slots.columns, runner.slots.columns.draft.shape[1]
    max_len = columns.tokens.shape[1]
    size = max(0, min(entries, len(rows.slots))) if max_len > 2 else 0
    values = {"length": 2, "computed": 1, "ended": int(FinishStatus.RUNNING), "seed": -1}
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
