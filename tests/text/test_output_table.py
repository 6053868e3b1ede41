"""Bulk outputs against streaming outputs: equal in every field, to the bit.

Random steps of requests that start and finish, with windows of any result and tokens that are partial
characters, empty, or special; lines are so short that every border is crossed.
"""

from __future__ import annotations

import gc
import random
import struct
import weakref
from collections import Counter
from collections.abc import Container
from dataclasses import fields, replace
from itertools import product
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
from draftproof.types import FIRST_ROW, NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, PICK, TOKENS, LogprobKind, Request
from frames import random_drafts

BYTES = [b"", b"", b"<|end|>", b"<|pad|>", b" a", b" ", b"  b", b"x", b"word", b"\n", b"<0x0A>"]
BYTES += [b"\xc3", b"\xa9", b"\xa9b", b"a\xc3", b"\xe2", b"\x82", b"\xac", b"\x82\xac", b"\xe2\x82", b"\xff"]
BYTES += [b"\xf0\x9f", b"\x98\x80", b"\xf0\x9f\x98\x80", "é".encode(), "€ and 你".encode()]
BYTES += [b"\xed\xa0\x80", b"\xc0"]
VOCAB = len(BYTES) + 2  # the model has tokens that the tokenizer has not
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


def params_of(draw: random.Random, number: int) -> SamplingParams:
    wants, own = draw.choice([None, None, 0, 1, 5, 20]), random.Random(number)
    named_ids = own.choices(range(VOCAB), k=own.choice([1, 3, 5])) if own.random() < 0.2 else None
    return SamplingParams(
        max_tokens=999,
        logprobs=None if named_ids else wants,
        logprob_token_ids=named_ids,
        include_draft_logprobs=own.random() < 0.4,
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
    named_values, named_ranks = np.full((picks + 3, 8), np.nan, np.float32), np.full((picks + 3, 8), -(2**40))
    named_values[:picks] = -numbers.random((picks, 8), np.float32)
    named_ranks[:picks] = numbers.integers(1, VOCAB, (picks, 8))
    return LogprobColumns(values, ids, ranks, named_values, named_ranks)


def step_of(draw: random.Random, requests: list[Request], starts: np.ndarray, ends: float) -> StepResults:
    n = len(requests)
    table = np.full((n, TOKENS + K + 1), -(2**40))
    plain = draw.random() < 0.3  # a step without any draft takes another path
    pick, endings = 0, {}
    for i, request in enumerate(requests):
        drafted = 0 if plain else draw.randint(0, K)
        accepted = draw.randint(0, drafted)
        out = accepted + draw.choice([0, 1]) if accepted else draw.choice([0, 1, 1, 1])
        tokens = [draw.randrange(VOCAB) for _ in range(out)]
        if draw.random() < ends:
            endings[i] = finish_of(draw, tokens[-1] if tokens else None)
        elif out == accepted:  # only a finish shortens a window
            tokens.append(draw.randrange(VOCAB))
            out += 1
        table[i, [NUM_OUT, NUM_DRAFT, NUM_ACCEPTED, FIRST_ROW]] = out, drafted, accepted, 0
        table[i, TOKENS : TOKENS + out] = tokens
        if request.params.needs_logprobs:
            table[i, PICK] = pick
            pick += out
    columns = (
        {kind: columns_of(draw, pick) for kind in (LogprobKind.RAW, LogprobKind.PROCESSED)} if pick else {}
    )
    noise = np.random.default_rng([n, *starts])
    source = np.array([[draw.randrange(2) for _ in range(K)] for _ in requests], np.int8).reshape(n, K)
    return StepResults(
        requests=requests,
        table=table,
        columns=columns,
        source_names=SOURCES,
        draft_sources=source if draw.random() < 0.7 else None,
        finishes=endings,
        drafts=random_drafts(requests, table, starts, noise, VOCAB, len(SOURCES)),
    )


def script(seed: int, steps: int = 60, at_once: int = 5, ends: float = 0.06) -> list[StepResults]:
    """Return steps of requests that start and finish at random; all finish in the end."""
    draw, running, made, count = random.Random(seed), [], [], 0
    num_tokens: Counter[str] = Counter()
    while len(made) < steps or running:
        while len(running) < at_once and len(made) < steps and draw.random() < 0.7:
            running.append(Request(id=str(count), **IDS, params=params_of(draw, count), seed=count))
            count += 1
        here = [r for r in running if draw.random() < 0.9]
        starts = np.array([num_tokens[r.id] for r in here], np.int64)
        results = step_of(draw, here, starts, ends if len(made) < steps else 0.5)
        num_tokens.update({r.id: int(line[NUM_OUT]) for r, line in zip(here, results.table, strict=True)})
        gone = {here[i].id for i in results.finishes}
        running = [r for r in running if r.id not in gone]
        made.append(results)
    return made


def alive(results: StepResults, over: Container[str]) -> StepResults:
    """Return the results without requests that a stop string has finished."""
    at = [i for i, request in enumerate(results.requests) if request.id not in over]
    return replace(
        results,
        requests=[results.requests[i] for i in at],
        table=results.table[at],
        draft_sources=None if results.draft_sources is None else results.draft_sources[at],
        finishes={n: results.finishes[i] for n, i in enumerate(at) if i in results.finishes},
        drafts=results.drafts and results.drafts.of_requests(np.array(at, np.int64), len(results)),
    )


def singly(steps: list[StepResults], tokenizer: Any) -> dict[str, CompletionOutput]:
    builders: dict[str, StreamingOutput] = {}
    for step in steps:
        results = alive(step, {name for name, builder in builders.items() if builder.finished})
        for request, output in zip(results.requests, results, strict=True):
            builder = builders.setdefault(request.id, StreamingOutput(0, request, tokenizer))
            builder.feed(output)
    return {name: builder.output for name, builder in builders.items()}


def in_bulk(
    steps: list[StepResults], tokenizer: Any, table: OutputTable | None = None, soon: bool = False
) -> dict[str, CompletionOutput]:
    """Return bulk outputs; `soon`: finished outputs are closed when steps are appended."""
    table, outputs, done = table or OutputTable(VOCAB, K, SOURCES), {}, {}
    close = table.close_deferred if soon else table.close_all
    lines = np.zeros(0, np.int64)
    for step in steps:
        results = alive(step, done)
        for request in results.requests:
            if request.id not in outputs:
                outputs[request.id] = table.new_output(0, request, tokenizer)
                table.open(outputs[request.id])
        now = np.array([outputs[r.id].line for r in results.requests], np.int64)
        lines = lines if np.array_equal(lines, now) else now  # as `RequestTracker` does
        ends = {i: ending.reason for i, ending in results.finishes.items()}
        matched = table.add(
            lines, results.table, results.draft_sources, results.columns, ends, results.drafts
        )
        ended = {i: results.finishes.get(i, Finish("stop")) for i in {*results.finishes, *matched}}
        over = {results.requests[i].id: ending for i, ending in ended.items()}
        close([FinishedOutput(outputs[name], e.reason, e.stop, e.error) for name, e in over.items()])
        done.update({name: outputs.pop(name).output for name in over})
    table.flush_steps()
    assert not outputs and not table.num_open
    return done


def differences(want: CompletionOutput, got: CompletionOutput) -> list[str]:
    names = [f.name for f in fields(CompletionOutput) if getattr(want, f.name) != getattr(got, f.name)]
    columns = "logprobs", "token_ids", "drafts"
    for a, b in ((getattr(want, name), getattr(got, name)) for name in columns):
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


def test_bulk_output_equals_streaming_output() -> None:
    assert compare(range(12)) == set()


def test_bulk_output_equals_streaming_output_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_output_table.STOPS", [])  # which stop strings need
    monkeypatch.setattr(random.Random, "sample", lambda self, *rest: [])
    assert compare(range(100, 105), None) == set()


def test_bulk_output_equals_streaming_output_with_long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_table, "MIN_LINE_TOKENS", 128)
    assert compare(range(200, 205)) == set()


def test_scripts_cover_all_finishes_provenances_and_texts() -> None:
    outputs = [o for seed in range(25) for o in singly(script(seed), ODD).values()]
    assert {o.finish_reason for o in outputs} == {"stop", "length", "error"}
    assert {o.stop_reason for o in outputs} >= {*STOPS, None, 7}
    accepted = {f"accepted:{source}" for source in SOURCES}
    assert {s for o in outputs for s in o.provenance} == {"plain", "bonus", "recovered", *accepted}
    assert any(not o.token_ids for o in outputs) and max(len(o.token_ids) for o in outputs) > 60
    assert any("\ufffd" in o.text for o in outputs) and any("€" in o.text for o in outputs)
    assert any(o.text.startswith(" ") for o in outputs) and any("<|end|>" in o.text for o in outputs)
    assert {len(o.metrics.accepted_per_position) for o in outputs} == {0, 1, 2, 3}
    assert {len(o.logprobs[0]) > 1 for o in outputs if o.logprobs} == {False, True}
    drafts = [draft for o in outputs for draft in o.drafts or ()]
    assert {(draft.accepted, draft.source, bool(draft.draft_top)) for draft in drafts} == {
        *product((False, True), SOURCES, (False, True))
    }


def test_aborted_output_keeps_its_tokens() -> None:
    """Abort before the first token and after some."""
    for cut in (0, 1, 7, 30):
        steps = [replace(r, finishes={}) for r in script(7, steps=cut, at_once=1, ends=0.0)[:cut]]
        request = Request(id="x", **IDS, params=SamplingParams(logprobs=2), seed=1)
        builder, table = StreamingOutput(0, request, ODD), OutputTable(VOCAB, K, SOURCES)
        output = table.new_output(0, request, ODD)
        for results in steps:
            if not len(results):
                continue
            columns = results.table.copy()
            columns[:, PICK] = 0
            mine = {LogprobKind.RAW: columns_of(random.Random(1), K + 1)}
            reported = StepResults([request], columns, mine, SOURCES, results.draft_sources)
            builder.feed(reported[0])
            if output.line < 0:
                table.open(output)
            table.add(np.array([output.line]), columns, results.draft_sources, mine, {})
        builder.abort()
        assert differences(builder.output, table.close(output, "abort", None, None)) == []
        assert not table.num_open


def test_finished_outputs_are_freed_and_their_lines_reused() -> None:
    table = OutputTable(VOCAB, K, SOURCES)
    kept: list[weakref.ref[BulkOutput]] = []
    make = table.new_output

    def watched(*args: Any) -> BulkOutput:
        output = make(*args)
        kept.append(weakref.ref(output))
        return output

    table.new_output = watched  # type: ignore[method-assign]
    in_bulk(script(1, steps=600, at_once=6, ends=0.2), ODD, table)
    gc.collect()
    assert len(kept) > 300 and not [ref for ref in kept if ref() is not None]
    assert len(table._outputs) == 8
    in_bulk(script(2, steps=600, at_once=6, ends=0.2), ODD, table)
    assert len(table._outputs) == 8


def test_line_holds_at_least_two_windows() -> None:
    table = OutputTable(VOCAB, 200, SOURCES)
    request = Request(id="x", **IDS, params=SamplingParams(), seed=1)
    output = table.new_output(0, request, ODD)
    table.open(output)
    columns = np.zeros((1, TOKENS + 201), np.int64)
    columns[0, [NUM_OUT, NUM_DRAFT, NUM_ACCEPTED]] = 201, 200, 200
    columns[0, TOKENS:] = 7
    for _ in range(3):
        table.add(np.array([output.line]), columns, None, {}, {})
    out = table.close(output, "length", None, None)
    assert out.text == "x" * 603 and out.metrics.accepted_per_position == [3] * 200


# --- negative controls ------------------------------------------------------------------------------------


def drop_held_bytes(push: Any) -> Any:
    def broken(self: BulkDetokenizer, ids: Any) -> None:
        push(self, ids)
        self._incremental = None

    return broken


def flush_before_the_finish_is_known(add: Any) -> Any:
    def broken(self: OutputTable, *args: Any) -> Any:
        matched = add(self, *args)
        self.flush_steps()
        self._flush_full_lines()
        return matched

    return broken


def take_logprobs_of_the_row_before(add: Any) -> Any:
    def broken(self: Any, lines: Any, number: Any, owner: Any, where: Any, place: Any, *rest: Any) -> None:
        add(self, lines, number, owner, where, np.maximum(place - 1, 0), *rest)

    return broken


# object, attribute, function from its value to a wrong one, seeds, fields that differ, whether only these do
CONTROLS: dict[str, tuple[Any, str, Any, int, set[str], bool]] = {
    "held bytes lost at a flush": (
        *(BulkDetokenizer, "push", drop_held_bytes),
        *(5, {"text", "text_offsets"}, True),
    ),
    "stop token shown": (
        *(OutputTable, "_flush_lines"),
        lambda flush: lambda self, lines, hides_last: flush(self, lines, [False] * len(lines)),
        *(5, {"text"}, False),
    ),
    "tokens kept after a stop string": (
        *(StopScanner, "push"),
        lambda push: lambda self, tokens, hides_last: max(push(self, tokens, hides_last), len(tokens)),
        *(5, {"token_ids", "provenance", "metrics", "text_offsets", "logprobs"}, False),
    ),
    "stop string that begins with a partial character missed": (
        *(StopScanner, "_piece", lambda _: lambda self, token: self._token_texts.token_text(token) or ""),
        *(5, {"text"}, False),
    ),
    "stop string in held bytes missed": (
        *(StopScanner, "finish", lambda _: lambda self: None),
        *(10, {"stop_reason"}, False),
    ),
    "line flushed before the finish is known": (
        *(OutputTable, "add", flush_before_the_finish_is_known),
        *(10, {"text"}, False),
    ),
    "drafts behind a stop string accepted": (
        *(output_table, "_counted_drafts", lambda _: lambda drafts, _: drafts),
        *(40, {"drafts"}, False),
    ),
    "ranks of named ids lost": (
        *(output_columns, "_logprob_arrays", lambda real: lambda found, end, _: real(found, end, False)),
        *(10, {"logprobs"}, False),
    ),
    "logprobs of another row": (
        *(OutputColumns, "_add_logprobs", take_logprobs_of_the_row_before),
        *(3, {"logprobs", "cumulative_logprob"}, False),
    ),
    "provenance": (output_columns, "BONUS", lambda _: 2, 3, {"provenance"}, True),
    "counters": (output_columns, "MAX_DRAFTED", lambda _: 0, 3, {"metrics"}, True),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_control_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, broken, seeds, fields, exact = CONTROLS[name]
    monkeypatch.setattr(target, attribute, broken(getattr(target, attribute)))
    if exact:
        assert compare(range(seeds)) == fields
    else:
        assert any(fields <= compare(range(seed, seed + 1)) for seed in range(seeds))


def test_control_output_closed_after_later_steps_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close outputs after their line was flushed: their last token may be one to hide."""
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


def test_control_steps_in_another_order_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    append = OutputColumns.append

    def backwards(self: OutputColumns, steps: list[Any]) -> None:
        append(self, steps[::-1])

    monkeypatch.setattr(output_table, "MIN_LINE_TOKENS", 128)
    monkeypatch.setattr(OutputColumns, "append", backwards)
    assert {"token_ids", "logprobs", "text"} <= compare(range(3))


def test_control_sum_in_another_order_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pairwise:
        """Module numpy with an accumulate that ends in numpy's own sum."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        class add:
            @staticmethod
            def accumulate(values: Any) -> Any:
                return [np.sum(values[::-1], axis=0)]

    monkeypatch.setattr(output_columns, "np", Pairwise())
    assert compare(range(10)) == {"cumulative_logprob", "cumulative bits"}
