"""Frames: pinned bytes, round trips of random steps, and rejection of damaged frames."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from draftproof.engine.step.step_results import Finish, HostOutput, LogprobColumns, StepResults
from draftproof.metrics import RequestStats
from draftproof.outputs import DraftColumns, LogprobRow
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc import encode
from draftproof.serve.ipc.decode import DecodedFrame, ReceivedGroup, decode_frame, to_step_results
from draftproof.serve.ipc.encode import AdmissionFailure, encode_failures
from draftproof.serve.ipc.frame import (
    COLUMNS,
    HEADER_STRUCT,
    VERSION,
    Bounds,
    FrameError,
    RequestStatus,
    pack,
    unpack,
)
from draftproof.text.bulk.output_table import OutputTable
from draftproof.types import NUM_DRAFT, TOKENS, LogprobKind, Request
from frames import STATS, Step, random_step, sealed
from fuzzing import fuzz


def decoded(step: Step, data: bytes) -> tuple[DecodedFrame, StepResults]:
    frame = decode_frame(data, step.bounds)
    group = ReceivedGroup.build(frame.handles, step.known(), step.bounds.vocab_size)
    return frame, to_step_results(frame, group, step.results.source_names, {})


def check_same(step: Step, data: bytes, at: list[int]) -> None:
    """Check the decoded results bit by bit: floats by their representation, so that -0.0 is not 0.0."""
    frame, results = decoded(step, data)
    expected = [step.results[i] for i in at]
    assert [repr(one) for one in results] == [repr(one) for one in expected]
    assert frame.handles == [step.handles[i] for i in at] and frame.engine_stats(STATS.timings) == STATS
    finishes = step.results.finishes
    assert results.finishes == {place: finishes[i] for place, i in enumerate(at) if i in finishes}
    for place, i in enumerate(at):
        count = int(results.table[place, NUM_DRAFT])  # rejected drafts have a source too
        assert results.sources_of(place, count) == step.results.sources_of(i, count)
        received = results.host_outputs.get(place, HostOutput())
        sent = step.results.host_outputs.get(i, HostOutput())
        assert repr(received) == repr(sent)
    assert frame.stats == [(place, step.stats[i]) for place, i in enumerate(at) if i in step.stats]


steps = st.builds(
    random_step,
    st.integers(0, 2**32),
    n=st.integers(0, 12),
    k=st.sampled_from([0, 1, 2, 5, 64]),
    vocab=st.sampled_from([21, 97, 49152]),
    sources=st.sampled_from([("one",), ("one", "two"), ("a", "b", "c")]),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(step=steps, sequence=st.integers(0, 2**64 - 1), rng=st.randoms(use_true_random=False))
def test_encoded_step_decodes_to_the_same_results(step: Step, sequence: int, rng: random.Random) -> None:
    """Round trip of all requests, and of a random subset."""
    everything = list(range(len(step.handles)))
    frame = step.frame(sequence)
    check_same(step, frame, everything)
    header, _ = unpack(frame, step.bounds)
    assert (header.sequence, header.num_steps, header.step_seconds, header.busy_seconds) == (
        sequence,
        17,
        0.25,
        4.5,
    )
    some = [i for i in everything if rng.random() < 0.5]  # of one HTTP process among several
    check_same(step, step.frame(0, some), some)


@pytest.mark.control
@pytest.mark.parametrize(
    "names", [("num_draft", "num_accepted"), ("raw_id", "raw_rank"), ("cell_id", "cell_rank"), ("raw_value",)]
)
def test_control_damaged_columns_are_detected(names: tuple[str, ...], monkeypatch: MonkeyPatch) -> None:
    """Swap two columns, or shift the rows of one, in the encoder; the round trip or the decoder must fail."""

    def damaged(header: Any, columns: dict[str, Any]) -> bytes:
        first, last = names[0], names[-1]
        if first == last and header.raw_rows > 1:
            columns[first] = np.roll(columns[first], 1, axis=0)
        elif columns.get(first) is not None and columns[first].size == columns[last].size:
            columns[first], columns[last] = columns[last], columns[first]
        return pack(header, columns)

    monkeypatch.setattr(encode, "pack", damaged)
    with pytest.raises((AssertionError, FrameError)):
        for seed in range(20):
            step = random_step(seed, vocab=97)
            for request in step.results.requests:
                object.__setattr__(request.params, "logprobs", min(request.params.logprobs or 1, 1))
            check_same(step, step.frame(), list(range(6)))


def test_aborted_requests_are_left_out_of_the_results() -> None:
    step = random_step(4, n=9)
    frame = decode_frame(step.frame(), step.bounds)
    known = {handle: r for handle, r in step.known().items() if handle % 2}
    results = to_step_results(
        frame, ReceivedGroup.build(frame.handles, known, 97), step.results.source_names, {}
    )
    stay = [i for i, handle in enumerate(step.handles) if handle % 2]
    assert 0 < len(stay) < 9 and [repr(r) for r in results] == [repr(step.results[i]) for i in stay]


def test_admission_failures_decode_with_message_and_param() -> None:
    failures = [
        AdmissionFailure(7, RequestStatus.INVALID, "wrong: é", "prompt"),
        AdmissionFailure(2**63, RequestStatus.QUEUE_FULL, "full"),
        AdmissionFailure(1, RequestStatus.CLOSED, ""),
    ]
    step = random_step(0, n=0)
    frame = decode_frame(encode_failures(3, step.snapshot, failures), step.bounds)
    assert frame.handles == [7, 2**63, 1] and not frame.table.any()
    entries = [(e.status, e.message, e.param, e.stop_token) for e in frame.finished.values()]
    assert entries == [
        (RequestStatus.INVALID, "wrong: é", "prompt", None),
        (RequestStatus.QUEUE_FULL, "full", None, None),
        (RequestStatus.CLOSED, "", None, None),
    ]


GOLDEN = """
44505246392bb0e90600010002000000400300000000000005000000000000001100000000000000000000000000d03f
000000000000124003000000000000000100000000000000040000000000000001000000000000000500000000000000
090000000000000002000000000000000600000000000000000000000000000000000000000000000500000008000000
050000000400000002000000010000000100000001000000000000000300000001000000020000000200000004000000
020000000200000001000000030000000200000000000000010300020000000009000000000000000800000000000000
000000000000008006000000000000000700000000000000020001000300010001000000000000000100020002000000
00000000000000000100000002000000000000000000000001020001010000001f000000200000002100000022000000
230000002400000025000000260000000100000001000000000000bf000080be000080bf000000c0000060c000000000
000000bf000080be1e00000027000000000000001e000000020000000100000001000000020000000000000000000000
000080ff0000000000000000000000002800000000000000000080c00000000005000000000000000000000001000000
030000000000000001000000000000002000000000000000000000000000000000010000000000000000000002000000
000000000000000000000000000000000000000000000000000000000000000001000000000000001000000000000000
010000000000000001000000000000000000000000000440000000000000000000000000000000000200000004000000
010000000000000001000000010000000200000002000000040000000500000026000000030000000700000001000000
0100000028000000000000000000f8bf00000000000004c00000000000000cc0000000000000f0ff0200000002000000
22000000230000000600000007000000010000000000000001010000000000000000c07f000040bf000000be0000a0bf
000000000200000000000000020000002600000023000000000000bf000040bf03000000000000000000003f00000080
0000404000000000c3a9000000000000
"""


POOLING: Any = {3: "mean"}  # by request


def golden_step() -> Step:
    """Return a step that uses every column."""
    options: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"logprobs": 0, "logprobs_mode": "processed"},
        {"include_draft_logprobs": True, "prompt_logprobs": 1},
        {"logprob_token_ids": [3]},
        {"logprob_token_ids": [3] * 65},
    ]
    requests = [
        Request(
            id=str(i), prompt_token_ids=[1], params=SamplingParams(**each), seed=i, pooling=POOLING.get(i)
        )
        for i, each in enumerate(options)
    ]
    table = np.zeros((5, TOKENS + 3), np.int64)
    # committed, drafted, accepted, (end, row,) pick, tokens
    table[0] = [2, 1, 1, 0, 0, 0, 31, 32, 0]
    table[1] = [1, 2, 0, 0, 0, 0, 33, 0, 0]
    table[2] = [3, 2, 2, 0, 0, 0, 34, 35, 36]
    table[3] = [1, 0, 0, 0, 0, 2, 37, 0, 0]
    table[4] = [1, 0, 0, 0, 0, 0, 38, 0, 0]
    raw = LogprobColumns(
        values=np.array([[-0.5, -0.25], [-1, -2], [-3.5, 0]], np.float32),
        ids=np.array([[30], [39], [0]]),
        ranks=np.array([2, 1, 1]),
        named_values=np.array([[0], [0], [-float("inf")]], np.float32),
        named_ranks=np.array([[0], [0], [40]]),
    )
    processed = LogprobColumns(np.array([[-4]], np.float32), np.zeros((1, 0), np.int64), np.array([5]))
    drafts = DraftColumns(
        entry=np.array([2, 2]),
        token=np.array([34, 35]),
        position=np.array([6, 7]),
        source=np.array([1, 0], np.int8),
        accepted=np.array([True, True]),
        draft_logprob=np.array([np.nan, -0.75], np.float32),
        target_logprob=np.array([-0.125, -1.25], np.float32),
        rank=np.array([0, 2]),
        top_width=np.array([0, 2]),
        top_ids=np.array([[0, 0, 0], [38, 35, 0]]),
        top_logprobs=np.array([[0, 0, 0], [-0.5, -0.75, 0]], np.float32),
    )
    extras = {
        2: HostOutput(prompt_logprobs=[LogprobRow([4, 5], [-1.5, -2.5], [7, 1])]),
        3: HostOutput(embedding=np.array([0.5, -0.0, 3.0], np.float32)),
        4: HostOutput(logprobs=[LogprobRow([38, 3], [-3.5, -float("inf")], [1, 40])]),
    }
    endings = {0: Finish("stop", 32), 1: Finish("error", None, "é"), 3: Finish("length")}
    columns = {LogprobKind.RAW: raw, LogprobKind.PROCESSED: processed}
    source = np.array([[1, 0], [0, 0], [0, 1], [0, 0], [0, 0]], np.int8)
    results = StepResults(requests, table, columns, ("one", "two"), source, endings, extras, drafts=drafts)
    stats = {1: RequestStats(16, 1, 0.0, scheduled_at=2.5)}
    return Step(results, [9, 8, 2**63, 6, 7], Bounds(40, 2, 2), stats)


def test_frame_bytes_are_pinned() -> None:
    """A failure means that the format changed: VERSION must change with it."""
    assert VERSION == 6 and HEADER_STRUCT.size == 216
    step = golden_step()
    frame = step.frame(5)
    check_same(step, frame, [0, 1, 2, 3, 4])
    assert [frame[i : i + 48].hex() for i in range(0, len(frame), 48)] == GOLDEN.split()


def test_step_of_prompts_alone_is_added_to_outputs_with_named_ids() -> None:
    """No request commits a token, so the step has no logprobs of tokens; prompts have theirs."""
    params = SamplingParams(logprob_token_ids=[3, 4], prompt_logprobs=0)
    requests = [Request(id=str(i), prompt_token_ids=[1, 2, 3], params=params, seed=i) for i in range(2)]
    rows = [LogprobRow([2], [-1.5], [7])]
    results = StepResults(
        requests=requests,
        table=np.zeros((2, TOKENS + 3), np.int64),
        columns={},
        source_names=("one", "two"),
        host_outputs={0: HostOutput(prompt_logprobs=rows)},
    )
    step = Step(results, [5, 6], Bounds(40, 2, 2), {})
    _, received = decoded(step, step.frame())
    for found in (results, received):
        table = OutputTable(40, 2, found.source_names)
        outputs = [table.new_output(0, request, None) for request in requests]
        lines = np.array([table.open(output) for output in outputs])
        assert table.add(lines, found.table, found.draft_sources, found.columns, {}) == []
        assert [table.close(output, "abort", None, None).logprobs for output in outputs] == [[], []]
        assert found.host_outputs[0].prompt_logprobs == rows


def test_invalid_frame_error_names_the_cause() -> None:
    step = random_step(1)
    frame = step.frame()

    def error_of(data: bytes, bounds: Bounds = step.bounds) -> str:
        with pytest.raises(FrameError) as caught:
            decode_frame(data, bounds)
        return str(caught.value)

    assert "shorter than a header" in error_of(b"") and "shorter than a header" in error_of(frame[:100])
    assert "wrong magic" in error_of(b"DPRX" + frame[4:])
    assert "version 1" in error_of(sealed(frame[:8] + b"\1\0" + frame[10:]))
    assert "unknown kind" in error_of(sealed(frame[:10] + b"\2\0" + frame[12:]))
    assert "size field" in error_of(frame[:-8]) and "size field" in error_of(frame + b"\0" * 8)
    assert "checksum" in error_of(frame[:-1] + bytes([frame[-1] ^ 1]))
    assert "checksum" in error_of(frame[:4] + b"\0\0\0\0" + frame[8:])
    assert "after the last column" in error_of(sealed(frame + b"\0" * 8))
    assert "exceeds the frame" in error_of(sealed(frame[:-8]))
    assert "max_drafts is 5" in error_of(frame, Bounds(97, 4, 2))
    assert "token holds" in error_of(frame, Bounds(3, 5, 2))


CHANGES: dict[str, tuple[str, Any, str]] = {
    "unknown status": ("status", 99, "status holds 99"),
    "status without an entry": ("status", 1, "finish_entry does not match"),
    "unknown logprob kind": ("logprob_kind", 3, "logprob_kind holds 3"),
    "too many drafts": ("num_draft", 6, "num_draft holds 6"),
    "too many tokens": ("num_out", 7, "num_out holds 7"),
    "token count mismatch": ("num_out", 6, "tokens, but num_out adds up to"),
    "more accepted than drafted": ("num_accepted", 6, "num_accepted exceeds"),
    "token outside the vocabulary": ("token", 97, "token holds 97"),
    "unknown source": ("source", 2, "source holds 2"),
    "top token outside the vocabulary": ("raw_id", 97, "raw_id holds 97"),
    "rank outside the vocabulary": ("raw_rank", 98, "raw_rank holds 98"),
    "rank of a named id outside the vocabulary": ("raw_named_rank", 98, "raw_named_rank holds 98"),
    "statistics of an unknown entry": ("stats_entry", 12, "stats_entry holds 12"),
    "time that is not finite": ("stats_scheduled", float("nan"), "stats_scheduled is not finite"),
    "rows of an unknown entry": ("set_entry", 12, "set_entry holds 12"),
    "rows of an unknown kind": ("set_kind", 2, "set_kind holds 2"),
    "row count mismatch": ("set_length", 9, "rows, but set_length adds up to"),
    "cell count mismatch": ("row_width", 90, "cells, but row_width adds up to"),
    "cell outside the vocabulary": ("cell_id", 97, "cell_id holds 97"),
    "drafts of an unknown entry": ("draft_entry", 12, "draft_entry holds 12"),
    "accepted flag out of range": ("draft_accepted", 2, "draft_accepted holds 2"),
    "draft with an unknown source": ("draft_source", 2, "draft_source holds 2"),
    "rank of a draft outside the vocabulary": ("draft_rank", 98, "draft_rank holds 98"),
    "likeliest tokens of drafts mismatch": ("draft_top_width", 9, "draft_top_width adds up to"),
    "too many likeliest tokens": ("draft_top_width", 65, "draft_top_width holds 65"),
    "likeliest token outside the vocabulary": ("draft_top_id", 97, "draft_top_id holds 97"),
    "embedding of an unknown entry": ("embedding_entry", 12, "embedding_entry holds 12"),
    "text size mismatch": ("finish_message", 99, "bytes of text, expected"),
    "text that is not UTF-8": ("text", 0xFF, "not UTF-8"),
    "stop token outside the vocabulary": ("finish_stop_token", 97, "finish_stop_token"),
}


def changed(step: Step, name: str, value: int) -> bytes | None:
    """Return the frame with the first value of a column changed; None if the column is empty."""
    frame = bytearray(step.frame())
    header, columns = unpack(bytes(frame), step.bounds)
    if not columns[name].size:
        return None
    dtype = {column: kind for column, kind, _ in COLUMNS}[name]
    at = columns[name].__array_interface__["data"][0] - columns["status"].__array_interface__["data"][0]
    at += HEADER_STRUCT.size  # `status` is the first column
    frame[at : at + dtype.itemsize] = np.array([value], dtype).tobytes()
    return sealed(bytes(frame))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_column_is_rejected(change: str) -> None:
    """Every changed value is rejected, with the expected message at least once."""
    name, value, reason = CHANGES[change]
    messages = set()
    for seed in range(40):
        step = random_step(seed, n=12)
        data = changed(step, name, value)
        runs = step.results.finishes.get(0) is None
        if data is None or data == step.frame() or (name == "status" and not runs):
            continue
        try:
            decode_frame(data, step.bounds)
        except FrameError as error:
            messages.add(str(error))
        else:
            raise AssertionError(f"{change} is accepted, seed {seed}")
    assert any(reason in text for text in messages), messages


def test_fuzzed_frames_are_rejected() -> None:
    """20,000 damaged frames; `bench/micro/ipc_frame_fuzz.py` tries a million."""
    found = fuzz(20_000, seed=1)
    assert found.accepted == 0 and found.rejected > 17_000
    assert found.sealed_rejected > 5_000  # with a correct checksum
