"""Decoder of frames in an HTTP process: from bytes to the same StepResults that the engine returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import ragged_indices
from draftproof.engine.step.step_results import (
    Finish,
    HostOutput,
    LogprobColumns,
    LogprobWidth,
    StepResults,
    column_logprob_kind,
    has_long_logprobs,
    logprob_width_of,
    widest,
)
from draftproof.errors import EngineClosedError, RequestError
from draftproof.metrics import EngineStats, RequestStats, Timings
from draftproof.outputs import DraftColumns, LogprobRow
from draftproof.serve.ipc.frame import (
    LOGPROB_BLOCKS,
    REASON_BY_STATUS,
    STATS_FIELDS,
    Bounds,
    FrameError,
    Header,
    RequestStatus,
    RowSetKind,
    unpack,
)
from draftproof.types import NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, PICK, TOKENS, LogprobKind, Request

Columns = Mapping[str, NDArray[Any]]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FinishedEntry:
    """End of a request, or the reason why it was not admitted."""

    status: RequestStatus
    stop_token: int | None
    message: str | None
    param: str | None


@dataclass(frozen=True, slots=True)
class DecodedFrame:
    """Decoded frame with n entries. Its handles may belong to requests that were aborted here meanwhile."""

    header: Header
    handles: list[int]  # [n]
    kinds: NDArray[np.uint8]  # [n] logprob kinds
    table: Ints  # [n, TOKENS + K + 1], see types.Outcome
    columns: dict[LogprobKind, LogprobColumns]
    source: NDArray[np.int8] | None  # [n, K]
    finished: dict[int, FinishedEntry]  # by entry
    stats: list[tuple[int, RequestStats]]  # (entry, statistics)
    extras: dict[int, HostOutput] = field(default_factory=dict)  # by entry
    drafts: DraftColumns | None = None  # of the requests that report them

    def engine_stats(self, timings: Timings) -> EngineStats:
        """Return the engine statistics of the header, with `timings`."""
        counters: Any = self.header[STATS_FIELDS]
        return EngineStats(*counters, timings=timings)


def decode_frame(data: bytes, bounds: Bounds) -> DecodedFrame:
    """Decode a frame. Raises FrameError."""
    header, columns = unpack(data, bounds)
    table = _outcome_table(header, columns)
    source = None
    if header.draft_sources:
        source = np.zeros((header.requests, bounds.max_drafts), np.int8)
        source[np.arange(bounds.max_drafts) < table[:, NUM_DRAFT, None]] = columns["source"]
    extras: dict[int, HostOutput] = {}
    if header.sets:
        _decode_row_sets(columns, extras)
    if header.embeddings:
        values = columns["embedding_value"].reshape(header.embeddings, header.embedding_size)
        for entry, vector in zip(columns["embedding_entry"].tolist(), values, strict=True):
            extras.setdefault(entry, HostOutput()).embedding = vector
    return DecodedFrame(
        header=header,
        handles=columns["handle"].tolist(),
        kinds=columns["logprob_kind"],
        table=table,
        columns=_logprob_blocks(header, columns),
        source=source,
        finished=_decode_finished(columns) if header.finishes else {},
        stats=_decode_stats(columns) if header.stats else [],
        extras=extras,
        drafts=_decode_drafts(columns) if header.drafts else None,
    )


@dataclass(frozen=True, slots=True)
class ReceivedGroup:
    """Requests that a frame is about. Reused while the handles stay the same."""

    handles: list[int]  # [n]
    requests: list[Request]  # those of the n that are still open here
    at: list[int]  # their indices among the n
    kinds: NDArray[np.uint8]  # [len(requests)] logprob kind that each requested
    widths: dict[LogprobKind, LogprobWidth]  # of the blocks of logprobs
    host_logprobs: list[int]  # indices of requests whose logprobs come as row sets
    embedding_requests: list[int]  # indices of requests with pooling

    @classmethod
    def build(cls, handles: list[int], known: Mapping[int, Request], vocab: int) -> ReceivedGroup:
        """Build the group of a frame's handles; `known`: open requests by handle."""
        if len(set(handles)) < len(handles):
            raise FrameError("duplicate handle")
        at = [i for i, handle in enumerate(handles) if handle in known]
        requests = [known[handles[i]] for i in at]
        kinds = [column_logprob_kind(request.params, vocab) for request in requests]
        widths = [logprob_width_of(request.params, vocab) for request in requests]
        pairs = list(zip(at, requests, strict=True))
        return cls(
            handles=handles,
            requests=requests,
            at=at,
            kinds=np.array(kinds, np.uint8),
            widths=widest(zip(kinds, widths, strict=True)),
            host_logprobs=[i for i, request in pairs if has_long_logprobs(request.params, vocab)],
            embedding_requests=[i for i, request in pairs if request.pooling is not None],
        )

    def check(self, frame: DecodedFrame) -> None:
        """Raise FrameError unless the frame has the logprobs of its requests."""
        kinds = frame.kinds if len(self.at) == len(frame.kinds) else frame.kinds[self.at]
        matches = np.array_equal(kinds, self.kinds)
        for kind, found in frame.columns.items():
            width = self.widths.get(kind, LogprobWidth())
            named = 0 if found.named_values is None else found.named_values.shape[1]
            is_wide = found.ids.shape[1] >= width.top and named >= width.num_named
            matches = matches and (not len(found.ids) or is_wide)
        for i in self.host_logprobs:
            extra = frame.extras.get(i)
            has_rows = extra is not None and extra.logprobs is not None
            matches = matches and (not frame.table[i, NUM_OUT] or has_rows)
        for i in self.embedding_requests:
            extra = frame.extras.get(i)
            has_embedding = extra is not None and extra.embedding is not None
            matches = matches and (not frame.table[i, NUM_OUT] or has_embedding)
        if not matches:
            raise FrameError("the logprobs or embeddings differ from the requested ones")


def to_step_results(
    frame: DecodedFrame,
    group: ReceivedGroup,
    sources: tuple[str, ...],
    failures: dict[str, RequestError | EngineClosedError],  # of admission, by request id
) -> StepResults:
    """Return the results for the open requests of `group`. Raises FrameError if the frame does not match."""
    group.check(frame)
    table, source, extras, drafts = frame.table, frame.source, frame.extras, frame.drafts
    endings = {
        i: Finish(REASON_BY_STATUS[entry.status], entry.stop_token, entry.message)
        for i, entry in frame.finished.items()
        if not entry.status.is_admission_failure
    }
    at = group.at
    if len(at) < len(group.handles):
        index = {b: i for i, b in enumerate(at)}
        table, source = table[at], None if source is None else source[at]
        endings = {index[i]: ending for i, ending in endings.items() if i in index}
        extras = {index[i]: extra for i, extra in extras.items() if i in index}
        drafts = None if drafts is None else drafts.of_requests(np.array(at, np.int64), len(group.handles))
    return StepResults(
        requests=group.requests,
        table=table,
        columns=frame.columns,
        source_names=sources,
        draft_sources=source,
        finishes=endings,
        host_outputs=extras,
        drafts=drafts,
        refused=failures,
    )


def _outcome_table(header: Header, columns: Columns) -> Ints:
    """Rebuild the outcome table."""
    out, kinds = columns["num_out"].astype(np.int64), columns["logprob_kind"]
    table = np.zeros((header.requests, TOKENS + header.max_drafts + 1), np.int64)
    table[:, NUM_OUT] = out
    table[:, NUM_DRAFT] = columns["num_draft"]
    table[:, NUM_ACCEPTED] = columns["num_accepted"]
    for kind, _ in LOGPROB_BLOCKS:
        selected = kinds == kind
        if selected.any():
            rows = np.where(selected, out, 0)
            table[:, PICK] += np.where(selected, np.cumsum(rows) - rows, 0)
    owner, place = ragged_indices(out)
    table[owner, TOKENS + place] = columns["token"]
    return table


def _logprob_blocks(header: Header, columns: Columns) -> dict[LogprobKind, LogprobColumns]:
    found = {}
    for kind, name in LOGPROB_BLOCKS:
        rows, width = getattr(header, f"{name}_rows"), getattr(header, f"{name}_columns")
        if width:
            found[kind] = LogprobColumns(
                columns[f"{name}_value"].reshape(rows, width),
                columns[f"{name}_id"].reshape(rows, width - 1).astype(np.int64),
                columns[f"{name}_rank"].astype(np.int64),
            )
            if named := getattr(header, f"{name}_named"):
                found[kind].named_values = columns[f"{name}_named_value"].reshape(rows, named)
                found[kind].named_ranks = columns[f"{name}_named_rank"].reshape(rows, named).astype(np.int64)
    return found


def _lists(columns: Columns, prefix: str, *names: str, optional: Sequence[str] = ()) -> zip[tuple[Any, ...]]:
    """Iterate over the entries of several columns; values of `optional` ones are None without their flag."""
    lists = [columns[f"{prefix}_{name}"].tolist() for name in names]
    for name in optional:
        flags, values = columns[f"{prefix}_has_{name}"].tolist(), columns[f"{prefix}_{name}"].tolist()
        lists.append([value if has else None for has, value in zip(flags, values, strict=True)])
    return zip(*lists, strict=True)


def _decode_finished(columns: Columns) -> dict[int, FinishedEntry]:
    text, at, statuses = columns["text"].tobytes(), 0, columns["status"].tolist()
    finished = {}
    for entry, *values in _lists(columns, "finish", "entry", optional=("stop_token", "message", "param")):
        stop_token, *sizes = values
        texts: list[str | None] = []
        for size in sizes:
            try:
                texts.append(None if size is None else text[at : at + size].decode())
            except UnicodeDecodeError as error:
                raise FrameError(f"text is not UTF-8: {error}") from error
            at += size or 0
        finished[entry] = FinishedEntry(RequestStatus(statuses[entry]), stop_token, *texts)
    return finished


def _decode_stats(columns: Columns) -> list[tuple[int, RequestStats]]:
    rows = _lists(columns, "stats", "entry", "cached", "preempted", optional=("scheduled", "first_token"))
    return [
        (entry, RequestStats(cached, preempted, 0.0, scheduled_at=scheduled, first_token_at=first_token))
        for entry, cached, preempted, scheduled, first_token in rows
    ]


def _decode_row_sets(columns: Columns, extras: dict[int, HostOutput]) -> None:
    ids, values, ranks = (columns[f"cell_{name}"].tolist() for name in ("id", "value", "rank"))
    widths, first, row = columns["row_width"].tolist(), 0, 0
    for entry, kind, length in _lists(columns, "set", "entry", "kind", "length"):
        rows = []
        for width in widths[row : row + length]:
            end = first + width
            rows.append(LogprobRow(ids[first:end], values[first:end], ranks[first:end]))
            first = end
        row += length
        extra = extras.setdefault(entry, HostOutput())
        if kind == RowSetKind.PROMPT:
            extra.prompt_logprobs = rows
        else:
            extra.logprobs = rows


def _decode_drafts(columns: Columns) -> DraftColumns:
    widths = columns["draft_top_width"].astype(np.int64)
    is_reported = np.arange(widths.max()) < widths[:, None]
    top_ids, top_logprobs = np.zeros(is_reported.shape, np.int64), np.zeros(is_reported.shape, np.float32)
    top_ids[is_reported], top_logprobs[is_reported] = columns["draft_top_id"], columns["draft_top_value"]
    return DraftColumns(
        entry=columns["draft_entry"].astype(np.int64),
        token=columns["draft_token"].astype(np.int64),
        position=columns["draft_position"].astype(np.int64),
        source=columns["draft_source"].astype(np.int8),
        accepted=columns["draft_accepted"] > 0,
        draft_logprob=columns["draft_draft_logprob"],
        target_logprob=columns["draft_target_logprob"],
        rank=columns["draft_rank"].astype(np.int64),
        top_width=widths,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
