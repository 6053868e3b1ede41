"""The frame: pinned bytes, every step survives the way there and back, and nothing else is believed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.engine.step.step_results import Finish, HostLogprobs, LogprobColumns, StepResults
from draftproof.metrics import RequestStats
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc import encode
from draftproof.serve.ipc.decode import Guests, Told, read, results_of
from draftproof.serve.ipc.encode import Refusal, refusal_frame
from draftproof.serve.ipc.frame import COLUMNS, HEAD, VERSION, Bounds, FrameError, Status, pack, unpack
from draftproof.types import NUM_OUT, TOKENS, DraftRecord, LogprobKind, LogprobRow, Request
from frames import STATS, Step, random_step, sealed
from fuzzing import fuzz


def received(step: Step, frame: bytes) -> tuple[Told, StepResults]:
    told = read(frame, step.bounds, step.results.sources)
    guests = Guests.of(told.handles, step.known(), step.bounds.vocab_size)
    return told, results_of(told, guests, step.results.sources, {})


def check_same(step: Step, frame: bytes, at: list[int]) -> None:
    """Bit for bit: floats by their representation, so that -0.0 is not 0.0."""
    told, results = received(step, frame)
    want = [step.results[i] for i in at]
    assert [repr(one) for one in results] == [repr(one) for one in want]
    assert told.handles == [step.handles[i] for i in at] and told.stats(STATS.timings) == STATS
    assert results.finishes == {
        place: step.results.finishes[i] for place, i in enumerate(at) if i in step.results.finishes
    }
    for place, i in enumerate(at):
        mine, theirs = (
            results.host_logprobs.get(place, HostLogprobs()),
            step.results.host_logprobs.get(i, HostLogprobs()),
        )
        asked = step.results.requests[i].params.include_draft_logprobs and step.results.table[i, NUM_OUT]
        assert repr(mine) == repr(theirs) or (asked and not mine.drafts and not theirs.drafts)
    counts = [(place, step.counts[i]) for place, i in enumerate(at) if i in step.counts]
    assert told.counted == counts


steps = st.builds(
    random_step,
    st.integers(0, 2**32),
    n=st.integers(0, 12),
    k=st.sampled_from([0, 1, 2, 5, 64]),
    vocab=st.sampled_from([21, 97, 49152]),
    sources=st.sampled_from([("one",), ("one", "two"), ("a", "b", "c")]),
)


@settings(max_examples=250, deadline=None)
@given(step=steps, sequence=st.integers(0, 2**64 - 1), chance=st.randoms(use_true_random=False))
def test_every_step_comes_back(step: Step, sequence: int, chance: random.Random) -> None:
    everybody = list(range(len(step.handles)))
    frame = step.frame(sequence)
    check_same(step, frame, everybody)
    header, _ = unpack(frame, step.bounds)
    assert (header.sequence, header.num_steps, header.step_seconds, header.busy_seconds) == (
        sequence,
        17,
        0.25,
        4.5,
    )
    some = [i for i in everybody if chance.random() < 0.5]  # of one server among several
    check_same(step, step.frame(0, some), some)


@pytest.mark.parametrize(
    "swap", [("num_draft", "num_accepted"), ("raw_id", "raw_rank"), ("cell_id", "cell_rank")]
)
def test_control_swapped_columns(swap: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the sender, seen by the tests above, or refused by the receiver."""

    def swapped(header: Any, columns: dict[str, Any]) -> bytes:
        a, b = swap
        if columns.get(a) is not None and columns[a].size == columns[b].size:
            columns[a], columns[b] = columns[b], columns[a]
        return pack(header, columns)

    monkeypatch.setattr(encode, "pack", swapped)
    with pytest.raises((AssertionError, FrameError)):
        for seed in range(20):
            step = random_step(seed, vocab=97)
            for request in step.results.requests:
                object.__setattr__(request.params, "logprobs", min(request.params.logprobs or 1, 1))
            check_same(step, step.frame(), list(range(6)))


def test_control_a_row_of_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(header: Any, columns: dict[str, Any]) -> bytes:
        if header.raw_rows > 1:
            columns["raw_value"] = np.roll(columns["raw_value"], 1, axis=0)
        return pack(header, columns)

    monkeypatch.setattr(encode, "pack", shifted)
    with pytest.raises(AssertionError):
        for seed in range(20):
            step = random_step(seed)
            check_same(step, step.frame(), list(range(6)))


def test_those_who_are_gone_are_left_out() -> None:
    step = random_step(4, n=9)
    told = read(step.frame(), step.bounds, step.results.sources)
    known = {handle: r for handle, r in step.known().items() if handle % 2}
    results = results_of(told, Guests.of(told.handles, known, 97), step.results.sources, {})
    stay = [i for i, handle in enumerate(step.handles) if handle % 2]
    assert 0 < len(stay) < 9 and [repr(r) for r in results] == [repr(step.results[i]) for i in stay]


def test_refusals() -> None:
    refusals = [
        Refusal(7, Status.REFUSED, "wrong: é", "prompt"),
        Refusal(2**63, Status.FULL, "full"),
        Refusal(1, Status.CLOSED, ""),
    ]
    step = random_step(0, n=0)
    told = read(refusal_frame(3, step.standing, refusals), step.bounds, step.results.sources)
    assert told.handles == [7, 2**63, 1] and not told.table.any()
    ends = [(end.status, end.text, end.param, end.stop) for end in told.ends.values()]
    assert ends == [
        (Status.REFUSED, "wrong: é", "prompt", None),
        (Status.FULL, "full", None, None),
        (Status.CLOSED, "", None, None),
    ]


# --- pinned -----------------------------------------------------------------------------------------------

GOLDEN = """
44505246694220d80100010002000000a0020000000000000500000000000000
1100000000000000000000000000d03f00000000000012400300000000000000
0100000000000000040000000000000001000000000000000500000000000000
0900000000000000020000000000000006000000000000000400000007000000
0300000002000000020000000100000001000000030000000100000002000000
0200000004000000020000000200000001030002000000000900000000000000
0800000000000000000000000000008006000000000000000200010003000100
0100020002000000010000000200000001020000000000001f00000020000000
2100000022000000230000002400000025000000000000000100010000000000
000000bf000080be000080bf000000c01e000000270000000200000001000000
000080c000000000050000000000000000000000010000000300000000000000
0100000000000000200000000000000000000000000000000001000000000000
0000000002000000000000000000000000000000000000000000000000000000
0000000000000000010000000000000010000000000000000100000000000000
0100000000000000000000000000044000000000000000000000000000000000
0200000003000000010000000000000001000000010000000200000002000000
0400000005000000250000000300000007000000010000000100000028000000
000000000000f8bf00000000000004c00000000000000cc0000000000000f0ff
0200000002000000220000002300000006000000070000000100000000000000
010100000000000000010000000000000000000000000000000000000000e8bf
0100000000000000000000000000c0bf0000000000000000c3a9000000000000
"""


def golden_step() -> Step:
    """A little of everything, made up by hand."""
    asks: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"logprobs": 0, "logprobs_mode": "processed"},
        {"include_draft_logprobs": True, "prompt_logprobs": 1},
        {"logprob_token_ids": [3]},
    ]
    requests = [
        Request(id=str(i), prompt_token_ids=[1], params=SamplingParams(**ask), seed=i)
        for i, ask in enumerate(asks)
    ]
    table = np.zeros((4, TOKENS + 3), np.int64)
    # committed, drafted, accepted, (end, row,) pick, tokens
    table[0] = [2, 1, 1, 0, 0, 0, 31, 32, 0]
    table[1] = [1, 2, 0, 0, 0, 0, 33, 0, 0]
    table[2] = [3, 2, 2, 0, 0, 0, 34, 35, 36]
    table[3] = [1, 0, 0, 0, 0, 0, 37, 0, 0]
    raw = LogprobColumns(
        np.array([[-0.5, -0.25], [-1, -2]], np.float32), np.array([[30], [39]]), np.array([2, 1])
    )
    processed = LogprobColumns(np.array([[-4]], np.float32), np.zeros((1, 0), np.int64), np.array([5]))
    drafts = [
        DraftRecord(34, 6, "two", True, None, -0.125),
        DraftRecord(35, 7, "one", True, -0.75, None),
    ]
    extras = {
        2: HostLogprobs(prompt_logprobs=[LogprobRow([4, 5], [-1.5, -2.5], [7, 1])], drafts=drafts),
        3: HostLogprobs(logprobs=[LogprobRow([37, 3], [-3.5, -float("inf")], [1, 40])]),
    }
    endings = {0: Finish("stop", 32), 1: Finish("error", None, "é"), 3: Finish("length")}
    columns = {LogprobKind.RAW: raw, LogprobKind.PROCESSED: processed}
    source = np.array([[1, 0], [0, 0], [0, 1], [0, 0]], np.int8)
    results = StepResults(requests, table, columns, ("one", "two"), source, endings, extras)
    return Step(results, [9, 8, 2**63, 6], Bounds(40, 2, 2), {1: RequestStats(16, 1, 0.0, scheduled_at=2.5)})


def test_golden_bytes() -> None:
    """If this fails the format has changed: then VERSION must, and both sides know each other by it."""
    assert VERSION == 1 and HEAD.size == 176
    step = golden_step()
    frame = step.frame(5)
    check_same(step, frame, [0, 1, 2, 3])
    assert [part.hex() for part in batched(frame)] == GOLDEN.split()


def batched(data: bytes) -> list[bytes]:
    return [data[i : i + 32] for i in range(0, len(data), 32)]


# --- what is no frame -------------------------------------------------------------------------------------


def test_what_is_wrong_is_said() -> None:
    step = random_step(1)
    frame = step.frame()

    def why(data: bytes, bounds: Bounds = step.bounds) -> str:
        with pytest.raises(FrameError) as caught:
            read(data, bounds, step.results.sources)
        return str(caught.value)

    assert "less than a header" in why(b"") and "less than a header" in why(frame[:100])
    assert "begins with" in why(b"DPRX" + frame[4:])
    assert "version 2" in why(sealed(frame[:8] + b"\2\0" + frame[10:]))
    assert "kind" in why(sealed(frame[:10] + b"\2\0" + frame[12:]))
    assert "bytes and has" in why(frame[:-8]) and "bytes and has" in why(frame + b"\0" * 8)
    assert "checksum" in why(frame[:-1] + bytes([frame[-1] ^ 1]))
    assert "checksum" in why(frame[:4] + b"\0\0\0\0" + frame[8:])
    assert "left over" in why(sealed(frame + b"\0" * 8))
    assert "beyond the end" in why(sealed(frame[:-8]))
    assert "engine with 5 drafts" in why(frame, Bounds(97, 4, 2))
    assert "token holds" in why(frame, Bounds(3, 5, 2))


CHANGES: dict[str, tuple[str, Any, str]] = {
    "a status nobody knows": ("status", 99, "status holds 99"),
    "an end that is not one": ("status", 1, "the ends are not those"),
    "logprobs of no kind": ("wants", 3, "wants holds 3"),
    "too many drafts": ("num_draft", 6, "num_draft holds 6"),
    "too many tokens": ("num_out", 7, "num_out holds 7"),
    "more tokens than there are": ("num_out", 6, "tokens, and the requests have"),
    "more stood than fell": ("num_accepted", 5, "more drafts stood"),
    "a token of no vocabulary": ("token", 97, "token holds 97"),
    "a source of nobody": ("source", 2, "source holds 2"),
    "an id of no vocabulary": ("raw_id", 97, "raw_id holds 97"),
    "a rank of no vocabulary": ("raw_rank", 98, "raw_rank holds 98"),
    "counts of nobody": ("counted_entry", 12, "counted_entry holds 12"),
    "a time that is none": ("counted_seated", float("nan"), "counted_seated is no time"),
    "rows of nobody": ("set_entry", 12, "set_entry holds 12"),
    "rows of no kind": ("set_kind", 2, "set_kind holds 2"),
    "rows that are not there": ("set_length", 9, "rows, and the sets have"),
    "cells that are not there": ("row_width", 90, "cells, and the rows have"),
    "a cell of no vocabulary": ("cell_id", 97, "cell_id holds 97"),
    "drafts of nobody": ("draft_entry", 12, "draft_entry holds 12"),
    "a draft that half stood": ("draft_accepted", 2, "draft_accepted holds 2"),
    "a draft of nobody": ("draft_source", 2, "draft_source holds 2"),
    "half a text": ("end_text", 99, "bytes of text, and the ends have"),
    "a text that is none": ("text", 0xFF, "no UTF-8"),
    "a stop of no vocabulary": ("end_stop", 97, "end_stop"),
}


def changed(step: Step, name: str, value: int) -> bytes | None:
    """The frame with the first number of a column changed; None if there is none of it."""
    frame = bytearray(step.frame())
    header, columns = unpack(bytes(frame), step.bounds)
    if not columns[name].size:
        return None
    dtype = {column: kind for column, kind, _ in COLUMNS}[name]
    at = columns[name].__array_interface__["data"][0] - columns["status"].__array_interface__["data"][0]
    at += HEAD.size  # `status` is the first column
    frame[at : at + dtype.itemsize] = np.array([value], dtype).tobytes()
    return sealed(bytes(frame))


@pytest.mark.parametrize("change", CHANGES)
def test_columns_are_held_against_each_other(change: str) -> None:
    name, value, reason = CHANGES[change]
    seen = set()
    for seed in range(40):
        step = random_step(seed, n=12)
        data = changed(step, name, value)
        runs = step.results.finishes.get(0) is None
        if data is None or data == step.frame() or (name == "status" and not runs):
            continue
        try:
            read(data, step.bounds, step.results.sources)
        except FrameError as error:
            seen.add(str(error))
        else:
            raise AssertionError(f"{change} is believed, seed {seed}")
    assert any(reason in text for text in seen), seen


def test_fuzzed_frames() -> None:
    """20,000 of them; `bench/micro/ipc_frame_fuzz.py` makes a million."""
    found = fuzz(20_000, seed=1)
    assert found.believed == 0 and found.refused > 17_000
    assert found.sealed_refused > 5_000  # with a checksum that is right
