"""Encoder of frames in the worker: from the results of a step to the columns for one HTTP process.

All requests are encoded together as columns. Only finished requests, new requests and requests with rare
options are handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import ragged_indices
from draftproof.engine.step.step_results import HostOutput, LogprobWidth, StepResults, widest
from draftproof.metrics import EngineStats, RequestStats
from draftproof.outputs import DraftColumns, LogprobRow
from draftproof.serve.ipc.frame import (
    LOGPROB_BLOCKS,
    STATS_FIELDS,
    STATUS_BY_REASON,
    Header,
    RequestStatus,
    RowSetKind,
    pack,
)
from draftproof.types import NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, PICK, TOKENS, LogprobKind

Arrays = dict[str, NDArray[Any]]
_engine_counters = attrgetter(*Header._fields[STATS_FIELDS])


@dataclass(frozen=True, slots=True)
class AdmissionFailure:
    """Requests of one prompt that were not admitted, by the handle of the first."""

    handle: int
    status: RequestStatus
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RequestGroup:
    """Requests of a step that belong to one HTTP process. Reused while the set stays the same."""

    at: NDArray[np.int64] | None  # indices in the step's results; None: all of them
    handles: NDArray[np.uint64]  # [n]
    kinds: NDArray[np.uint8]  # [n] logprob kinds
    widths: dict[LogprobKind, LogprobWidth]  # of the blocks of logprobs

    @classmethod
    def build(
        cls, at: Sequence[int] | None, requests: Sequence[tuple[int, LogprobKind, LogprobWidth]]
    ) -> RequestGroup:
        """Build the group of (handle, logprob kind, width) of each request."""
        handles = np.array([handle for handle, *_ in requests], np.uint64)
        kinds = np.array([kind for _, kind, _ in requests], np.uint8)
        widths = widest((kind, width) for _, kind, width in requests)
        return cls(None if at is None else np.array(at, np.int64), handles, kinds, widths)


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
        totals = self.num_steps, self.step_seconds, self.busy_seconds, *_engine_counters(self.stats)
        return Header(self.max_drafts, sequence, *totals, **counts)


def encode_step(
    sequence: int,
    engine: EngineSnapshot,
    results: StepResults,
    group: RequestGroup,
    new_stats: Iterable[tuple[int, RequestStats]] = (),
) -> bytes:
    """Encode one step for one HTTP process. `new_stats`: changed ones, ascending by index in `group`."""
    table = results.table if group.at is None else results.table[group.at]
    out = table[:, NUM_OUT]
    size = len(group.handles)
    # per token: index of its request in the group, and position within the step
    owner, place = ragged_indices(out)
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
    if results.draft_sources is not None:
        sources = results.draft_sources if group.at is None else results.draft_sources[group.at]
        columns["source"] = sources[np.arange(sources.shape[1]) < table[:, NUM_DRAFT, None]]
        counts["draft_sources"] = len(columns["source"])
    if group.widths:
        _add_logprob_blocks(columns, counts, results, group, owner, table[owner, PICK] + place)
    if results.finishes or results.host_outputs:
        index = None if group.at is None else {b: i for i, b in enumerate(group.at.tolist())}
        endings = _select(results.finishes, index)
        if endings:
            for i, ending in endings.items():
                columns["status"][i] = STATUS_BY_REASON[ending.reason]
            entries = sorted(endings)
            stops, errors = [endings[i].stop for i in entries], [endings[i].error for i in entries]
            _add_finishes(columns, counts, entries, stops, errors, [None] * len(entries))
        _add_extras(columns, counts, _select(results.host_outputs, index))
    if results.drafts is not None:
        drafts = results.drafts
        if group.at is not None:
            drafts = drafts.of_requests(group.at, len(results))
        _add_drafts(columns, counts, drafts)
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
        messages, params = [each.message for each in failures], [each.param for each in failures]
        _add_finishes(columns, counts, range(size), [None] * size, messages, params)
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
        if kind not in group.widths:
            continue
        width = group.widths[kind]
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
        top = min(width.top, found.ids.shape[1])
        counts[f"{name}_columns"] = 1 + top
        columns[f"{name}_value"] = found.values[at, : 1 + top]
        columns[f"{name}_id"] = found.ids[at, :top]
        columns[f"{name}_rank"] = found.ranks[at]
        if width.num_named:
            assert found.named_values is not None and found.named_ranks is not None
            counts[f"{name}_named"] = width.num_named
            columns[f"{name}_named_value"] = found.named_values[at, : width.num_named]
            columns[f"{name}_named_rank"] = found.named_ranks[at, : width.num_named]


def _add_optional(columns: Arrays, prefix: str, name: str, values: Sequence[Any]) -> None:
    """Add a column whose values may be None, with its column of flags."""
    columns[f"{prefix}_has_{name}"] = np.array([value is not None for value in values], np.uint8)
    columns[f"{prefix}_{name}"] = np.array([0 if value is None else value for value in values])


def _add_stats(columns: Arrays, counts: dict[str, int], new_stats: list[tuple[int, RequestStats]]) -> None:
    if not new_stats:
        return
    counts["stats"] = len(new_stats)
    columns["stats_entry"] = np.array([i for i, _ in new_stats])
    columns["stats_cached"] = np.array([stats.num_cached_tokens for _, stats in new_stats])
    columns["stats_preempted"] = np.array([stats.num_preemptions for _, stats in new_stats])
    _add_optional(columns, "stats", "scheduled", [stats.scheduled_at for _, stats in new_stats])
    _add_optional(columns, "stats", "first_token", [stats.first_token_at for _, stats in new_stats])


def _add_finishes(
    columns: Arrays,
    counts: dict[str, int],
    entries: Sequence[int],
    stop_tokens: Sequence[int | None],
    messages: Sequence[str | None],
    params: Sequence[str | None],
) -> None:
    """Add finished requests, ascending by entry."""
    columns["finish_entry"] = np.array(entries)
    _add_optional(columns, "finish", "stop_token", stop_tokens)
    texts: list[list[bytes]] = []
    for name, values in (("message", messages), ("param", params)):
        encoded = [(value or "").encode(errors="replace") for value in values]
        columns[f"finish_has_{name}"] = np.array([value is not None for value in values], np.uint8)
        columns[f"finish_{name}"] = np.array([len(text) for text in encoded])
        texts.append(encoded)
    text = b"".join(chain.from_iterable(zip(*texts, strict=True)))
    columns["text"] = np.frombuffer(text, np.uint8)
    counts.update(finishes=len(entries), text_bytes=len(text))


def _add_extras(columns: Arrays, counts: dict[str, int], extras: dict[int, HostOutput]) -> None:
    """Add logprobs outside the blocks, and embeddings."""
    sets: list[tuple[int, RowSetKind, list[LogprobRow]]] = []
    for i in sorted(extras):
        extra = extras[i]
        for kind, rows in ((RowSetKind.TOKENS, extra.logprobs), (RowSetKind.PROMPT, extra.prompt_logprobs)):
            if rows is not None:
                sets.append((i, kind, rows))
    vectors = {i: extras[i].embedding for i in sorted(extras) if extras[i].embedding is not None}
    if vectors:
        columns["embedding_entry"] = np.array(list(vectors))
        columns["embedding_value"] = values = np.array(list(vectors.values()), np.float32)
        counts["embeddings"], counts["embedding_size"] = values.shape
    if sets:
        _add_row_sets(columns, counts, sets)


def _add_drafts(columns: Arrays, counts: dict[str, int], drafts: DraftColumns) -> None:
    """Add the drafts of the requests that report them."""
    counts["drafts"] = drafts.num_drafts
    for name in DraftColumns._fields[:-2]:
        columns[f"draft_{name}"] = getattr(drafts, name)
    is_reported = np.arange(drafts.top_ids.shape[1]) < drafts.top_width[:, None]
    columns["draft_top_id"], columns["draft_top_value"] = (
        each[is_reported] for each in (drafts.top_ids, drafts.top_logprobs)
    )
    counts["draft_tops"] = len(columns["draft_top_id"])


def _add_row_sets(
    columns: Arrays, counts: dict[str, int], sets: list[tuple[int, RowSetKind, list[LogprobRow]]]
) -> None:
    rows = [row for _, _, some in sets for row in some]
    widths = [len(row.token_ids) for row in rows]
    cells, flat = sum(widths), chain.from_iterable
    columns["set_entry"] = np.array([i for i, _, _ in sets])
    columns["set_kind"] = np.array([kind for _, kind, _ in sets])
    columns["set_length"] = np.array([len(some) for _, _, some in sets])
    columns["row_width"] = np.array(widths)
    columns["cell_id"] = np.fromiter(flat(row.token_ids for row in rows), np.uint32, cells)
    columns["cell_rank"] = np.fromiter(flat(row.ranks for row in rows), np.uint32, cells)
    columns["cell_value"] = np.fromiter(flat(row.logprobs for row in rows), np.float64, cells)
    counts.update(sets=len(sets), set_rows=len(rows), set_cells=cells)
