"""Steps made up at random, as frames and as results, and frames that something happened to."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftproof.engine.step.logprob_routing import logprob_kind_of
from draftproof.engine.step.step_results import Finish, HostLogprobs, LogprobColumns, StepResults
from draftproof.metrics import EngineStats, RequestStats
from draftproof.sampling_params import SamplingParams, top_of
from draftproof.serve.ipc.encode import Party, Standing, frame_of
from draftproof.serve.ipc.frame import CHECKED, COLUMNS, HEAD, Bounds
from draftproof.types import (
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    DraftRecord,
    LogprobKind,
    LogprobRow,
    Request,
)

STATS = EngineStats(3, 1, 4, 1, 5, 9, 2, 6)


@dataclass
class Step:
    """A step of n requests: what the engine says of it, and by which handles a server knows them."""

    results: StepResults
    handles: list[int]
    bounds: Bounds
    counts: dict[int, RequestStats]  # by entry
    seconds: float = 0.25

    @property
    def standing(self) -> Standing:
        return Standing(self.bounds.max_drafts, 17, self.seconds, 4.5, STATS)

    def party(self, at: list[int] | None = None) -> Party:
        asked = []
        for i in range(len(self.handles)) if at is None else at:
            params = self.results.requests[i].params
            vocab = self.bounds.vocab_size
            asked.append((self.handles[i], logprob_kind_of(params, vocab), top_of(params.logprobs, vocab)))
        return Party.of(at, asked)

    def frame(self, sequence: int = 0, at: list[int] | None = None) -> bytes:
        mine = range(len(self.handles)) if at is None else at
        counted = [(place, self.counts[i]) for place, i in enumerate(mine) if i in self.counts]
        return frame_of(sequence, self.standing, self.results, self.party(at), counted)

    def known(self) -> dict[int, Request]:
        return dict(zip(self.handles, self.results.requests, strict=True))


def random_params(chance: random.Random, vocab: int) -> SamplingParams:
    kind = chance.random()
    options: dict[str, Any] = {}
    if kind < 0.6:
        options["logprobs"] = chance.choice([0, 1, 5, min(20, vocab)])
        options["logprobs_mode"] = chance.choice(["raw", "raw", "processed"])
    elif kind < 0.7:
        options["logprob_token_ids"] = [chance.randrange(vocab) for _ in range(3)]
    if chance.random() < 0.2:
        options["include_draft_logprobs"] = True
    if chance.random() < 0.2:
        options["prompt_logprobs"] = chance.choice([0, 2])
    return SamplingParams(**options)


def random_rows(chance: random.Random, vocab: int, count: int, width: int) -> list[LogprobRow]:
    return [
        LogprobRow(
            [chance.randrange(vocab) for _ in range(width)],
            [chance.choice([-0.0, -float("inf"), -chance.random() * 9, -1e-300]) for _ in range(width)],
            [chance.randint(1, vocab) for _ in range(width)],
        )
        for _ in range(count)
    ]


def random_step(
    seed: int, n: int = 6, k: int = 5, vocab: int = 97, sources: tuple[str, ...] = ("one", "two")
) -> Step:
    chance, noise = random.Random(seed), np.random.default_rng(seed)
    requests = [
        Request(id=str(i), prompt_token_ids=[1], params=random_params(chance, vocab), seed=i)
        for i in range(n)
    ]
    sources = sources if k else ()
    table = np.zeros((n, TOKENS + k + 1), np.int64)
    endings: dict[int, Finish] = {}
    extras: dict[int, HostLogprobs] = {}
    picks = {LogprobKind.RAW: 0, LogprobKind.PROCESSED: 0}
    for i, request in enumerate(requests):
        params, line = request.params, table[i]
        in_prompt = chance.random() < 0.1
        extra = HostLogprobs()
        if params.prompt_logprobs is not None and chance.random() < 0.7:
            extra.prompt_logprobs = random_rows(
                chance, vocab, chance.randint(1, 4), 1 + params.prompt_logprobs
            )
        if not in_prompt:
            drafted = chance.randint(0, k)
            accepted = chance.randint(0, drafted)
            out = accepted + 1
            if chance.random() < 0.2:
                reason = chance.choice(["stop", "length", "error"])
                stop = chance.choice([None, chance.randrange(vocab)]) if reason == "stop" else None
                endings[i] = Finish(reason, stop, "it is broken: é" if reason == "error" else None)
                out = out if reason != "error" else accepted
            line[NUM_OUT], line[NUM_DRAFT], line[NUM_ACCEPTED] = out, drafted, accepted
            line[TOKENS : TOKENS + out] = noise.integers(0, vocab, out)
            wants = logprob_kind_of(params, vocab)
            if wants is not LogprobKind.NONE:
                line[PICK] = picks[wants]
                picks[wants] += out
            if params.logprob_token_ids is not None:
                extra.logprobs = random_rows(chance, vocab, out, 4)
            if params.include_draft_logprobs:
                extra.drafts = [
                    DraftRecord(
                        chance.randrange(vocab),
                        40 + j,
                        chance.choice(sources),
                        j < accepted,
                        chance.choice([None, -0.5]),
                        -0.0,
                    )
                    for j in range(drafted)
                ]
        if extra != HostLogprobs():
            extras[i] = extra
    columns = {}
    for kind, count in picks.items():
        if any(logprob_kind_of(r.params, vocab) is kind for r in requests):
            top = min(32, vocab)  # as the engine rounds it up
            columns[kind] = LogprobColumns(
                noise.normal(size=(count + 3, 1 + top)).astype(np.float32),
                noise.integers(0, vocab, (count + 3, top)),
                noise.integers(1, vocab + 1, count + 3),
            )
    source = noise.integers(0, len(sources), (n, k)).astype(np.int8) if len(sources) > 1 else None
    results = StepResults(requests, table, columns, sources, source, endings, extras)
    handles = [2**40 + 7 * i for i in range(n)]
    chance.shuffle(handles)
    counts = {}
    for i in range(0, n, 2):
        times = {name: chance.choice([None, 0.0, chance.random()]) for name in ("seated", "spoke")}
        counts[i] = RequestStats(chance.randint(0, 99), chance.randint(0, 3), 0.0, **times)
    return Step(results, handles, Bounds(vocab, k, len(sources)), counts)


# --- what may happen to a frame ---------------------------------------------------------------------------


def sealed(data: bytes) -> bytes:
    """With the size and the checksum that these bytes should have."""
    if len(data) < HEAD.size:
        return data
    body = bytearray(data)
    struct.pack_into("<Q", body, 16, len(body))
    struct.pack_into("<I", body, 4, zlib.crc32(memoryview(body)[CHECKED:]))
    return bytes(body)


def damaged(chance: random.Random, frame: bytes, other: bytes) -> bytes:
    """Bits flipped, bytes lost, added, moved, numbers in the header changed, two frames mixed, noise."""
    data = bytearray(frame)
    how = chance.randrange(8)
    if how == 0:
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(data))
            data[at] ^= 1 << chance.randrange(8)
    elif how == 1:
        del data[chance.randrange(len(data)) :]
    elif how == 2:
        data += chance.randbytes(chance.randint(1, 40))
    elif how == 3:
        at = chance.randrange(len(data))
        del data[at : at + chance.randint(1, 64)]
    elif how == 4:  # a number of the header
        at = 8 + 4 * chance.randrange((HEAD.size - 8) // 4)
        struct.pack_into("<I", data, at, chance.choice([0, 1, 2, 2**31, 2**32 - 1, chance.randrange(2**32)]))
    elif how == 5:
        at = chance.randrange(min(len(data), len(other)))
        data = bytearray(bytes(data[:at]) + other[at:])
    elif how == 6:
        data = bytearray(chance.randbytes(chance.choice([0, 3, HEAD.size, len(data)])))
    else:  # a stretch of a column
        at = chance.randrange(HEAD.size, len(data)) if len(data) > HEAD.size else 0
        size = chance.choice([1, 2, 4, 8])
        data[at : at + size] = chance.choice([b"\xff", b"\0", b"\x7f"]) * len(data[at : at + size])
    return bytes(data)


NAMES = [name for name, _, _ in COLUMNS]
