"""From a step's results to the columns of a frame, for the requests of one server process. The worker's side.

All requests at once: only those that ended, came, or asked for something rare are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.engine.step.step_results import Finish, HostLogprobs, StepResults
from draftproof.metrics import EngineStats, RequestStats
from draftproof.serve.ipc.frame import BLOCKS, Header, SetKind, Status, pack
from draftproof.types import (
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    DraftRecord,
    LogprobKind,
    LogprobRow,
)

REASONS = {"stop": Status.STOP, "length": Status.LENGTH, "error": Status.ERROR}
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Of a job, by the handle of its first request."""

    handle: int
    status: Status
    text: str
    param: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Party:
    """Those of a step's requests that one server asked for, for as long as they stay the same."""

    at: NDArray[np.int64] | None  # where in the step's results; None: all of them
    handles: NDArray[np.uint64]  # [n]
    wants: NDArray[np.uint8]  # [n]
    tops: dict[LogprobKind, int]  # the most of the best that one of them asked for, by the kind of logprobs

    @classmethod
    def of(cls, at: Sequence[int] | None, asked: Sequence[tuple[int, LogprobKind, int]]) -> Party:
        """`asked`: handle, kind of logprobs, and how many of the best."""
        tops: dict[LogprobKind, int] = {}
        for _, kind, top in asked:
            if kind is not LogprobKind.NONE:
                tops[kind] = max(top, tops.get(kind, 0))
        handles = np.array([handle for handle, *_ in asked], np.uint64)
        kinds = np.array([kind for _, kind, _ in asked], np.uint8)
        return cls(None if at is None else np.array(at, np.int64), handles, kinds, tops)


@dataclass(frozen=True, slots=True)
class Standing:
    """What every frame says of the engine as a whole."""

    max_drafts: int
    num_steps: int
    step_seconds: float
    busy_seconds: float
    stats: EngineStats

    def header(self, sequence: int, **counts: int) -> Header:
        stats = self.stats
        return Header(
            self.max_drafts,
            sequence,
            self.num_steps,
            self.step_seconds,
            self.busy_seconds,
            stats.num_running,
            stats.num_waiting,
            stats.num_preemptions,
            stats.num_queried_tokens,
            stats.num_cached_tokens,
            stats.num_pages,
            stats.num_used_pages,
            stats.num_cached_pages,
            **counts,
        )


def frame_of(
    sequence: int,
    standing: Standing,
    results: StepResults,
    party: Party,
    counted: Iterable[tuple[int, RequestStats]] = (),
) -> bytes:
    """`counted`: whose counts are new, by their place in the party, in order."""
    table = results.table if party.at is None else results.table[party.at]
    out = table[:, NUM_OUT]
    size = len(party.handles)
    # one entry a token: whose it is and which of its step's
    owner = np.repeat(np.arange(size), out)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(out) - out, out)
    columns: Arrays = {
        "status": np.zeros(size, np.uint8),
        "handle": party.handles,
        "num_out": out,
        "num_draft": table[:, NUM_DRAFT],
        "num_accepted": table[:, NUM_ACCEPTED],
        "wants": party.wants,
        "token": table[owner, TOKENS + place],
    }
    counts = {"requests": size, "tokens": len(owner)}
    if results.source is not None:
        mine = results.source if party.at is None else results.source[party.at]
        stood = place < table[owner, NUM_ACCEPTED]
        columns["source"] = mine[owner[stood], place[stood]]
        counts["sourced"] = len(columns["source"])
    if party.tops:
        _add_blocks(columns, counts, results, party, owner, table[owner, PICK] + place)
    if results.finishes or results.host_logprobs:
        places = None if party.at is None else {b: i for i, b in enumerate(party.at.tolist())}
        ends = _mine(results.finishes, places)
        if ends:
            for i, ending in ends.items():
                columns["status"][i] = REASONS[ending.reason]
            _add_ends(columns, counts, [(i, *_words(ends[i])) for i in sorted(ends)])
        _add_extras(columns, counts, _mine(results.host_logprobs, places), results.sources)
    _add_counted(columns, counts, list(counted))
    return pack(standing.header(sequence, **counts), columns)


def refusal_frame(sequence: int, standing: Standing, refusals: Sequence[Refusal]) -> bytes:
    """A frame that tells no step: who was not let in, and why. It may be of nobody."""
    size = len(refusals)
    counts = {"requests": size}
    none = np.zeros(size, np.uint8)
    columns: Arrays = {
        "status": np.array([refusal.status for refusal in refusals], np.uint8),
        "handle": np.array([refusal.handle for refusal in refusals], np.uint64),
        **dict.fromkeys(("num_out", "num_draft", "num_accepted", "wants"), none),
    }
    if refusals:
        _add_ends(columns, counts, [(i, None, each.text, each.param) for i, each in enumerate(refusals)])
    return pack(standing.header(sequence, **counts), columns)


def _mine(all_of_them: dict[int, Any], places: dict[int, int] | None) -> dict[int, Any]:
    if places is None:
        return all_of_them
    return {places[b]: value for b, value in all_of_them.items() if b in places}


def _words(ending: Finish) -> tuple[int | None, str | None, str | None]:
    return ending.stop, ending.error, None


def _add_blocks(
    columns: Arrays,
    counts: dict[str, int],
    results: StepResults,
    party: Party,
    owner: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    for kind, name in BLOCKS:
        if kind not in party.tops:
            continue
        mine = party.wants[owner] == kind
        at: Any = rows if mine.all() else rows[mine]
        counts[f"{name}_rows"] = len(at)
        found = results.columns.get(kind)
        if found is None:
            assert not len(at)
            counts[f"{name}_columns"] = 1
            continue
        if len(at) and (np.diff(at) == 1).all():  # mostly they lie one behind the other: nothing is gathered
            at = slice(int(at[0]), int(at[-1]) + 1)
        top = min(party.tops[kind], found.ids.shape[1])
        counts[f"{name}_columns"] = 1 + top
        columns[f"{name}_value"] = found.values[at, : 1 + top]
        columns[f"{name}_id"] = found.ids[at, :top]
        columns[f"{name}_rank"] = found.ranks[at]


def _add_counted(columns: Arrays, counts: dict[str, int], counted: list[tuple[int, RequestStats]]) -> None:
    if not counted:
        return
    counts["counted"] = len(counted)
    columns["counted_entry"] = np.array([i for i, _ in counted], np.uint32)
    columns["counted_cached"] = np.array([stats.num_cached_tokens for _, stats in counted], np.uint32)
    columns["counted_preempted"] = np.array([stats.num_preemptions for _, stats in counted], np.uint32)
    for name in ("seated", "spoke"):
        times = [getattr(stats, name) for _, stats in counted]
        columns[f"counted_has_{name}"] = np.array([time is not None for time in times], np.uint8)
        columns[f"counted_{name}"] = np.array([time or 0.0 for time in times], np.float64)


def _add_ends(
    columns: Arrays, counts: dict[str, int], ends: list[tuple[int, int | None, str | None, str | None]]
) -> None:
    """Entry, stop token, what was wrong, the option at fault."""
    texts = [[(piece or "").encode(errors="replace") for piece in words] for _, _, *words in ends]
    columns["end_entry"] = np.array([end[0] for end in ends], np.uint32)
    for k, name in enumerate(("stop", "text", "param"), start=1):
        columns[f"end_has_{name}"] = np.array([end[k] is not None for end in ends], np.uint8)
    columns["end_stop"] = np.array([end[1] or 0 for end in ends], np.uint32)
    columns["end_text"] = np.array([len(text) for text, _ in texts], np.uint32)
    columns["end_param"] = np.array([len(param) for _, param in texts], np.uint32)
    columns["text"] = np.frombuffer(b"".join(chain.from_iterable(texts)), np.uint8)
    counts.update(ends=len(ends), text_bytes=len(columns["text"]))


def _add_extras(
    columns: Arrays, counts: dict[str, int], extras: dict[int, HostLogprobs], sources: Sequence[str]
) -> None:
    sets: list[tuple[int, SetKind, list[LogprobRow]]] = []
    drafts: list[tuple[int, DraftRecord]] = []
    for i in sorted(extras):
        extra = extras[i]
        if extra.logprobs is not None:
            sets.append((i, SetKind.TOKENS, extra.logprobs))
        if extra.prompt_logprobs is not None:
            sets.append((i, SetKind.PROMPT, extra.prompt_logprobs))
        drafts += [(i, record) for record in extra.drafts or ()]
    if sets:
        _add_sets(columns, counts, sets)
    if drafts:
        _add_drafts(columns, counts, drafts, sources)


def _add_sets(
    columns: Arrays, counts: dict[str, int], sets: list[tuple[int, SetKind, list[LogprobRow]]]
) -> None:
    rows = [row for _, _, some in sets for row in some]
    widths = [len(row.token_ids) for row in rows]
    cells = sum(widths)
    columns["set_entry"] = np.array([i for i, _, _ in sets], np.uint32)
    columns["set_kind"] = np.array([kind for _, kind, _ in sets], np.uint8)
    columns["set_length"] = np.array([len(some) for _, _, some in sets], np.uint32)
    columns["row_width"] = np.array(widths, np.uint32)
    each = chain.from_iterable
    columns["cell_id"] = np.fromiter(each(row.token_ids for row in rows), np.uint32, cells)
    columns["cell_rank"] = np.fromiter(each(row.ranks for row in rows), np.uint32, cells)
    columns["cell_value"] = np.fromiter(each(row.logprobs for row in rows), np.float64, cells)
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
    for name in ("own", "target"):
        values = [record.draft_logprob if name == "own" else record.target_logprob for record in records]
        columns[f"draft_has_{name}"] = np.array([value is not None for value in values], np.uint8)
        columns[f"draft_{name}"] = np.array([0.0 if value is None else value for value in values], np.float64)
    counts["drafts"] = len(drafts)
