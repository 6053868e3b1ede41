"""Endings through LLM: text, offsets, logprobs, provenance, usage and statistics have one length.

The tiny model has tokens of one to three characters, some of them partial characters, so that stop strings
begin and end anywhere in a token and in a draft window.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from rich.progress import Progress

import proposers
from draftproof import SamplingParams
from draftproof.engine.step.step_results import StepResults
from draftproof.text.bulk.output import StopScanner
from draftproof.text.streaming_output import StreamingOutput
from text_pieces import CONFIG, FIRST, PIECES, Always, make_llm, output_fields


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return partial(make_llm, tmp_path_factory.mktemp("tiny"), max_num_seqs=4)


@pytest.fixture(scope="module")
def llms(make):
    spec = {"num_speculative_tokens": 5, "adaptive": False}
    return make(None), *(make({"method": f"proposers:{name}", **spec}) for name in ("Perfect", "Flaky"))


def params(**options):
    allowed = [2, *range(FIRST, FIRST + len(PIECES))]
    values = {"temperature": 1.0, "seed": 11, "max_tokens": 18, "logprobs": 2, "allowed_token_ids": allowed}
    values["include_draft_logprobs"] = True
    return SamplingParams(**{**values, **options})


def check_counts(result):
    output, stats = result.outputs[0], result.metrics
    n = len(output.token_ids)
    assert n == len(output.logprobs) == len(output.provenance) == len(output.text_offsets)
    assert n == stats.num_emitted_tokens == result.usage["completion_tokens"]
    assert result.usage["total_tokens"] == n + len(result.prompt_token_ids)
    accepted = [i for i, origin in enumerate(output.provenance) if origin.startswith("accepted:")]
    assert len(accepted) == stats.num_accepted_tokens == sum(stats.accepted_per_position)
    assert [d.position for d in output.drafts if d.accepted] == accepted
    assert all(output.token_ids[d.position] == d.token_id for d in output.drafts if d.accepted)
    assert len(output.drafts) == stats.num_draft_tokens
    assert stats.num_steps == n - stats.num_accepted_tokens + _ended_on_a_draft(output)
    assert output.text_offsets == sorted(output.text_offsets)
    assert not output.text_offsets or output.text_offsets[-1] <= len(output.text)
    assert output.cumulative_logprob == pytest.approx(
        sum(row[t].logprob for t, row in zip(output.token_ids, output.logprobs, strict=True))
    )


def _ended_on_a_draft(output):
    return bool(output.provenance) and output.provenance[-1].startswith("accepted:")


def checked_output(llms, prompt="ab", **options):
    """Return the plain output after checking that the speculative ones equal it and have equal counts."""
    plain, *others = llms
    want = plain.generate(prompt, params(**options))[0]
    whole = {**options, "stop": (), "stop_token_ids": (), "max_tokens": 18, "logits_processors": ()}
    free = plain.generate(prompt, params(**{**whole, "ignore_eos": True}))[0].outputs[0].token_ids
    proposers.set_outputs(Always(free))
    for llm in others:
        got = llm.generate(prompt, params(**options))[0]
        assert output_fields(got.outputs[0]) == output_fields(want.outputs[0])
        check_counts(got)
        assert not llm.engine.has_work
        pages = llm.engine.loop.scheduler.pages
        assert pages.num_free == pages.capacity
    check_counts(want)
    return want.outputs[0]


def test_stop_string_of_any_length_ends_the_text_anywhere(llms):
    free = checked_output(llms, ignore_eos=True)
    assert len(free.text) > 20 and "\ufffd" in free.text
    for begin in range(0, len(free.text) - 5, 2):
        for size in (1, 2, 5) if begin % 4 else (3,):
            stop = free.text[begin : begin + size]
            out = checked_output(llms, stop=[stop], ignore_eos=True)
            assert out.finish_reason == "stop" and out.stop_reason == stop
            assert out.text == free.text[: free.text.index(stop)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("minimum", [0, 4, 9])
def test_stop_strings_with_min_tokens_and_included_stop(llms, include, minimum):
    for seed in range(4):
        options = {"stop": ["bb", "ba", "a b", "\u00e9"], "include_stop_str_in_output": include}
        out = checked_output(llms, **options, min_tokens=minimum, seed=seed)
        assert out.finish_reason in ("stop", "length")
        assert len(out.token_ids) > minimum or out.finish_reason == "length"


def test_end_tokens_stop_tokens_and_limits_finish_the_output(llms):
    reasons = set()
    for seed in range(5):
        for options in ({}, {"stop_token_ids": [12, 17]}, {"max_tokens": 7}, {"stop": ["abb"]}):
            reasons.add(checked_output(llms, seed=seed, **options).finish_reason)
    assert reasons == {"stop", "length"}


def failing_after(count):
    """Return a logits processor that raises after `count` tokens of the output."""

    def fails(tokens, row):
        if len(tokens) == 2 + count:
            raise ValueError("enough")
        return row

    return fails


@pytest.mark.parametrize("at", [0, 1, 3, 6, 7])
def test_error_inside_a_window_keeps_the_tokens_before_it(llms, at):
    out = checked_output(llms, logits_processors=[failing_after(at)], ignore_eos=True)
    assert len(out.token_ids) == at and out.finish_reason == "error" and "enough" in out.error


def test_closed_stream_leaves_no_work(llms):
    plain, perfect, _ = llms
    free = plain.generate("ab", params(ignore_eos=True))[0].outputs[0]
    proposers.set_outputs(Always(free.token_ids))
    for taken in (1, 2, 4, 7):
        stream = perfect.stream("ab", params(ignore_eos=True))
        events = [next(stream) for _ in range(taken)]
        stream.close()
        assert [e.token_id for e in events] == free.token_ids[:taken]
        assert free.text.startswith("".join(e.text for e in events))
        assert not perfect.engine.has_work


def test_stream_equals_generate(llms):
    _, perfect, flaky = llms
    for llm in (perfect, flaky):
        for options in ({"stop": ["ba"]}, {"ignore_eos": True}, {"max_tokens": 6}, {"seed": 3}):
            whole = llm.generate("ab", params(**options))[0].outputs[0]
            events = list(llm.stream("ab", params(**options)))
            assert [e.token_id for e in events] == whole.token_ids
            assert "".join(e.text for e in events) == whole.text
            assert events[-1].finish_reason == whole.finish_reason
            assert events[-1].stop_reason == whole.stop_reason


@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_stream_error_is_in_the_last_event(llms, at):
    """Check the end event of a failed step, with and without a token in that step."""
    failing = params(logits_processors=[failing_after(at)], ignore_eos=True)
    for llm in llms:
        events = list(llm.stream("ab", failing))
        assert events[-1].finish_reason == "error" and "enough" in events[-1].error
        assert len([e for e in events if e.token_id is not None]) == at
        whole = llm.generate("ab", failing)[0].outputs[0]
        assert "".join(e.text for e in events) == whole.text


@pytest.mark.parametrize("given_params", [-1, 50])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_all_logprobs_of_a_small_vocabulary(make, given_params, mode):
    """Request all logprobs, or more than the vocabulary has."""
    llm, vocab = make(None, max_logprobs=-1), CONFIG["vocab_size"]
    want, got = (
        params(logprobs=top, logprobs_mode=mode, include_draft_logprobs=False)
        for top in (vocab, given_params)
    )
    (whole,) = llm.generate("ab", want)[0].outputs
    assert {len(row) for row in whole.logprobs} == {vocab}
    assert output_fields(llm.generate("ab", got)[0].outputs[0]) == output_fields(whole)
    assert [event.logprobs for event in llm.stream("ab", got)] == whole.logprobs


def keeping_push(push):
    """Return `StopScanner.push` that keeps the tokens after a stop string."""

    def broken(self, tokens, hides_last):
        push(self, tokens, hides_last)
        return len(tokens)

    return broken


def keeping_texts(_):
    """Return `StreamingOutput._visible_texts` that keeps the tokens after a stop string."""

    def broken(self, step):
        return [self._stops.push([self._piece(step, i, token)]) for i, token in enumerate(step.token_ids)]

    return broken


@pytest.mark.parametrize(
    ("target", "name", "broken"),
    [(StopScanner, "push", keeping_push), (StreamingOutput, "_visible_texts", keeping_texts)],
)
def test_control_tokens_kept_after_a_stop_string_are_detected(llms, monkeypatch, target, name, broken):
    if target is StreamingOutput:  # build every output token by token
        monkeypatch.setattr("draftproof.frontend.request_tracker.has_long_logprobs", lambda *_: True)
    stop = checked_output(llms, ignore_eos=True).text[4:7]
    assert checked_output(llms, ignore_eos=True, stop=[stop]).finish_reason == "stop"
    monkeypatch.setattr(target, name, broken(getattr(target, name)))
    with pytest.raises(AssertionError):
        checked_output(llms, ignore_eos=True, stop=[stop])


# --- built in bulk, or token by token ---------------------------------------------------------------------


def free_options(draw):
    """Return random options, without those that disable bulk outputs."""
    return {
        "include_draft_logprobs": False,
        "logprobs": draw.choice([None, 0, 2, 5, 20]),
        "logprobs_mode": draw.choice(["raw", "processed"]),
        "prompt_logprobs": draw.choice([None, None, 1]),
        "skip_special_tokens": draw.random() < 0.5,
        "stop": draw.sample(["bb", "a b", "abba", "\u00e9b", "\ufffd", "b" * 9], draw.choice([0, 0, 1, 2])),
        "include_stop_str_in_output": draw.random() < 0.5,
        "stop_token_ids": draw.choice([(), (12,)]),
        "min_tokens": draw.choice([0, 0, 1]),
        "max_tokens": draw.choice([1, 7, 18, 150]),
        "ignore_eos": draw.random() < 0.5,
        "temperature": draw.choice([0.0, 1.0, 1.3]),
        "seed": draw.randrange(1000),
        "n": draw.choice([1, 1, 3]),
    }


def both_ways(llm, seed):
    """Return the bulk outputs of a batch, and those with every step as an object."""
    draw = random.Random(seed)
    options = [free_options(draw) for _ in range(9)]
    prompts = [draw.choice(["a", "ab", "abba", "b a"]) for _ in options]
    before = llm.stats.num_emitted_tokens
    bulk = llm.generate(prompts, [params(**o) for o in options], use_tqdm=False)
    between = llm.stats.num_emitted_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftproof.frontend.request_tracker.has_long_logprobs", lambda *_: True)
        watched = llm.generate(prompts, [params(**o) for o in options], use_tqdm=False)
    assert between - before == llm.stats.num_emitted_tokens - between == bulk_tokens(bulk)
    return bulk, watched


def bulk_tokens(results):
    return sum(r.usage["completion_tokens"] for r in results)


def test_bulk_outputs_equal_outputs_built_token_by_token(llms):
    proposers.set_outputs(Always([FIRST, FIRST + 2, FIRST + 5] * 60))
    reasons, origins = set(), set()
    for llm in llms:
        for seed in range(4):
            bulk, watched = both_ways(llm, seed)
            assert [replace(r, request_id="") for r in bulk] == [replace(r, request_id="") for r in watched]
            reasons |= {(o.finish_reason, o.stop_reason) for r in bulk for o in r.outputs}
            origins |= {origin for r in bulk for o in r.outputs for origin in o.provenance}
            assert not llm.tracker.has_pending_outputs and not llm.engine.has_work
    assert reasons > {("length", None), ("stop", None), ("stop", 12), ("stop", "bb"), ("stop", "\ufffd")}
    assert {"plain", "bonus", "recovered"} < origins


def test_overlapped_steps_change_no_output(llms, make):
    """A stop string is found while the next step is in flight; the results of that step are dropped."""
    late = make(None, overlap=True)
    assert late.engine.loop.overlap
    for seed in range(2):
        bulk, watched = both_ways(late, seed)
        want, _ = both_ways(llms[0], seed)
        for got in (bulk, watched):
            assert [replace(r, request_id="") for r in got] == [replace(r, request_id="") for r in want]
    free = {"ignore_eos": True, "include_draft_logprobs": False}
    text = llms[0].generate("ab", params(**free))[0].outputs[0].text
    wanted_params = [params(**free, stop=[text[6:8]]), params(**free), params(**free, max_tokens=3)]
    for llm in (late, llms[0]):
        results = llm.generate(["ab"] * 3, wanted_params, use_tqdm=False)
        assert [a.outputs[0].text for a in results[:2]] == [text[: text.index(text[6:8])], text]
        assert sum(a.metrics.num_emitted_tokens for a in results) == bulk_tokens(results)
        assert not llm.tracker.has_pending_outputs and not llm.engine.has_work


def test_control_hidden_token_lost_in_bulk_is_detected(llms, monkeypatch):
    monkeypatch.setattr("draftproof.text.bulk.detokenizer.BulkDetokenizer.push_hidden", lambda self: None)
    with pytest.raises(AssertionError):
        test_bulk_outputs_equal_outputs_built_token_by_token(llms)


def test_no_step_output_is_created_for_bulk_outputs(llms, monkeypatch):
    def refuse(self, i):
        raise AssertionError("one by one")

    plain = llms[0]
    quiet = {"include_draft_logprobs": False, "ignore_eos": True}
    want = plain.generate(["ab", "a"], params(**quiet), use_tqdm=False)
    monkeypatch.setattr(StepResults, "_output", refuse)
    got = plain.generate(["ab", "a"], params(**quiet), use_tqdm=False)
    assert [output_fields(r.outputs[0]) for r in got] == [output_fields(r.outputs[0]) for r in want]
    assert plain.generate("ab", params(**quiet, stop=["ab"]))[0].outputs[0].finish_reason == "stop"
    with pytest.raises(AssertionError, match="one by one"):  # control
        list(plain.stream("ab", params(**quiet)))
    assert not plain.engine.has_work


def test_streams_stop_strings_and_bulk_outputs_share_an_engine(llms):
    """Each request gets its own results; overlapping calls leave no state."""
    for llm in llms:
        alone = llm.generate(["ab", "ba", "a"], params(ignore_eos=True), use_tqdm=False)
        stream = llm.stream("ab", params(ignore_eos=True))
        events = [next(stream)]
        quiet, stop = params(ignore_eos=True, include_draft_logprobs=False), alone[1].outputs[0].text[3:5]
        wanted_params = [quiet, params(ignore_eos=True, stop=[stop]), quiet]
        results = llm.generate(["ab", "ba", "a"], wanted_params, use_tqdm=False)
        events += stream
        assert [e.token_id for e in events] == alone[0].outputs[0].token_ids
        assert "".join(e.text for e in events) == alone[0].outputs[0].text
        for i in (0, 2):
            assert output_fields(results[i].outputs[0]) == output_fields(alone[i].outputs[0])
        assert results[1].outputs[0].stop_reason == stop
        assert not llm.engine.has_work and not llm.tracker.has_pending_outputs


@pytest.mark.parametrize("after", [0, 1, 5])
def test_interrupted_batch_is_counted_and_leaves_no_work(llms, after, monkeypatch):
    for llm in llms:
        reported, before = [], llm.stats.num_emitted_tokens

        def interrupted(step=llm.engine.step, reported=reported):
            if len(reported) == after:
                raise KeyboardInterrupt
            results = step()
            reported.append(sum(len(output.token_ids) for output in results))
            return results

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                quiet = params(ignore_eos=True, include_draft_logprobs=False)
                mixed = [quiet, params(ignore_eos=True, stop=["bbbbb"]), params()]
                llm.generate(["ab", "a", "b"], mixed, use_tqdm=False)
        assert llm.stats.num_emitted_tokens - before == sum(reported)
        assert not llm.engine.has_work and not llm.tracker.has_pending_outputs


def test_progress_bar_counts_finished_outputs(llms, monkeypatch):
    updates = []
    monkeypatch.setattr(Progress, "update", lambda self, task, completed: updates.append(completed))
    wanted_params = [params(max_tokens=n, include_draft_logprobs=n % 2 == 0) for n in (3, 3, 9, 17, 18)]
    llms[0].generate(["ab"] * 5, wanted_params, use_tqdm=True)
    assert updates == sorted(updates) and updates[-1] == 5 and len(updates) <= 5
