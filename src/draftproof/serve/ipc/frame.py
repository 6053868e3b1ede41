"""Binary frame that carries the results of one step to one HTTP process.

Layout: a header of typed fields, then the columns of `COLUMNS`, each padded to eight bytes. The header gives
the number of entries of every column, so there is no maximum batch size, no sentinel and no bit packing.
The stated size must equal the number of bytes, a checksum covers all of them, and every column is checked
against the others before any of them is used. A violation raises FrameError; a frame is never used in part.

Numbers are little-endian. A change of the format needs a new VERSION; tests pin the bytes.
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

from draftproof.engine.step.step_results import MAX_DEVICE_TOP
from draftproof.outputs import FinishReason
from draftproof.types import MAX_NAMED_IDS, LogprobKind

MAGIC = b"DPRF"
VERSION = 6
Columns = Mapping[str, NDArray[Any]]


class FrameError(ValueError):
    """Received bytes that are not a valid frame."""


class RequestStatus(IntEnum):
    """State of a request after a frame. Values from INVALID on: the request was not admitted."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3
    INVALID = 4
    QUEUE_FULL = 5
    CLOSED = 6  # the engine is draining and admits no requests

    @property
    def is_admission_failure(self) -> bool:
        """Return True for a request that the engine did not admit."""
        return self >= RequestStatus.INVALID


# finish reasons of the engine and their status in a frame
STATUS_BY_REASON: dict[FinishReason, RequestStatus] = {
    "stop": RequestStatus.STOP,
    "length": RequestStatus.LENGTH,
    "error": RequestStatus.ERROR,
}
REASON_BY_STATUS = {status: reason for reason, status in STATUS_BY_REASON.items()}


class Header(NamedTuple):
    """Header fields of a frame. `pack` adds the size."""

    max_drafts: int  # upper bound of num_draft
    sequence: int  # number of frames sent to this HTTP process before
    num_steps: int  # steps of the engine so far
    step_seconds: float  # duration of this step; 0: the frame carries no step
    busy_seconds: float  # duration of all steps
    num_running: int  # from here to sleep_level: STATS_FIELDS
    num_waiting: int
    num_preemptions: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_pages: int
    num_used_pages: int
    num_cached_pages: int
    weights_version: int
    sleep_level: int
    requests: int = 0  # from here on: number of entries, named in COLUMNS
    tokens: int = 0
    draft_sources: int = 0  # drafts; 0: all are of the first source
    raw_rows: int = 0
    raw_columns: int = 0  # the token itself and the top tokens; 0: not requested
    raw_named: int = 0  # named ids, as many as the request with most has
    processed_rows: int = 0
    processed_columns: int = 0
    processed_named: int = 0
    finishes: int = 0
    stats: int = 0
    sets: int = 0
    set_rows: int = 0
    set_cells: int = 0
    drafts: int = 0
    draft_tops: int = 0  # likeliest tokens of the drafter
    embeddings: int = 0
    embedding_size: int = 0  # hidden size of the model; 0: no embeddings
    text_bytes: int = 0


STATS_FIELDS = slice(5, 15)  # fields of the header that are fields of metrics.EngineStats
# magic, checksum of all that follows, version, kind, then the header with the size after its first field
HEADER_STRUCT = struct.Struct("<4sIHHIQQQdd10Q19I4x")
CHECKSUM_START_BYTE = 8  # offset of the first byte that the checksum covers
FRAME_KIND = 1  # the only kind so far

U1, U2, U4, U8 = (np.dtype(f"<u{size}") for size in (1, 2, 4, 8))
F4, F8 = np.dtype("<f4"), np.dtype("<f8")
# name, type, and number of entries (a field of the header, or of `_counts`)
COLUMNS: tuple[tuple[str, np.dtype[Any], str], ...] = (
    ("status", U1, "requests"),  # RequestStatus
    ("handle", U8, "requests"),  # identifies the request in its HTTP process
    ("num_out", U2, "requests"),  # tokens committed
    ("num_draft", U2, "requests"),  # drafts verified
    ("num_accepted", U2, "requests"),  # accepted drafts; they come first among the tokens
    ("logprob_kind", U1, "requests"),  # types.LogprobKind: the block that has a row per token of it
    ("token", U4, "tokens"),  # of all requests, in their order
    ("source", U1, "draft_sources"),  # source of each draft, if there are several
    ("raw_value", F4, "raw_values"),  # [raw_rows, raw_columns] logprobs
    ("raw_id", U4, "raw_ids"),  # [raw_rows, raw_columns - 1] top tokens
    ("raw_rank", U4, "raw_rows"),  # rank of the token itself
    ("raw_named_value", F4, "raw_named_values"),  # [raw_rows, raw_named] logprobs of named ids
    ("raw_named_rank", U4, "raw_named_values"),
    ("processed_value", F4, "processed_values"),
    ("processed_id", U4, "processed_ids"),
    ("processed_rank", U4, "processed_rows"),
    ("processed_named_value", F4, "processed_named_values"),
    ("processed_named_rank", U4, "processed_named_values"),
    ("finish_entry", U4, "finishes"),  # indices of the requests that are not RUNNING, ascending
    ("finish_has_stop_token", U1, "finishes"),
    ("finish_stop_token", U4, "finishes"),
    ("finish_has_message", U1, "finishes"),
    ("finish_message", U4, "finishes"),  # length in bytes, in `text`: the error message
    ("finish_has_param", U1, "finishes"),
    ("finish_param", U4, "finishes"),  # length in bytes, in `text` after the message: the invalid option
    ("stats_entry", U4, "stats"),  # indices of the requests with new metrics.RequestStats, ascending
    ("stats_cached", U4, "stats"),
    ("stats_preempted", U4, "stats"),
    ("stats_has_scheduled", U1, "stats"),
    ("stats_scheduled", F8, "stats"),  # seconds of `time.monotonic`
    ("stats_has_first_token", U1, "stats"),
    ("stats_first_token", F8, "stats"),
    ("set_entry", U4, "sets"),  # logprob rows outside the blocks: index of the request
    ("set_kind", U1, "sets"),  # RowSetKind
    ("set_length", U4, "sets"),  # number of rows
    ("row_width", U4, "set_rows"),
    ("cell_id", U4, "set_cells"),
    ("cell_rank", U4, "set_cells"),
    ("cell_value", F8, "set_cells"),
    ("draft_entry", U4, "drafts"),  # all drafts of requests with include_draft_logprobs, ascending
    ("draft_token", U4, "drafts"),
    ("draft_position", U4, "drafts"),
    ("draft_source", U1, "drafts"),
    ("draft_accepted", U1, "drafts"),
    ("draft_draft_logprob", F4, "drafts"),  # NaN: the drafter reported none
    ("draft_target_logprob", F4, "drafts"),
    ("draft_rank", U4, "drafts"),  # in the drafter's distribution; 0: none
    ("draft_top_width", U4, "drafts"),
    ("draft_top_id", U4, "draft_tops"),  # likeliest tokens of the drafter, of all drafts
    ("draft_top_value", F4, "draft_tops"),
    ("embedding_entry", U4, "embeddings"),  # indices of the requests with an embedding, ascending
    ("embedding_value", F4, "embedding_values"),  # [embeddings, embedding_size]
    ("text", U1, "text_bytes"),  # UTF-8
)
_EMPTY_COLUMNS = {name: np.zeros(0, dtype) for name, dtype, _ in COLUMNS}
_PADDING = [b"\0" * (-i % 8) for i in range(8)]


# blocks of logprobs and the prefix of their columns
LOGPROB_BLOCKS = ((LogprobKind.RAW, "raw"), (LogprobKind.PROCESSED, "processed"))


class RowSetKind(IntEnum):
    """Kind of a set of logprob rows."""

    TOKENS = 0  # logprobs of committed tokens, lists longer than a block holds
    PROMPT = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the engine that the receiver checks a frame against."""

    vocab_size: int
    max_drafts: int
    num_sources: int


def _counts(header: Header) -> dict[str, int]:
    """Return the number of entries by name: the header fields and those derived from them."""
    counts = header._asdict()
    for kind in ("raw", "processed"):
        rows, columns = counts[f"{kind}_rows"], counts[f"{kind}_columns"]
        counts[f"{kind}_values"] = rows * columns
        counts[f"{kind}_ids"] = rows * max(columns - 1, 0)
        counts[f"{kind}_named_values"] = rows * counts[f"{kind}_named"]
    counts["embedding_values"] = header.embeddings * header.embedding_size
    return counts


def pack(header: Header, columns: Columns) -> bytes:
    """Return the frame of `header` and `columns`. Columns with a count of 0 may be missing."""
    counts = _counts(header)
    parts: list[bytes] = [b""]
    for name, dtype, count in COLUMNS:
        number = counts[count]
        if not number:
            continue
        column = columns[name]
        assert column.size == number, f"{name}: {column.size} entries instead of {number}"
        part = column.astype(dtype, copy=False).tobytes()
        parts.append(part)
        if len(part) % 8:
            parts.append(_PADDING[len(part) % 8])
    size = HEADER_STRUCT.size + sum(map(len, parts))
    drafts, *fields = header
    head = HEADER_STRUCT.pack(MAGIC, 0, VERSION, FRAME_KIND, drafts, size, *fields)
    parts[0] = head[CHECKSUM_START_BYTE:]
    rest = b"".join(parts)
    return MAGIC + zlib.crc32(rest).to_bytes(4, "little") + rest


def unpack(data: bytes, bounds: Bounds) -> tuple[Header, dict[str, NDArray[Any]]]:
    """Return the header and every column as read-only views of `data`. Raises FrameError."""
    header = _unpack_header(data)
    counts = _counts(header)
    found = dict(_EMPTY_COLUMNS)
    at = HEADER_STRUCT.size
    for name, dtype, count in COLUMNS:
        number = counts[count]
        if not number:
            continue
        end = at + number * dtype.itemsize
        if end > len(data):
            raise FrameError(f"column {name} with {number} entries exceeds the frame")
        found[name] = np.frombuffer(data, dtype, number, at)
        at = end + -end % 8
    if at != len(data):
        raise FrameError(f"{len(data) - at} bytes after the last column")
    _check_requests(header, found, bounds)
    _check_tokens(header, found, bounds)
    if header.finishes or found["status"].any():
        _check_finishes(header, found, bounds)
    if header.stats:
        _check_stats(header, found)
    if header.sets or header.set_rows or header.set_cells:
        _check_sets(header, found, bounds)
    if header.drafts or header.draft_tops:
        _check_drafts(header, found, bounds)
    if header.embeddings or header.embedding_size:
        _check_embeddings(header, found)
    return header, found


def _unpack_header(data: bytes) -> Header:
    """Return the header after checking magic, version, size, checksum and kind."""
    if len(data) < HEADER_STRUCT.size:
        raise FrameError(f"{len(data)} bytes are shorter than a header")
    magic, checksum, version, kind, drafts, size, *fields = HEADER_STRUCT.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"wrong magic {magic!r}")
    if version != VERSION:
        raise FrameError(f"frame version {version}, expected {VERSION}")
    if size != len(data):
        raise FrameError(f"size field is {size}, received {len(data)} bytes")
    if zlib.crc32(memoryview(data)[CHECKSUM_START_BYTE:]) != checksum:
        raise FrameError("wrong checksum")
    if kind != FRAME_KIND:
        raise FrameError(f"unknown kind {kind}")
    header = Header(drafts, *fields)
    for name in ("step_seconds", "busy_seconds"):
        value = getattr(header, name)
        if not (math.isfinite(value) and value >= 0):
            raise FrameError(f"{name} is {value}")
    return header


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise FrameError(message)


def _check_below(name: str, found: Columns, limit: int) -> None:
    column = found[name]
    if len(column) and int(column.max()) >= limit:
        raise FrameError(f"{name} holds {int(column.max())}, maximum is {limit - 1}")


def _check_requests(header: Header, found: Columns, bounds: Bounds) -> None:
    drafts, expected = header.max_drafts, bounds.max_drafts
    _require(drafts == expected, f"max_drafts is {drafts}, expected {expected}")
    if not header.requests:
        return
    _check_below("status", found, len(RequestStatus))
    _check_below("logprob_kind", found, len(LogprobKind))
    _check_below("num_draft", found, bounds.max_drafts + 1)
    _check_below("num_out", found, bounds.max_drafts + 2)
    accepted, out = found["num_accepted"], found["num_out"]
    _require((accepted <= found["num_draft"]).all(), "num_accepted exceeds num_draft")
    _require((accepted <= out).all(), "num_accepted exceeds num_out")


def _check_tokens(header: Header, found: Columns, bounds: Bounds) -> None:
    """Check tokens, draft sources and logprob blocks against the columns of the requests."""
    out, kinds = found["num_out"], found["logprob_kind"]
    total = int(out.sum())
    _require(total == header.tokens, f"{header.tokens} tokens, but num_out adds up to {total}")
    _check_below("token", found, bounds.vocab_size)
    drafts = int(found["num_draft"].sum()) if bounds.num_sources > 1 else 0
    _require(header.draft_sources in (0, drafts), f"{header.draft_sources} draft sources, expected {drafts}")
    _check_below("source", found, bounds.num_sources)
    for kind, name in LOGPROB_BLOCKS:
        rows, columns = getattr(header, f"{name}_rows"), getattr(header, f"{name}_columns")
        if not rows and not columns and not (kinds == kind).any():
            continue
        expected = int(out[kinds == kind].sum())
        _require(rows == expected, f"{rows} rows of {name} logprobs, expected {expected}")
        _require(columns or not rows, f"{rows} rows of {name} logprobs have no columns")
        _require(columns <= bounds.vocab_size + 1, f"{columns} columns of {name} logprobs")
        named = getattr(header, f"{name}_named")
        _require(named <= MAX_NAMED_IDS, f"{named} named ids of {name} logprobs, maximum is {MAX_NAMED_IDS}")
        _check_below(f"{name}_named_rank", found, bounds.vocab_size + 1)
        _check_below(f"{name}_id", found, bounds.vocab_size)
        _check_below(f"{name}_rank", found, bounds.vocab_size + 1)


def _check_finishes(header: Header, found: Columns, bounds: Bounds) -> None:
    """Check the entries of requests that finished or were not admitted."""
    status = found["status"]
    entries = found["finish_entry"]
    _require(np.array_equal(entries, status.nonzero()[0]), "finish_entry does not match the statuses")
    failed = status >= RequestStatus.INVALID
    if failed.any():
        for name in ("num_out", "num_draft", "logprob_kind"):
            _require(not found[name][failed].any(), f"{name} is set for a request that was not admitted")
    for name in ("stop_token", "message", "param"):
        has, value = found[f"finish_has_{name}"], found[f"finish_{name}"]
        _check_below(f"finish_has_{name}", found, 2)
        _require(not value[has == 0].any(), f"finish_{name} is set without its flag")
    _check_below("finish_stop_token", found, bounds.vocab_size)
    stops = found["finish_has_stop_token"] > 0
    _require((status[entries][stops] == RequestStatus.STOP).all(), "stop token without status STOP")
    size = int(found["finish_message"].sum(dtype=np.uint64)) + int(found["finish_param"].sum(dtype=np.uint64))
    _require(size == header.text_bytes, f"{header.text_bytes} bytes of text, expected {size}")


def _check_stats(header: Header, found: Columns) -> None:
    _check_below("stats_entry", found, header.requests)
    _require((np.diff(found["stats_entry"].astype(np.int64)) > 0).all(), "stats_entry is not ascending")
    for name in ("scheduled", "first_token"):
        _check_below(f"stats_has_{name}", found, 2)
        _require(np.isfinite(found[f"stats_{name}"]).all(), f"stats_{name} is not finite")


def _check_sets(header: Header, found: Columns, bounds: Bounds) -> None:
    _check_below("set_entry", found, header.requests)
    _check_below("set_kind", found, len(RowSetKind))
    keys = found["set_entry"].astype(np.int64) * len(RowSetKind) + found["set_kind"]
    _require((np.diff(keys) > 0).all(), "set_entry and set_kind are not ascending")
    rows = int(found["set_length"].sum(dtype=np.uint64))
    _require(rows == header.set_rows, f"{header.set_rows} rows, but set_length adds up to {rows}")
    cells = int(found["row_width"].sum(dtype=np.uint64))
    _require(cells == header.set_cells, f"{header.set_cells} cells, but row_width adds up to {cells}")
    own = found["set_kind"] == RowSetKind.TOKENS
    out = found["num_out"][found["set_entry"][own]]
    _require(np.array_equal(found["set_length"][own], out), "set_length differs from num_out")
    _check_below("cell_id", found, bounds.vocab_size)
    _check_below("cell_rank", found, bounds.vocab_size + 1)


def _check_drafts(header: Header, found: Columns, bounds: Bounds) -> None:
    _check_below("draft_entry", found, header.requests)
    _require((np.diff(found["draft_entry"].astype(np.int64)) >= 0).all(), "draft_entry is not ascending")
    counts = np.bincount(found["draft_entry"], minlength=header.requests)
    _require(((counts == 0) | (counts == found["num_draft"])).all(), "the drafts of a request are incomplete")
    _check_below("draft_token", found, bounds.vocab_size)
    _check_below("draft_source", found, bounds.num_sources)
    _check_below("draft_accepted", found, 2)
    _check_below("draft_rank", found, bounds.vocab_size + 1)
    _check_below("draft_top_width", found, MAX_DEVICE_TOP + 1)
    tops = int(found["draft_top_width"].sum(dtype=np.uint64))
    _require(tops == header.draft_tops, f"{header.draft_tops} ids, but draft_top_width adds up to {tops}")
    _check_below("draft_top_id", found, bounds.vocab_size)


def _check_embeddings(header: Header, found: Columns) -> None:
    _require(header.embeddings and header.embedding_size, "embeddings without values, or values without one")
    _check_below("embedding_entry", found, header.requests)
    _require(
        (np.diff(found["embedding_entry"].astype(np.int64)) > 0).all(), "embedding_entry is not ascending"
    )
