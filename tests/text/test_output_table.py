"""Answers built in bulk against answers built token by token: equal in every field, to the bit.

Made-up steps of requests that come and go, with windows of any outcome and tokens that are halves of a
character, nothing at all, or special; the pages are so small that every border is crossed.
"""

from __future__ import annotations

import gc
import random
import struct
import weakref
from collections.abc import Container
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from draftproof.engine.step.step_results import Finish, LogprobColumns, StepResults
from draftproof.outputs import CompletionOutput
from draftproof.sampling_params import SamplingParams
from draftproof.text.bulk import output_columns, output_table
from draftproof.text.bulk.detokenizer import BulkDetokenizer
from draftproof.text.bulk.output import BulkOutput, StopScanner
from draftproof.text.bulk.output_columns import OutputColumns
from draftproof.text.bulk.output_table import FinishedOutput, OutputTable
from draftproof.text.streaming_output import StreamingOutput
from draftproof.types import (
    FIRST_ROW,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    LogprobKind,
    Request,
)

BYTES = [b"", b"", b"<|end|>", b"<|pad|>", b" a", b" ", b"  b", b"x", b"word", b"\n", b"<0x0A>"]
BYTES += [b"\xc3", b"\xa9", b"\xa9b", b"a\xc3", b"\xe2", b"\x82", b"\xac", b"\x82\xac", b"\xe2\x82", b"\xff"]
BYTES += [
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xf0\x9f\x98\x80",
    "é".encode(),
    "€ and 你".encode(),
    b"\xed\xa0\x80",
    b"\xc0",
]
VOCAB = len(BYTES) + 2  # the model knows tokens that the tokenizer does not
SOURCES = ("ngram", "given")
IDS: dict[str, Any] = {"prompt_token_ids": [4], "prediction_ids": [5]}
STOPS = ["wordword", "x\n", "a a", "\ufffd\ufffd", "\ufffd", "é", "b  b", "<|end|>", "€ and 你 "]
K = 3


class Odd:
    """Minimal tokenizer for outputs."""

    special_ids = frozenset({2, 3})
    strip_left = 1

    def token_bytes(self, token_id: int) -> bytes:
        return BYTES[token_id] if token_id < len(BYTES) else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


ODD: Any = Odd()


def params_of(draw: random.Random) -> SamplingParams:
    wants = draw.choice([None, None, 0, 1, 5, 20])
    return SamplingParams(
        max_tokens=999,
        logprobs=wants,
        logprobs_mode=draw.choice(["raw", "processed"]),
        skip_special_tokens=draw.random() < 0.7,
        include_stop_str_in_output=draw.random() < 0.3,
        stop=draw.sample(STOPS, draw.choice([0, 0, 1, 3])),
        min_tokens=draw.choice([0, 0, 3, 9]),
    )


def finish_of(draw: random.Random, last: int | None) -> Finish:
    kinds = [Finish("length"), Finish("stop"), Finish("stop", last), Finish("error", error="no")]
    return draw.choice(kinds if last is not None else kinds[-1:])


def columns_of(draw: random.Random, picks: int) -> LogprobColumns:
    """Return columns that are wider and longer than what is read, with poison in the slack."""
    values = np.full((picks + 3, 33), np.nan, np.float32)
    ids, ranks = np.full((picks + 3, 32), -(2**40)), np.full(picks + 3, -(2**40))
    numbers = np.random.default_rng(draw.randrange(2**32))
    values[:picks] = -numbers.random((picks, 33), np.float32) * numbers.choice([1e-9, 1.0, 40.0], (picks, 1))
    ids[:picks] = numbers.permuted(np.tile(np.arange(32), (picks, 1)), axis=1) % VOCAB
    ranks[:picks] = numbers.integers(1, VOCAB, picks)
    return LogprobColumns(values, ids, ranks)


def step_of(draw: random.Random, requests: list[Request], ends: float) -> StepResults:
    n = len(requests)
    table = np.full((n, TOKENS + K + 1), -(2**40))
    plain = draw.random() < 0.3  # a step without any draft takes a shorter way
    pick, endings = 0, {}
    for i, request in enumerate(requests):
        drafted = 0 if plain else draw.randint(0, K)
        accepted = draw.randint(0, drafted)
        out = accepted + draw.choice([0, 1]) if accepted else draw.choice([0, 1, 1, 1])
        tokens = [draw.randrange(VOCAB) for _ in range(out)]
        if draw.random() < ends:
            endings[i] = finish_of(draw, tokens[-1] if tokens else None)
        elif out == accepted:  # only an end cuts a window short
            tokens.append(draw.randrange(VOCAB))
            out += 1
        table[i, [NUM_OUT, NUM_DRAFT, NUM_ACCEPTED, FIRST_ROW]] = out, drafted, accepted, 0
        table[i, TOKENS : TOKENS + out] = tokens
        if request.params.wants_logprobs:
            table[i, PICK] = pick
            pick += out
    columns = (
        {kind: columns_of(draw, pick) for kind in (LogprobKind.RAW, LogprobKind.PROCESSED)} if pick else {}
    )
    source = np.array([[draw.randrange(2) for _ in range(K)] for _ in requests], np.int8).reshape(n, K)
    return StepResults(requests, table, columns, SOURCES, source if draw.random() < 0.7 else None, endings)


def script(seed: int, steps: int = 60, at_once: int = 5, ends: float = 0.06) -> list[StepResults]:
    """Return steps of requests that start and finish at random; all finish in the end."""
    draw, running, made, count = random.Random(seed), [], [], 0
    while len(made) < steps or running:
        while len(running) < at_once and len(made) < steps and draw.random() < 0.7:
            running.append(Request(id=str(count), **IDS, params=params_of(draw), seed=count))
            count += 1
        here = [r for r in running if draw.random() < 0.9]
        results = step_of(draw, here, ends if len(made) < steps else 0.5)
        gone = {here[i].id for i in results.finishes}
        running = [r for r in running if r.id not in gone]
        made.append(results)
    return made


def alive(results: StepResults, over: Container[str]) -> StepResults:
    """Without those whom a stop string has ended: the engine no longer knows them."""
    at = [i for i, request in enumerate(results.requests) if request.id not in over]
    return replace(
        results,
        requests=[results.requests[i] for i in at],
        table=results.table[at],
        source=None if results.source is None else results.source[at],
        finishes={n: results.finishes[i] for n, i in enumerate(at) if i in results.finishes},
    )


def singly(steps: list[StepResults], tokenizer: Any) -> dict[str, CompletionOutput]:
    builders: dict[str, StreamingOutput] = {}
    for everybody in steps:
        results = alive(everybody, {name for name, builder in builders.items() if builder.finished})
        for request, output in zip(results.requests, results, strict=True):
            builder = builders.setdefault(request.id, StreamingOutput(0, request, tokenizer))
            builder.feed(output)
    return {name: builder.output for name, builder in builders.items()}


def in_bulk(
    steps: list[StepResults], tokenizer: Any, table: OutputTable | None = None, soon: bool = False
) -> dict[str, CompletionOutput]:
    """`soon`: answers that ended are closed when something is written down."""
    table, answers, done = table or OutputTable(VOCAB, K, SOURCES), {}, {}
    close = table.close_deferred if soon else table.close_all
    lines = np.zeros(0, np.int64)
    for everybody in steps:
        results = alive(everybody, done)
        for request in results.requests:
            if request.id not in answers:
                answers[request.id] = table.new_output(0, request, tokenizer)
                table.open(answers[request.id])
        now = np.array([answers[r.id].line for r in results.requests], np.int64)
        lines = lines if np.array_equal(lines, now) else now  # as `RequestTracker` does
        ends = {i: ending.reason for i, ending in results.finishes.items()}
        matched = table.add(lines, results.table, results.source, results.columns, ends)
        ended = {i: results.finishes.get(i, Finish("stop")) for i in {*results.finishes, *matched}}
        over = {results.requests[i].id: ending for i, ending in ended.items()}
        close([FinishedOutput(answers[name], e.reason, e.stop, e.error) for name, e in over.items()])
        done.update({name: answers.pop(name).output for name in over})
    table.flush_steps()
    assert not answers and not table.num_open
    return done


def differences(want: CompletionOutput, got: CompletionOutput) -> list[str]:
    names = [f.name for f in fields(CompletionOutput) if getattr(want, f.name) != getattr(got, f.name)]
    for a, b in ((want.logprobs, got.logprobs), (want.token_ids, got.token_ids)):
        if a is not None and b is not None and repr(list(a)) != repr(list(b)):  # order and types too
            names.append("repr")
    if want.cumulative_logprob is not None and got.cumulative_logprob is not None:
        bits = [struct.pack("d", out.cumulative_logprob) for out in (want, got)]
        names += ["cumulative bits"] if bits[0] != bits[1] else []
    return names


def compare(seeds: range, tokenizer: Any = ODD) -> set[str]:
    """Return the fields that differ anywhere."""
    found: set[str] = set()
    for seed in seeds:
        steps = script(seed)
        want = singly(steps, tokenizer)
        for soon in (False, True):
            got = in_bulk(steps, tokenizer, soon=soon)
            assert want.keys() == got.keys() and len(want) > 5
            for name in want:
                found.update(differences(want[name], got[name]))
    return found


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_table, "MIN_LINE_TOKENS", 9)


def test_equal_in_every_field() -> None:
    assert compare(range(25)) == set()


def test_equal_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_output_table.STOPS", [])  # which stop strings need
    monkeypatch.setattr(random.Random, "sample", lambda self, *rest: [])
    assert compare(range(100, 105), None) == set()


def test_equal_with_pages_of_the_usual_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_table, "MIN_LINE_TOKENS", 128)
    assert compare(range(200, 205)) == set()


def test_the_scripts_have_everything_in_them() -> None:
    outputs = [o for seed in range(25) for o in singly(script(seed), ODD).values()]
    assert {o.finish_reason for o in outputs} == {"stop", "length", "error"}
    assert {o.stop_reason for o in outputs} >= {*STOPS, None, 7}
    assert {s for o in outputs for s in o.provenance} == {
        "plain",
        "bonus",
        "recovered",
        "accepted:ngram",
        "accepted:given",
    }
    assert any(not o.token_ids for o in outputs) and max(len(o.token_ids) for o in outputs) > 60
    assert any("\ufffd" in o.text for o in outputs) and any("€" in o.text for o in outputs)
    assert any(o.text.startswith(" ") for o in outputs) and any("<|end|>" in o.text for o in outputs)
    assert {len(o.metrics.accepted_per_position) for o in outputs} == {0, 1, 2, 3}
    assert {len(o.logprobs[0]) > 1 for o in outputs if o.logprobs} == {False, True}


def test_an_aborted_answer_keeps_what_it_has() -> None:
    """Whenever it happens, also before its first token."""
    for cut in (0, 1, 7, 30):
        steps = [replace(r, finishes={}) for r in script(7, steps=cut, at_once=1, ends=0.0)[:cut]]
        request = Request(id="x", **IDS, params=SamplingParams(logprobs=2), seed=1)
        builder, table = StreamingOutput(0, request, ODD), OutputTable(VOCAB, K, SOURCES)
        answer = table.new_output(0, request, ODD)
        for results in steps:
            if not len(results):
                continue
            columns = results.table.copy()
            columns[:, PICK] = 0
            mine = {LogprobKind.RAW: columns_of(random.Random(1), K + 1)}
            reported = StepResults([request], columns, mine, SOURCES, results.source)
            builder.feed(reported[0])
            if answer.line < 0:
                table.open(answer)
            table.add(np.array([answer.line]), columns, results.source, mine, {})
        builder.abort()
        assert differences(builder.output, table.close(answer, "abort", None, None)) == []
        assert not table.num_open


def room(table: OutputTable) -> int:
    return table.num_bytes


def test_nothing_is_kept_of_answers_that_ended() -> None:
    """Thousands of requests, a few at a time: as many lines as run at once, and no answer stays."""
    table = OutputTable(VOCAB, K, SOURCES)
    kept: list[weakref.ref[BulkOutput]] = []
    make = table.new_output

    def watched(*args: Any) -> BulkOutput:
        answer = make(*args)
        kept.append(weakref.ref(answer))
        return answer

    table.new_output = watched  # type: ignore[method-assign]
    in_bulk(script(1, steps=900, at_once=6, ends=0.2), ODD, table)
    gc.collect()
    assert len(kept) > 500 and not [ref for ref in kept if ref() is not None]
    assert len(table._outputs) == 8
    size = room(table)
    in_bulk(script(2, steps=900, at_once=6, ends=0.2), ODD, table)
    assert size == room(table)


def test_a_window_longer_than_a_page() -> None:
    """A line has room for two steps at least, however many drafts there are."""
    table = OutputTable(VOCAB, 200, SOURCES)
    request = Request(id="x", **IDS, params=SamplingParams(), seed=1)
    answer = table.new_output(0, request, ODD)
    table.open(answer)
    columns = np.zeros((1, TOKENS + 201), np.int64)
    columns[0, [NUM_OUT, NUM_DRAFT, NUM_ACCEPTED]] = 201, 200, 200
    columns[0, TOKENS:] = 7
    for _ in range(3):
        table.add(np.array([answer.line]), columns, None, {}, {})
    out = table.close(answer, "length", None, None)
    assert out.text == "x" * 603 and out.metrics.accepted_per_position == [3] * 200


# --- controls: what would be seen -------------------------------------------------------------------------


def test_control_half_a_character_lost_at_a_page_border(monkeypatch: pytest.MonkeyPatch) -> None:
    push = BulkDetokenizer.push

    def forgetful(self: BulkDetokenizer, ids: Any) -> None:
        push(self, ids)
        self._incremental = None

    monkeypatch.setattr(BulkDetokenizer, "push", forgetful)
    assert compare(range(5)) == {"text", "text_offsets"}


def test_control_the_stop_token_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = OutputTable._flush_lines
    monkeypatch.setattr(
        OutputTable, "_flush_lines", lambda self, lines, hides_last: empty(self, lines, [False] * len(lines))
    )
    assert "text" in compare(range(5))


def test_control_tokens_kept_behind_a_stop_string(monkeypatch: pytest.MonkeyPatch) -> None:
    push = StopScanner.push

    def all_of_them(self: StopScanner, tokens: list[int], hides_last: bool) -> int:
        push(self, tokens, hides_last)
        return len(tokens)

    monkeypatch.setattr(StopScanner, "push", all_of_them)
    assert {"token_ids", "provenance", "metrics", "text_offsets", "logprobs"} <= compare(range(5))


def test_control_a_stop_string_begun_with_half_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopScanner, "_piece", lambda self, token: self._token_texts.token_text(token) or "")
    assert "text" in compare(range(5))


def test_control_a_stop_string_in_bytes_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopScanner, "finish", lambda self: None)
    assert "stop_reason" in compare(range(10))


def test_control_a_line_emptied_before_the_end_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    add = OutputTable.add

    def early(self: OutputTable, *args: Any) -> Any:
        matched = add(self, *args)
        self.flush_steps()
        self._flush_full_lines()
        return matched

    monkeypatch.setattr(OutputTable, "add", early)
    assert "text" in compare(range(10))


def test_control_an_answer_closed_after_the_next_ones_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended must be closed before its line is looked at again: its last token may be one to hide."""
    flush = OutputTable.flush_steps

    def late(self: OutputTable) -> None:
        finished, self._finished = self._finished, []
        flush(self)
        self._finished = finished

    def at_last(self: OutputTable, finished: Any) -> None:
        self._finished += finished
        late(self)
        self._flush_full_lines()
        self._close_finished()

    monkeypatch.setattr(OutputTable, "flush_steps", late)
    monkeypatch.setattr(OutputTable, "close_deferred", at_last)
    monkeypatch.setattr(OutputTable, "close_all", at_last)
    assert "text" in compare(range(10))


def test_control_logprobs_of_the_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    add = OutputColumns._add_logprobs

    def shifted(
        self: OutputColumns, lines: Any, number: Any, owner: Any, where: Any, place: Any, *rest: Any
    ) -> None:
        add(self, lines, number, owner, where, np.maximum(place - 1, 0), *rest)

    monkeypatch.setattr(OutputColumns, "_add_logprobs", shifted)
    assert {"logprobs", "cumulative_logprob"} <= compare(range(3))


def test_control_steps_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    append = OutputColumns.append

    def backwards(self: OutputColumns, steps: list[Any]) -> None:
        append(self, steps[::-1])

    monkeypatch.setattr(output_table, "MIN_LINE_TOKENS", 128)
    monkeypatch.setattr(OutputColumns, "append", backwards)
    assert {"token_ids", "logprobs", "text"} <= compare(range(3))


def test_control_a_sum_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pairwise:
        """numpy with an accumulate that ends in numpy's own sum."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        class add:
            @staticmethod
            def accumulate(values: Any) -> Any:
                return [np.sum(values[::-1], axis=0)]

    monkeypatch.setattr(output_columns, "np", Pairwise())
    assert compare(range(10)) == {"cumulative_logprob", "cumulative bits"}


def test_control_origins_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_columns, "BONUS", 2)
    assert compare(range(3)) == {"provenance"}
    monkeypatch.undo()
    monkeypatch.setattr(output_table, "MIN_LINE_TOKENS", 9)
    monkeypatch.setattr(output_columns, "MAX_DRAFTED", 0)
    assert compare(range(3)) == {"metrics"}
