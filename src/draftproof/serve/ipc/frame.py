"""The frame: what a step did for the requests of one server process, as bytes.

A header of typed fields, then the columns of `COLUMNS`, one behind the other, each padded to eight bytes.
There are as many of each as the header says and not one more: no largest batch, no sentinels, nothing packed
into the bits of something else. What it says must add up to the bytes that are there, a checksum covers
them all, and every column is held against the others before anything is believed. Whatever is wrong is a
FrameError that says what: there is no such thing as a part of a frame.

Numbers are little-endian. A change of this file's format is a change of VERSION; tests pin the bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftproof.types import LogprobKind

MAGIC = b"DPRF"
VERSION = 1
Columns = Mapping[str, NDArray[Any]]


class FrameError(ValueError):
    """These bytes are no frame."""


class Status(IntEnum):
    """How a request stands after this frame. Read before anything else of it."""

    RUNS = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3
    REFUSED = 4  # from here on: it was never let in. There is something wrong with it,
    FULL = 5  # or too many wait,
    CLOSED = 6  # or nothing is taken in at the moment


class Header(NamedTuple):
    """`size` and the counts are filled in by `pack`."""

    max_drafts: int  # that a step verifies: the most of num_draft
    sequence: int  # frames that went to this server before
    num_steps: int  # of the engine, so far
    step_seconds: float  # that this one took; 0: this frame tells no step
    busy_seconds: float  # that all took
    num_running: int  # metrics.EngineStats, from here on
    num_waiting: int
    num_preemptions: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_pages: int
    num_used_pages: int
    num_cached_pages: int
    requests: int = 0  # counts, from here on: n
    tokens: int = 0
    sourced: int = 0  # accepted drafts whose source is told
    raw_rows: int = 0
    raw_columns: int = 0  # the token's own and the best of it; 0: nobody asked
    processed_rows: int = 0
    processed_columns: int = 0
    ends: int = 0
    counted: int = 0
    sets: int = 0
    set_rows: int = 0
    set_cells: int = 0
    drafts: int = 0
    text_bytes: int = 0


# magic, checksum of all that follows, version, kind, then the header with the size behind its first field
HEAD = struct.Struct("<4sIHHIQQQdd8Q14I")
CHECKED = 8  # where what the checksum covers begins
KIND = 1  # of frame; there is no other yet

U1, U2, U4, U8 = (np.dtype(f"<u{size}") for size in (1, 2, 4, 8))
F4, F8 = np.dtype("<f4"), np.dtype("<f8")
# name, type, and the count it has (a field of the header, or of `_counts`)
COLUMNS: tuple[tuple[str, np.dtype[Any], str], ...] = (
    ("status", U1, "requests"),  # a Status
    ("handle", U8, "requests"),  # by which the server knows the request
    ("num_out", U2, "requests"),  # tokens committed
    ("num_draft", U2, "requests"),  # drafts verified
    ("num_accepted", U2, "requests"),  # drafts that stood; they come first among the tokens
    ("wants", U1, "requests"),  # a types.LogprobKind: which block its tokens have a row in
    ("token", U4, "tokens"),  # of all requests, in their order
    ("source", U1, "sourced"),  # of each accepted draft who proposed it, where there are several who may
    ("raw_value", F4, "raw_values"),  # [raw_rows, raw_columns] logprobs
    ("raw_id", U4, "raw_ids"),  # [raw_rows, raw_columns - 1] of the best
    ("raw_rank", U4, "raw_rows"),  # of the token itself
    ("processed_value", F4, "processed_values"),
    ("processed_id", U4, "processed_ids"),
    ("processed_rank", U4, "processed_rows"),
    ("end_entry", U4, "ends"),  # those whose status is not RUNS, in order
    ("end_has_stop", U1, "ends"),
    ("end_stop", U4, "ends"),  # the stop token
    ("end_has_text", U1, "ends"),
    ("end_text", U4, "ends"),  # bytes of `text`: what was wrong
    ("end_has_param", U1, "ends"),
    ("end_param", U4, "ends"),  # bytes of `text` behind that: the option at fault
    ("counted_entry", U4, "counted"),  # whose metrics.RequestStats are new
    ("counted_cached", U4, "counted"),
    ("counted_preempted", U4, "counted"),
    ("counted_has_seated", U1, "counted"),
    ("counted_seated", F8, "counted"),  # by the machine's clock, `time.monotonic`
    ("counted_has_spoke", U1, "counted"),
    ("counted_spoke", F8, "counted"),
    ("set_entry", U4, "sets"),  # rows of logprobs that are not in a block: whose,
    ("set_kind", U1, "sets"),  # a SetKind,
    ("set_length", U4, "sets"),  # how many
    ("row_width", U4, "set_rows"),
    ("cell_id", U4, "set_cells"),
    ("cell_rank", U4, "set_cells"),
    ("cell_value", F8, "set_cells"),
    ("draft_entry", U4, "drafts"),  # every draft of those who asked, in order
    ("draft_token", U4, "drafts"),
    ("draft_position", U4, "drafts"),
    ("draft_source", U1, "drafts"),
    ("draft_accepted", U1, "drafts"),
    ("draft_has_own", U1, "drafts"),
    ("draft_own", F8, "drafts"),
    ("draft_has_target", U1, "drafts"),
    ("draft_target", F8, "drafts"),
    ("text", U1, "text_bytes"),  # UTF-8
)
_NOTHING = {name: np.zeros(0, dtype) for name, dtype, _ in COLUMNS}
_PADDING = [b"\0" * (-i % 8) for i in range(8)]


# the blocks of logprobs
BLOCKS = ((LogprobKind.RAW, "raw"), (LogprobKind.PROCESSED, "processed"))


class SetKind(IntEnum):
    TOKENS = 0  # logprobs of committed tokens that the host read
    PROMPT = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the receiver knows of the engine beforehand."""

    vocab_size: int
    max_drafts: int
    num_sources: int


def _counts(header: Header) -> dict[str, int]:
    counts = header._asdict()
    for kind in ("raw", "processed"):
        rows, columns = counts[f"{kind}_rows"], counts[f"{kind}_columns"]
        counts[f"{kind}_values"] = rows * columns
        counts[f"{kind}_ids"] = rows * max(columns - 1, 0)
    return counts


# --- out --------------------------------------------------------------------------------------------------


def pack(header: Header, columns: Columns) -> bytes:
    """`header` with its counts. A column that is not given is empty."""
    counts = _counts(header)
    parts: list[bytes] = [b""]
    for name, dtype, count in COLUMNS:
        number = counts[count]
        if not number:
            continue
        column = columns[name]
        assert column.size == number, f"{name}: {column.size} and not {number}"
        part = column.astype(dtype, copy=False).tobytes()
        parts.append(part)
        if len(part) % 8:
            parts.append(_PADDING[len(part) % 8])
    size = HEAD.size + sum(map(len, parts))
    drafts, *fields = header
    head = HEAD.pack(MAGIC, 0, VERSION, KIND, drafts, size, *fields)
    parts[0] = head[CHECKED:]
    rest = b"".join(parts)
    return MAGIC + zlib.crc32(rest).to_bytes(4, "little") + rest


# --- in ---------------------------------------------------------------------------------------------------


def unpack(data: bytes, bounds: Bounds) -> tuple[Header, dict[str, NDArray[Any]]]:
    """The header and every column, read-only views of `data`; FrameError if anything is not as it must be."""
    header = _head(data)
    counts = _counts(header)
    found = dict(_NOTHING)
    at = HEAD.size
    for name, dtype, count in COLUMNS:
        number = counts[count]
        if not number:
            continue
        end = at + number * dtype.itemsize
        if end > len(data):
            raise FrameError(f"the column {name} of {number} is beyond the end")
        found[name] = np.frombuffer(data, dtype, number, at)
        at = end + -end % 8
    if at != len(data):
        raise FrameError(f"{len(data) - at} bytes are left over")
    _check_requests(header, found, bounds)
    _check_tokens(header, found, bounds)
    if header.ends or found["status"].any():
        _check_ends(header, found, bounds)
    if header.counted:
        _check_counted(header, found)
    if header.sets or header.set_rows or header.set_cells:
        _check_sets(header, found, bounds)
    if header.drafts:
        _check_drafts(header, found, bounds)
    return header, found


def _head(data: bytes) -> Header:
    if len(data) < HEAD.size:
        raise FrameError(f"{len(data)} bytes are less than a header")
    magic, checksum, version, kind, drafts, size, *fields = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"it begins with {magic!r}")
    if version != VERSION:
        raise FrameError(f"it is of version {version}, and this is version {VERSION}")
    if size != len(data):
        raise FrameError(f"it says that it has {size} bytes and has {len(data)}")
    if zlib.crc32(memoryview(data)[CHECKED:]) != checksum:
        raise FrameError("its checksum is wrong")
    if kind != KIND:
        raise FrameError(f"it is of the unknown kind {kind}")
    header = Header(drafts, *fields)
    for name in ("step_seconds", "busy_seconds"):
        value = getattr(header, name)
        if not (math.isfinite(value) and value >= 0):
            raise FrameError(f"{name} is {value}")
    return header


def _need(true: Any, otherwise: str) -> None:
    if not true:
        raise FrameError(otherwise)


def _check_below(name: str, found: Columns, limit: int) -> None:
    column = found[name]
    if len(column) and int(column.max()) >= limit:
        raise FrameError(f"{name} holds {int(column.max())}, and {limit - 1} is the largest")


def _check_requests(header: Header, found: Columns, bounds: Bounds) -> None:
    _need(header.max_drafts == bounds.max_drafts, f"it is of an engine with {header.max_drafts} drafts")
    if not header.requests:
        return
    _check_below("status", found, len(Status))
    _check_below("wants", found, len(LogprobKind))
    _check_below("num_draft", found, bounds.max_drafts + 1)
    _check_below("num_out", found, bounds.max_drafts + 2)
    accepted, out = found["num_accepted"], found["num_out"]
    _need((accepted <= found["num_draft"]).all(), "more drafts stood than there were")
    _need((accepted <= out).all(), "more drafts stood than tokens were committed")


def _check_tokens(header: Header, found: Columns, bounds: Bounds) -> None:
    out, wants = found["num_out"], found["wants"]
    total = int(out.sum())
    _need(total == header.tokens, f"{header.tokens} tokens, and the requests have {total}")
    _check_below("token", found, bounds.vocab_size)
    told = int(found["num_accepted"].sum()) if bounds.num_sources > 1 else 0
    _need(header.sourced == told, f"{header.sourced} drafts have a source, and {told} should")
    _check_below("source", found, bounds.num_sources)
    for kind, name in BLOCKS:
        rows, columns = getattr(header, f"{name}_rows"), getattr(header, f"{name}_columns")
        if not rows and not columns and not (wants == kind).any():
            continue
        wanted = int(out[wants == kind].sum())
        _need(rows == wanted, f"{rows} rows of {name} logprobs, and {wanted} tokens have one")
        _need(columns or not rows, f"{rows} rows of {name} logprobs have no columns")
        _need(columns <= bounds.vocab_size + 1, f"{columns} columns of {name} logprobs")
        _check_below(f"{name}_id", found, bounds.vocab_size)
        _check_below(f"{name}_rank", found, bounds.vocab_size + 1)


def _check_ends(header: Header, found: Columns, bounds: Bounds) -> None:
    status = found["status"]
    _need(np.array_equal(found["end_entry"], status.nonzero()[0]), "the ends are not those of the statuses")
    out = status >= Status.REFUSED
    if out.any():
        _need(not found["num_out"][out].any(), "a request that was refused has tokens")
        _need(not found["num_draft"][out].any(), "a request that was refused has drafts")
        _need(not found["wants"][out].any(), "a request that was refused has logprobs")
    for name in ("stop", "text", "param"):
        has, value = found[f"end_has_{name}"], found[f"end_{name}"]
        _check_below(f"end_has_{name}", found, 2)
        _need(not value[has == 0].any(), f"end_{name} is given where there is none")
    _check_below("end_stop", found, bounds.vocab_size)
    stops = found["end_has_stop"] > 0
    _need((status[found["end_entry"]][stops] == Status.STOP).all(), "one has a stop token and did not stop")
    size = int(found["end_text"].sum(dtype=np.uint64)) + int(found["end_param"].sum(dtype=np.uint64))
    _need(size == header.text_bytes, f"{header.text_bytes} bytes of text, and the ends have {size}")


def _check_counted(header: Header, found: Columns) -> None:
    _check_below("counted_entry", found, header.requests)
    _need((np.diff(found["counted_entry"].astype(np.int64)) > 0).all(), "counted_entry is not in order")
    for name in ("seated", "spoke"):
        _check_below(f"counted_has_{name}", found, 2)
        _need(np.isfinite(found[f"counted_{name}"]).all(), f"counted_{name} is no time")


def _check_sets(header: Header, found: Columns, bounds: Bounds) -> None:
    _check_below("set_entry", found, header.requests)
    _check_below("set_kind", found, len(SetKind))
    keys = found["set_entry"].astype(np.int64) * len(SetKind) + found["set_kind"]
    _need((np.diff(keys) > 0).all(), "the sets of rows are not in order")
    rows = int(found["set_length"].sum(dtype=np.uint64))
    _need(rows == header.set_rows, f"{header.set_rows} rows, and the sets have {rows}")
    cells = int(found["row_width"].sum(dtype=np.uint64))
    _need(cells == header.set_cells, f"{header.set_cells} cells, and the rows have {cells}")
    own = found["set_kind"] == SetKind.TOKENS
    out = found["num_out"][found["set_entry"][own]]
    _need(np.array_equal(found["set_length"][own], out), "a set has not as many rows as there are tokens")
    _check_below("cell_id", found, bounds.vocab_size)
    _check_below("cell_rank", found, bounds.vocab_size + 1)


def _check_drafts(header: Header, found: Columns, bounds: Bounds) -> None:
    _check_below("draft_entry", found, header.requests)
    _need((np.diff(found["draft_entry"].astype(np.int64)) >= 0).all(), "the drafts are not in order")
    counts = np.bincount(found["draft_entry"], minlength=header.requests)
    _need(((counts == 0) | (counts == found["num_draft"])).all(), "not every draft of a request is told")
    _check_below("draft_token", found, bounds.vocab_size)
    _check_below("draft_source", found, bounds.num_sources)
    for name in ("accepted", "has_own", "has_target"):
        _check_below(f"draft_{name}", found, 2)
