"""From a frame to a step's results, as the engine itself would have given them. The server's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.engine.step.logprob_routing import by_host, logprob_kind_of
from draftproof.engine.step.step_results import Finish, HostLogprobs, LogprobColumns, StepResults
from draftproof.errors import EngineClosedError, RequestError
from draftproof.metrics import EngineStats, RequestStats, Timings
from draftproof.sampling_params import top_of
from draftproof.serve.ipc.frame import BLOCKS, Bounds, FrameError, Header, SetKind, Status, unpack
from draftproof.types import (
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    DraftRecord,
    FinishReason,
    LogprobKind,
    LogprobRow,
    Request,
)

REASONS: dict[Status, FinishReason] = {
    Status.STOP: "stop",
    Status.LENGTH: "length",
    Status.ERROR: "error",
}
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class End:
    """Of a request that does not run any more, or never did."""

    status: Status
    stop: int | None
    text: str | None
    param: str | None


@dataclass(frozen=True, slots=True)
class Told:
    """A frame, understood: n entries. Nothing of it is known yet to be about requests that are still here."""

    header: Header
    handles: list[int]  # [n]
    wants: NDArray[np.uint8]  # [n]
    table: Ints  # [n, TOKENS + K + 1], see types.Outcome
    columns: dict[LogprobKind, LogprobColumns]
    source: NDArray[np.int8] | None  # [n, K]
    ends: dict[int, End]
    counted: list[tuple[int, RequestStats]]  # by entry
    sets: dict[int, HostLogprobs] = field(default_factory=dict)

    def stats(self, timings: Timings) -> EngineStats:
        return EngineStats(*self.header[5:13], timings=timings)


def read(data: bytes, bounds: Bounds, sources: Sequence[str]) -> Told:
    """FrameError if these bytes are no frame. `sources`: `bounds.num_sources` names."""
    header, columns = unpack(data, bounds)
    table, owner, place = _table(header, columns)
    source = None
    if bounds.num_sources > 1:
        source = np.zeros((header.requests, bounds.max_drafts), np.int8)
        stood = place < table[owner, NUM_ACCEPTED]
        source[owner[stood], place[stood]] = columns["source"]
    extras: dict[int, HostLogprobs] = {}
    if header.sets:
        _read_sets(columns, extras)
    if header.drafts:
        _read_drafts(columns, extras, sources)
    return Told(
        header,
        columns["handle"].tolist(),
        columns["wants"],
        table,
        _blocks(header, columns),
        source,
        _read_ends(columns) if header.ends else {},
        _read_counted(columns) if header.counted else [],
        extras,
    )


@dataclass(frozen=True, slots=True)
class Guests:
    """Whom a frame is about, for as long as they stay the same."""

    handles: list[int]  # [n]
    here: list[Request]  # those of them that are not gone
    at: list[int]  # where they are among the n
    wants: NDArray[np.uint8]  # [here] the logprobs that they asked for, by kind,
    tops: dict[LogprobKind, int]  # with how many of the best
    by_host: list[int]  # of the n, those whose logprobs come as rows of their own
    asking: list[int]  # of the n, who wants to hear of drafts

    @classmethod
    def of(cls, handles: list[int], known: Mapping[int, Request], vocab: int) -> Guests:
        if len(set(handles)) < len(handles):
            raise FrameError("it tells of one request twice")
        at = [i for i, handle in enumerate(handles) if handle in known]
        here = [known[handles[i]] for i in at]
        wants, tops = np.zeros(len(here), np.uint8), {LogprobKind.RAW: 0, LogprobKind.PROCESSED: 0}
        for n, request in enumerate(here):
            kind = wants[n] = logprob_kind_of(request.params, vocab)
            if kind != LogprobKind.NONE:
                tops[LogprobKind(kind)] = max(tops[LogprobKind(kind)], top_of(request.params.logprobs, vocab))
        hosted = [i for i, r in zip(at, here, strict=True) if by_host(r.params, vocab)]
        asking = [i for i, r in zip(at, here, strict=True) if r.params.include_draft_logprobs]
        return cls(handles, here, at, wants, tops, hosted, asking)

    def check(self, told: Told) -> None:
        """Does it tell what these asked for?"""
        wants = told.wants if len(self.at) == len(told.wants) else told.wants[self.at]
        fits = np.array_equal(wants, self.wants)
        for kind, found in told.columns.items():
            fits = fits and (not len(found.ids) or found.ids.shape[1] >= self.tops[kind])
        for i in self.by_host:
            extra = told.sets.get(i)
            fits = fits and (not told.table[i, NUM_OUT] or (extra is not None and extra.logprobs is not None))
        if not fits:
            raise FrameError("it tells other logprobs than those that were asked for")


def results_of(
    told: Told,
    guests: Guests,
    sources: tuple[str, ...],
    refused: dict[str, RequestError | EngineClosedError],
) -> StepResults:
    """FrameError: it is none for these."""
    guests.check(told)
    table, source, extras = told.table, told.source, told.sets
    endings = {
        i: Finish(REASONS[end.status], end.stop, end.text)
        for i, end in told.ends.items()
        if end.status in REASONS
    }
    for i in guests.asking:  # they are told of a step without drafts too
        if table[i, NUM_OUT] or i in endings:
            extra = extras.setdefault(i, HostLogprobs())
            extra.drafts = extra.drafts or []
    at = guests.at
    if len(at) < len(guests.handles):
        place = {b: i for i, b in enumerate(at)}
        table, source = table[at], None if source is None else source[at]
        endings = {place[i]: ending for i, ending in endings.items() if i in place}
        extras = {place[i]: extra for i, extra in extras.items() if i in place}
    return StepResults(guests.here, table, told.columns, sources, source, endings, extras, refused)


def _table(header: Header, columns: Mapping[str, NDArray[Any]]) -> tuple[Ints, Ints, Ints]:
    """And of every token whose it is and which of its step's."""
    out, wants = columns["num_out"].astype(np.int64), columns["wants"]
    table = np.zeros((header.requests, TOKENS + header.max_drafts + 1), np.int64)
    table[:, NUM_OUT] = out
    table[:, NUM_DRAFT] = columns["num_draft"]
    table[:, NUM_ACCEPTED] = columns["num_accepted"]
    for kind, _ in BLOCKS:
        mine = wants == kind
        if mine.any():
            rows = np.where(mine, out, 0)
            table[:, PICK] += np.where(mine, np.cumsum(rows) - rows, 0)
    owner = np.repeat(np.arange(header.requests), out)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(out) - out, out)
    table[owner, TOKENS + place] = columns["token"]
    return table, owner, place


def _blocks(header: Header, columns: Mapping[str, NDArray[Any]]) -> dict[LogprobKind, LogprobColumns]:
    found = {}
    for kind, name in BLOCKS:
        rows, width = getattr(header, f"{name}_rows"), getattr(header, f"{name}_columns")
        if width:
            found[kind] = LogprobColumns(
                columns[f"{name}_value"].reshape(rows, width),
                columns[f"{name}_id"].reshape(rows, width - 1).astype(np.int64),
                columns[f"{name}_rank"].astype(np.int64),
            )
    return found


def _read_ends(columns: Mapping[str, NDArray[Any]]) -> dict[int, End]:
    text, at = columns["text"].tobytes(), 0
    lists = [columns["status"][columns["end_entry"]].tolist(), columns["end_entry"].tolist()]
    lists += [
        columns[f"end_{what}{name}"].tolist() for name in ("stop", "text", "param") for what in ("has_", "")
    ]
    ends = {}
    for status, entry, has_stop, stop, has_text, size, has_param, more in zip(*lists, strict=True):
        try:
            words, param = text[at : at + size].decode(), text[at + size : at + size + more].decode()
        except UnicodeDecodeError as error:
            raise FrameError(f"its text is no UTF-8: {error}") from error
        at += size + more
        ends[entry] = End(
            Status(status),
            stop if has_stop else None,
            words if has_text else None,
            param if has_param else None,
        )
    return ends


def _read_counted(columns: Mapping[str, NDArray[Any]]) -> list[tuple[int, RequestStats]]:
    names = ("entry", "cached", "preempted", "has_seated", "seated", "has_spoke", "spoke")
    found = []
    for line in zip(*(columns[f"counted_{name}"].tolist() for name in names), strict=True):
        entry, cached, preempted, has_seated, seated, has_spoke, spoke = line
        times = {"seated": seated if has_seated else None, "spoke": spoke if has_spoke else None}
        found.append((entry, RequestStats(cached, preempted, 0.0, **times)))
    return found


def _read_sets(columns: Mapping[str, NDArray[Any]], extras: dict[int, HostLogprobs]) -> None:
    cells = [columns[f"cell_{name}"].tolist() for name in ("id", "value", "rank")]
    widths, first, row = columns["row_width"].tolist(), 0, 0
    lists = (columns[f"set_{name}"].tolist() for name in ("entry", "kind", "length"))
    for entry, kind, length in zip(*lists, strict=True):
        rows = []
        for width in widths[row : row + length]:
            rows.append(LogprobRow(*(cell[first : first + width] for cell in cells)))
            first += width
        row += length
        extra = extras.setdefault(entry, HostLogprobs())
        if kind == SetKind.PROMPT:
            extra.prompt_logprobs = rows
        else:
            extra.logprobs = rows


def _read_drafts(
    columns: Mapping[str, NDArray[Any]], extras: dict[int, HostLogprobs], sources: Sequence[str]
) -> None:
    names = ("entry", "token", "position", "source", "accepted", "has_own", "own", "has_target", "target")
    for line in zip(*(columns[f"draft_{name}"].tolist() for name in names), strict=True):
        entry, token, position, source, accepted, has_own, own, has_target, target = line
        extra = extras.setdefault(entry, HostLogprobs())
        extra.drafts = extra.drafts or []
        extra.drafts.append(
            DraftRecord(
                token_id=token,
                position=position,
                source=sources[source],
                accepted=bool(accepted),
                draft_logprob=own if has_own else None,
                target_logprob=target if has_target else None,
            )
        )
