"""Overlap through LLM: the host finds a stop string while the next step is in flight."""

from __future__ import annotations

import gc
from functools import partial

import pytest

import proposers
from draftproof import SamplingParams
from draftproof.errors import RequestError
from text_pieces import FIRST, PIECES, Always, make_llm, output_fields

SPECS = [None, {"method": "ngram"}, {"method": "proposers:DeviceFlaky", "adaptive": False}]
PROMPTS = ["ab", "ba", "aab", "abab", "b", "bba"]


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    """Return LLMs; the first reads every step at once. With two slots a finished request's slot is reused."""
    make = partial(make_llm, tmp_path_factory.mktemp("tiny"), max_num_seqs=2)
    return make(None, overlap=False), *(make(spec, overlap=True) for spec in SPECS)


def params(seed: int = 11, **options) -> SamplingParams:
    allowed = [2, *range(FIRST, FIRST + len(PIECES))]
    values = {"temperature": 1.0, "seed": seed, "max_tokens": 18, "logprobs": 2, "allowed_token_ids": allowed}
    return SamplingParams(**{**values, **options})


STRUCTURES = {
    "stop strings": {"stop": ["bb", "ba", "a b", "\u00e9"]},
    "kept in the text": {"stop": ["ab"], "include_stop_str_in_output": True, "min_tokens": 4},
    "stop tokens": {"stop_token_ids": [12, 17]},
    "limit": {"max_tokens": 7, "ignore_eos": True},
    "all": {"stop": ["abb", " "], "stop_token_ids": [15], "max_tokens": 11},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_overlapped_outputs_and_counts_equal_synchronous_ones(llms, name):
    plain, *ahead = llms
    given_params = [params(seed, **STRUCTURES[name]) for seed in range(len(PROMPTS))]
    want = plain.generate(PROMPTS, given_params, use_tqdm=False)
    proposers.set_outputs(Always(want[0].outputs[0].token_ids))
    if "stop" in STRUCTURES[name]:
        assert any(isinstance(result.outputs[0].stop_reason, str) for result in want)
    for llm in ahead:
        before = llm.stats.num_emitted_tokens
        got = llm.generate(PROMPTS, given_params, use_tqdm=False)
        for mine, theirs in zip(got, want, strict=True):
            out = mine.outputs[0]
            assert output_fields(out) == output_fields(theirs.outputs[0])
            n = len(out.token_ids)
            assert n == len(out.logprobs) == len(out.provenance) == len(out.text_offsets)
            assert n == mine.metrics.num_emitted_tokens == mine.usage["completion_tokens"]
            accepted = sum(origin.startswith("accepted:") for origin in out.provenance)
            assert accepted == mine.metrics.num_accepted_tokens <= mine.metrics.num_draft_tokens
        assert llm.stats.num_emitted_tokens - before == sum(len(r.outputs[0].token_ids) for r in got)
        assert not llm.engine.has_work
        pages = llm.engine.loop.scheduler.pages
        assert pages.num_free == pages.capacity and llm.engine.loop.slots.num_free == 2


@pytest.mark.parametrize("name", STRUCTURES)
def test_stream_has_no_event_after_its_end(llms, name):
    plain, *ahead = llms
    want = plain.generate("ab", params(**STRUCTURES[name]))[0].outputs[0]
    proposers.set_outputs(Always(want.token_ids))
    for llm in ahead:
        events = list(llm.stream("ab", params(**STRUCTURES[name])))
        assert [event.token_id for event in events] == want.token_ids
        assert "".join(event.text for event in events) == want.text
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == want.finish_reason


def test_closed_stream_leaves_its_slot_to_the_next_request(llms):
    plain, *ahead = llms
    prompts = PROMPTS[:3]
    alone = [plain.generate(p, params(i, ignore_eos=True))[0].outputs[0] for i, p in enumerate(prompts)]
    for llm in ahead:
        proposers.set_outputs(Always(alone[1].token_ids))
        first, second = (llm.stream(p, params(i, ignore_eos=True)) for i, p in enumerate(prompts[:2]))
        taken = [[next(first) for _ in range(4)], [next(second) for _ in range(3)]]
        first.close()
        third = llm.generate(prompts[2], params(2, ignore_eos=True))[0].outputs[0]
        taken[1] += list(second)
        assert [e.token_id for e in taken[0]] == alone[0].token_ids[:4]
        assert [e.token_id for e in taken[1]] == alone[1].token_ids
        assert output_fields(third) == output_fields(alone[2])
        assert not llm.engine.has_work


@pytest.fixture
def prompts_at_a_step(llms, monkeypatch):
    """Return a function that records the number of opened prompts at each step; a step holds three rows."""

    def watch(llm):
        taken, at = [0], []
        step, make = llm.engine.step, llm._open_job

        def made(*given):
            taken[0] += 1
            return make(*given)

        def stepped():
            at.append(taken[0])
            return step()

        monkeypatch.setattr(llm.engine.loop.scheduler, "max_rows", 3)
        monkeypatch.setattr(llm.engine, "step", stepped)
        monkeypatch.setattr(llm, "_open_job", made)
        return at

    return watch


def test_first_step_runs_before_all_prompts_are_opened(llms, prompts_at_a_step):
    plain, *ahead = llms
    given_params = [params(seed, max_tokens=3 + seed % 4, ignore_eos=True) for seed in range(len(PROMPTS))]
    want = plain.generate(PROMPTS, given_params, use_tqdm=False)
    for llm in ahead:
        at = prompts_at_a_step(llm)
        got = llm.generate(PROMPTS, given_params, use_tqdm=False)
        assert [output_fields(one.outputs[0]) for one in got] == [
            output_fields(one.outputs[0]) for one in want
        ]
        assert at[0] == 2 and at[1] == 3 and at[-1] == len(PROMPTS)
    at = prompts_at_a_step(plain)  # synchronous steps start after all prompts
    plain.generate(PROMPTS, given_params, use_tqdm=False)
    assert set(at) == {len(PROMPTS)}


def test_refused_later_prompt_leaves_no_work_of_earlier_ones(llms, prompts_at_a_step):
    before = gc.get_threshold()
    for llm in llms[1:]:
        at = prompts_at_a_step(llm)
        with pytest.raises(RequestError, match="empty"):
            llm.generate([*PROMPTS, []], params(), use_tqdm=False)
        assert at, "some had begun"
        assert not llm.engine.has_work and not llm.tracker.has_pending_outputs
        assert llm.engine.loop.slots.num_free == 2
    assert gc.get_threshold() == before, "full collections come back"
