"""Random steps as results and as frames, and random damage to frames."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftproof.engine.step.step_results import (
    Finish,
    HostOutput,
    LogprobColumns,
    StepResults,
    column_logprob_kind,
    has_long_logprobs,
    logprob_width_of,
)
from draftproof.metrics import EngineStats, RequestStats
from draftproof.outputs import DraftColumns, LogprobRow
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc.encode import EngineSnapshot, RequestGroup, encode_step
from draftproof.serve.ipc.frame import CHECKSUM_START_BYTE, HEADER_STRUCT, Bounds
from draftproof.types import NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, PICK, TOKENS, LogprobKind, Request

STATS = EngineStats(3, 1, 4, 1, 5, 9, 2, 6)


@dataclass
class Step:
    """Results of a step of n requests, and the handles of the requests."""

    results: StepResults
    handles: list[int]
    bounds: Bounds
    stats: dict[int, RequestStats]  # by index
    seconds: float = 0.25

    @property
    def snapshot(self) -> EngineSnapshot:
        """State of the engine in the frame."""
        return EngineSnapshot(self.bounds.max_drafts, 17, self.seconds, 4.5, STATS)

    def group(self, at: list[int] | None = None) -> RequestGroup:
        """Return the group of the requests `at`, or of all."""
        entries = []
        for i in range(len(self.handles)) if at is None else at:
            params = self.results.requests[i].params
            vocab = self.bounds.vocab_size
            kind, width = column_logprob_kind(params, vocab), logprob_width_of(params, vocab)
            entries.append((self.handles[i], kind, width))
        return RequestGroup.build(at, entries)

    def frame(self, sequence: int = 0, at: list[int] | None = None) -> bytes:
        """Encode the step for the requests `at`, or for all."""
        selected = range(len(self.handles)) if at is None else at
        new_stats = [(place, self.stats[i]) for place, i in enumerate(selected) if i in self.stats]
        return encode_step(sequence, self.snapshot, self.results, self.group(at), new_stats)

    def known(self) -> dict[int, Request]:
        """Return the requests by handle."""
        return dict(zip(self.handles, self.results.requests, strict=True))


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    """Return random logprob options."""
    kind = rng.random()
    options: dict[str, Any] = {}
    if kind < 0.6:
        options["logprobs"] = rng.choice([0, 1, 5, min(20, vocab)])
        options["logprobs_mode"] = rng.choice(["raw", "raw", "processed"])
    elif kind < 0.7:
        options["logprob_token_ids"] = rng.sample(range(vocab), min(vocab, rng.choice([1, 3, 65])))
        options["logprobs_mode"] = rng.choice(["raw", "processed"])
    if rng.random() < 0.2:
        options["include_draft_logprobs"] = True
    if rng.random() < 0.2:
        options["prompt_logprobs"] = rng.choice([0, 2])
    return SamplingParams(**options)


def random_rows(rng: random.Random, vocab: int, count: int, width: int) -> list[LogprobRow]:
    """Return `count` random logprob rows."""
    return [
        LogprobRow(
            [rng.randrange(vocab) for _ in range(width)],
            [rng.choice([-0.0, -float("inf"), -rng.random() * 9, -1e-300]) for _ in range(width)],
            [rng.randint(1, vocab) for _ in range(width)],
        )
        for _ in range(count)
    ]


def random_drafts(
    requests: list[Request],
    table: np.ndarray,
    starts: np.ndarray,
    noise: np.random.Generator,
    vocab: int,
    num_sources: int,
) -> DraftColumns | None:
    """Return random drafts of the requests that report them; None if there are none.

    As an engine does, report none where no token was committed. starts [n]: tokens of each output before the
    step.
    """
    counts = [
        int(line[NUM_DRAFT]) * (request.params.include_draft_logprobs and line[NUM_OUT] > 0)
        for request, line in zip(requests, table, strict=True)
    ]
    entry = np.repeat(np.arange(len(requests)), counts)
    place = np.concatenate([np.arange(count) for count in counts]) if counts else entry
    if not len(entry):
        return None
    rank = noise.choice([0, 1, vocab], len(entry))
    return DraftColumns(
        entry=entry,
        token=noise.integers(0, vocab, len(entry)),
        position=starts[entry] + place,
        source=noise.integers(0, num_sources, len(entry)).astype(np.int8),
        accepted=place < table[entry, NUM_ACCEPTED],
        draft_logprob=noise.choice([np.nan, -0.5, -0.0], len(entry)).astype(np.float32),
        target_logprob=noise.choice([-0.25, -0.0], len(entry)).astype(np.float32),
        rank=rank,
        top_width=np.where(rank > 0, noise.integers(0, 4, len(entry)), 0),
        top_ids=noise.integers(0, vocab, (len(entry), 8)),
        top_logprobs=noise.normal(size=(len(entry), 8)).astype(np.float32),
    )


def random_step(
    seed: int, n: int = 6, k: int = 5, vocab: int = 97, sources: tuple[str, ...] = ("one", "two")
) -> Step:
    """Return a random step of `n` requests with up to `k` drafts."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    requests = [
        Request(
            id=str(i),
            prompt_token_ids=[1],
            params=random_params(rng, vocab),
            seed=i,
            pooling=rng.choice([None, None, None, "last"]),
        )
        for i in range(n)
    ]
    sources = sources if k else ()
    table = np.zeros((n, TOKENS + k + 1), np.int64)
    endings: dict[int, Finish] = {}
    extras: dict[int, HostOutput] = {}
    picks = {LogprobKind.RAW: 0, LogprobKind.PROCESSED: 0}
    for i, request in enumerate(requests):
        params, line = request.params, table[i]
        in_prompt = rng.random() < 0.1
        extra = HostOutput()
        if params.prompt_logprobs is not None and rng.random() < 0.7:
            extra.prompt_logprobs = random_rows(rng, vocab, rng.randint(1, 4), 1 + params.prompt_logprobs)
        if not in_prompt:
            drafted = rng.randint(0, k)
            accepted = rng.randint(0, drafted)
            out = accepted + 1
            if rng.random() < 0.2:
                reason = rng.choice(["stop", "length", "error"])
                stop = rng.choice([None, rng.randrange(vocab)]) if reason == "stop" else None
                endings[i] = Finish(reason, stop, "failed: é" if reason == "error" else None)
                out = out if reason != "error" else accepted
            line[NUM_OUT], line[NUM_DRAFT], line[NUM_ACCEPTED] = out, drafted, accepted
            line[TOKENS : TOKENS + out] = noise.integers(0, vocab, out)
            wants = column_logprob_kind(params, vocab)
            if wants is not LogprobKind.NONE:
                line[PICK] = picks[wants]
                picks[wants] += out
            if has_long_logprobs(params, vocab):
                extra.logprobs = random_rows(rng, vocab, out, 1 + len(params.logprob_token_ids or ()))
        if extra != HostOutput():
            extras[i] = extra
        if request.pooling is not None and line[NUM_OUT]:
            extras.setdefault(i, extra).embedding = noise.normal(size=3).astype(np.float32)
    columns = {}
    for kind, count in picks.items():
        if any(column_logprob_kind(r.params, vocab) is kind for r in requests):
            top = min(32, vocab)  # the engine rounds the number of top tokens up
            columns[kind] = LogprobColumns(
                noise.normal(size=(count + 3, 1 + top)).astype(np.float32),
                noise.integers(0, vocab, (count + 3, top)),
                noise.integers(1, vocab + 1, count + 3),
                noise.normal(size=(count + 3, 64)).astype(np.float32),
                noise.integers(1, vocab + 1, (count + 3, 64)),
            )
    source = noise.integers(0, len(sources), (n, k)).astype(np.int8) if len(sources) > 1 else None
    drafts = random_drafts(requests, table, noise.integers(0, 99, n), noise, vocab, len(sources))
    results = StepResults(requests, table, columns, sources, source, endings, extras, drafts=drafts)
    handles = [2**40 + 7 * i for i in range(n)]
    rng.shuffle(handles)
    stats = {}
    for i in range(0, n, 2):
        times = {name: rng.choice([None, 0.0, rng.random()]) for name in ("scheduled_at", "first_token_at")}
        stats[i] = RequestStats(rng.randint(0, 99), rng.randint(0, 3), 0.0, **times)
    return Step(results, handles, Bounds(vocab, k, len(sources)), stats)


# --- damage ---


def sealed(data: bytes) -> bytes:
    """Return `data` with the size and the checksum corrected."""
    if len(data) < HEADER_STRUCT.size:
        return data
    body = bytearray(data)
    struct.pack_into("<Q", body, 16, len(body))
    struct.pack_into("<I", body, 4, zlib.crc32(memoryview(body)[CHECKSUM_START_BYTE:]))
    return bytes(body)


def damaged(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """Flip bits, cut, extend, delete, change header fields, mix two frames, or replace all by noise."""
    data = bytearray(frame)
    kind = rng.randrange(8)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data += rng.randbytes(rng.randint(1, 40))
    elif kind == 3:
        at = rng.randrange(len(data))
        del data[at : at + rng.randint(1, 64)]
    elif kind == 4:  # a field of the header
        at = 8 + 4 * rng.randrange((HEADER_STRUCT.size - 8) // 4)
        struct.pack_into("<I", data, at, rng.choice([0, 1, 2, 2**31, 2**32 - 1, rng.randrange(2**32)]))
    elif kind == 5:
        at = rng.randrange(min(len(data), len(other)))
        data = bytearray(bytes(data[:at]) + other[at:])
    elif kind == 6:
        data = bytearray(rng.randbytes(rng.choice([0, 3, HEADER_STRUCT.size, len(data)])))
    else:  # a few bytes of a column
        at = rng.randrange(HEADER_STRUCT.size, len(data)) if len(data) > HEADER_STRUCT.size else 0
        size = rng.choice([1, 2, 4, 8])
        data[at : at + size] = rng.choice([b"\xff", b"\0", b"\x7f"]) * len(data[at : at + size])
    return bytes(data)
