"""Encoder of frames in the worker: from the results of a step to the columns for one HTTP process.

All requests are encoded together as columns. Only finished requests, new requests and requests with rare
options are handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.engine.step.step_results import HostLogprobs, StepResults
from draftproof.metrics import EngineStats, RequestStats
from draftproof.outputs import DraftRecord, LogprobRow
from draftproof.serve.ipc.frame import (
    LOGPROB_BLOCKS,
    STATUS_BY_REASON,
    Header,
    RequestStatus,
    RowSetKind,
    pack,
)
from draftproof.types import NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, PICK, TOKENS, LogprobKind

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class AdmissionFailure:
    """Requests of one prompt that were not admitted, by the handle of the first."""

    handle: int
    status: RequestStatus
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class FinishEntry:
    """End of one request."""

    entry: int
    stop_token: int | None = None
    message: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RequestGroup:
    """Requests of a step that belong to one HTTP process. Reused while the set stays the same."""

    at: NDArray[np.int64] | None  # indices in the step's results; None: all of them
    handles: NDArray[np.uint64]  # [n]
    kinds: NDArray[np.uint8]  # [n] logprob kinds
    max_top: dict[LogprobKind, int]  # largest number of top tokens, by logprob kind

    @classmethod
    def build(
        cls, at: Sequence[int] | None, requests: Sequence[tuple[int, LogprobKind, int]]
    ) -> RequestGroup:
        """Build the group of (handle, logprob kind, number of top tokens) of each request."""
        max_top: dict[LogprobKind, int] = {}
        for _, kind, top in requests:
            if kind is not LogprobKind.NONE:
                max_top[kind] = max(top, max_top.get(kind, 0))
        handles = np.array([handle for handle, *_ in requests], np.uint64)
        kinds = np.array([kind for _, kind, _ in requests], np.uint8)
        return cls(None if at is None else np.array(at, np.int64), handles, kinds, max_top)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of the engine as a whole, which every frame carries."""

    max_drafts: int
    num_steps: int
    step_seconds: float
    busy_seconds: float
    stats: EngineStats

    def header(self, sequence: int, **counts: int) -> Header:
        """Return the header of a frame."""
        stats = self.stats
        return Header(
            max_drafts=self.max_drafts,
            sequence=sequence,
            num_steps=self.num_steps,
            step_seconds=self.step_seconds,
            busy_seconds=self.busy_seconds,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_preemptions=stats.num_preemptions,
            num_queried_tokens=stats.num_queried_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_pages=stats.num_pages,
            num_used_pages=stats.num_used_pages,
            num_cached_pages=stats.num_cached_pages,
            **counts,
        )


def encode_step(
    sequence: int,
    engine: EngineSnapshot,
    results: StepResults,
    group: RequestGroup,
    new_stats: Iterable[tuple[int, RequestStats]] = (),
) -> bytes:
    """Encode one step for one HTTP process.

    `new_stats`: (index in `group`, statistics) of requests whose statistics changed, ascending.
    """
    table = results.table if group.at is None else results.table[group.at]
    out = table[:, NUM_OUT]
    size = len(group.handles)
    # per token: index of its request in the group, and position within the step
    owner = np.repeat(np.arange(size), out)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(out) - out, out)
    columns: Arrays = {
        "status": np.zeros(size, np.uint8),
        "handle": group.handles,
        "num_out": out,
        "num_draft": table[:, NUM_DRAFT],
        "num_accepted": table[:, NUM_ACCEPTED],
        "logprob_kind": group.kinds,
        "token": table[owner, TOKENS + place],
    }
    counts = {"requests": size, "tokens": len(owner)}
    if results.source is not None:
        source = results.source if group.at is None else results.source[group.at]
        accepted = place < table[owner, NUM_ACCEPTED]
        columns["source"] = source[owner[accepted], place[accepted]]
        counts["draft_sources"] = len(columns["source"])
    if group.max_top:
        _add_logprob_blocks(columns, counts, results, group, owner, table[owner, PICK] + place)
    if results.finishes or results.host_logprobs:
        index = None if group.at is None else {b: i for i, b in enumerate(group.at.tolist())}
        endings = _select(results.finishes, index)
        if endings:
            for i, ending in endings.items():
                columns["status"][i] = STATUS_BY_REASON[ending.reason]
            finishes = [FinishEntry(i, endings[i].stop, endings[i].error) for i in sorted(endings)]
            _add_finishes(columns, counts, finishes)
        _add_extras(columns, counts, _select(results.host_logprobs, index), results.sources)
    _add_stats(columns, counts, list(new_stats))
    return pack(engine.header(sequence, **counts), columns)


def encode_failures(sequence: int, engine: EngineSnapshot, failures: Sequence[AdmissionFailure]) -> bytes:
    """Encode a frame without a step: requests that were not admitted. May be empty."""
    size = len(failures)
    counts = {"requests": size}
    zeros = np.zeros(size, np.uint8)
    columns: Arrays = {
        "status": np.array([failure.status for failure in failures], np.uint8),
        "handle": np.array([failure.handle for failure in failures], np.uint64),
        **dict.fromkeys(("num_out", "num_draft", "num_accepted", "logprob_kind"), zeros),
    }
    if failures:
        finishes = [FinishEntry(i, None, each.message, each.param) for i, each in enumerate(failures)]
        _add_finishes(columns, counts, finishes)
    return pack(engine.header(sequence, **counts), columns)


def _select(values: dict[int, Any], index: dict[int, int] | None) -> dict[int, Any]:
    """Return the values of the group's requests, by index in the group."""
    if index is None:
        return values
    return {index[b]: value for b, value in values.items() if b in index}


def _add_logprob_blocks(
    columns: Arrays,
    counts: dict[str, int],
    results: StepResults,
    group: RequestGroup,
    owner: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Add the logprobs that the device computed. `rows`: row of each token in its block."""
    for kind, name in LOGPROB_BLOCKS:
        if kind not in group.max_top:
            continue
        selected = group.kinds[owner] == kind
        at: Any = rows if selected.all() else rows[selected]
        counts[f"{name}_rows"] = len(at)
        found = results.columns.get(kind)
        if found is None:
            assert not len(at)
            counts[f"{name}_columns"] = 1
            continue
        if len(at) and (np.diff(at) == 1).all():  # consecutive rows, the usual case: slice without a copy
            at = slice(int(at[0]), int(at[-1]) + 1)
        top = min(group.max_top[kind], found.ids.shape[1])
        counts[f"{name}_columns"] = 1 + top
        columns[f"{name}_value"] = found.values[at, : 1 + top]
        columns[f"{name}_id"] = found.ids[at, :top]
        columns[f"{name}_rank"] = found.ranks[at]


def _add_stats(columns: Arrays, counts: dict[str, int], new_stats: list[tuple[int, RequestStats]]) -> None:
    if not new_stats:
        return
    counts["stats"] = len(new_stats)
    columns["stats_entry"] = np.array([i for i, _ in new_stats], np.uint32)
    columns["stats_cached"] = np.array([stats.num_cached_tokens for _, stats in new_stats], np.uint32)
    columns["stats_preempted"] = np.array([stats.num_preemptions for _, stats in new_stats], np.uint32)
    for name, times in (
        ("scheduled", [stats.scheduled_at for _, stats in new_stats]),
        ("first_token", [stats.first_token_at for _, stats in new_stats]),
    ):
        columns[f"stats_has_{name}"] = np.array([time is not None for time in times], np.uint8)
        columns[f"stats_{name}"] = np.array([time or 0.0 for time in times], np.float64)


def _add_finishes(columns: Arrays, counts: dict[str, int], finishes: list[FinishEntry]) -> None:
    """Add finished requests, ascending by entry."""
    stop_tokens = [finish.stop_token for finish in finishes]
    columns["finish_entry"] = np.array([finish.entry for finish in finishes], np.uint32)
    columns["finish_has_stop_token"] = np.array([token is not None for token in stop_tokens], np.uint8)
    columns["finish_stop_token"] = np.array([token or 0 for token in stop_tokens], np.uint32)
    texts: list[list[bytes]] = []
    for name in ("message", "param"):
        values = [getattr(finish, name) for finish in finishes]
        encoded = [(value or "").encode(errors="replace") for value in values]
        columns[f"finish_has_{name}"] = np.array([value is not None for value in values], np.uint8)
        columns[f"finish_{name}"] = np.array([len(text) for text in encoded], np.uint32)
        texts.append(encoded)
    text = b"".join(chain.from_iterable(zip(*texts, strict=True)))
    columns["text"] = np.frombuffer(text, np.uint8)
    counts.update(finishes=len(finishes), text_bytes=len(text))


def _add_extras(
    columns: Arrays, counts: dict[str, int], extras: dict[int, HostLogprobs], sources: Sequence[str]
) -> None:
    """Add logprobs that the host computed, and drafts."""
    sets: list[tuple[int, RowSetKind, list[LogprobRow]]] = []
    drafts: list[tuple[int, DraftRecord]] = []
    for i in sorted(extras):
        extra = extras[i]
        if extra.logprobs is not None:
            sets.append((i, RowSetKind.TOKENS, extra.logprobs))
        if extra.prompt_logprobs is not None:
            sets.append((i, RowSetKind.PROMPT, extra.prompt_logprobs))
        drafts += [(i, record) for record in extra.drafts or ()]
    if sets:
        _add_row_sets(columns, counts, sets)
    if drafts:
        _add_drafts(columns, counts, drafts, sources)


def _add_row_sets(
    columns: Arrays, counts: dict[str, int], sets: list[tuple[int, RowSetKind, list[LogprobRow]]]
) -> None:
    rows = [row for _, _, some in sets for row in some]
    widths = [len(row.token_ids) for row in rows]
    cells = sum(widths)
    columns["set_entry"] = np.array([i for i, _, _ in sets], np.uint32)
    columns["set_kind"] = np.array([kind for _, kind, _ in sets], np.uint8)
    columns["set_length"] = np.array([len(some) for _, _, some in sets], np.uint32)
    columns["row_width"] = np.array(widths, np.uint32)
    flat = chain.from_iterable
    columns["cell_id"] = np.fromiter(flat(row.token_ids for row in rows), np.uint32, cells)
    columns["cell_rank"] = np.fromiter(flat(row.ranks for row in rows), np.uint32, cells)
    columns["cell_value"] = np.fromiter(flat(row.logprobs for row in rows), np.float64, cells)
    counts.update(sets=len(sets), set_rows=len(rows), set_cells=cells)


def _add_drafts(
    columns: Arrays, counts: dict[str, int], drafts: list[tuple[int, DraftRecord]], sources: Sequence[str]
) -> None:
    records = [record for _, record in drafts]
    columns["draft_entry"] = np.array([i for i, _ in drafts], np.uint32)
    columns["draft_token"] = np.array([record.token_id for record in records], np.uint32)
    columns["draft_position"] = np.array([record.position for record in records], np.uint32)
    columns["draft_source"] = np.array([sources.index(record.source) for record in records], np.uint8)
    columns["draft_accepted"] = np.array([record.accepted for record in records], np.uint8)
    for name in ("draft_logprob", "target_logprob"):
        values = [getattr(record, name) for record in records]
        columns[f"draft_has_{name}"] = np.array([value is not None for value in values], np.uint8)
        columns[f"draft_{name}"] = np.array([0.0 if value is None else value for value in values], np.float64)
    counts["drafts"] = len(drafts)
