"""What an answer has said is found by the turn after it, however the answer ended."""

from __future__ import annotations

import pytest

from async_serving import ALLOWED
from draftproof.engine.request_release import RequestRelease
from draftproof.sampling_params import SamplingParams

PAGE = 8


def first_turn(llm, how):
    """Its prompt and what was kept of its answer."""
    options = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "allowed_token_ids": ALLOWED}
    whole = llm.generate("ab" * 5, SamplingParams(max_tokens=60, cache_salt="whole", **options))[0].outputs[0]
    stop = whole.text[30:33]  # somewhere in the middle, perhaps earlier
    params = SamplingParams(max_tokens=60, stop=None if how == "left" else [stop], **options)
    if how == "whole":
        done = llm.generate("ab" * 5, params)[0]
        assert done.outputs[0].stop_reason == stop
        return done.prompt_token_ids + done.outputs[0].token_ids
    events = []
    for event in llm.stream("ab" * 5, params):
        events.append(event)
        if how == "left" and len(events) == 32:
            break  # the reader leaves: an abort
    assert how == "left" or events[-1].stop_reason == stop
    said = [event.token_id for event in events if event.token_id is not None]
    return llm.read_prompt("ab" * 5)[1] + said


def cached(llm, how):
    ids = first_turn(llm, how)
    found = llm.generate({"prompt_token_ids": ids + ids[:3]}, SamplingParams(max_tokens=1))[0]
    return found.num_cached_tokens, len(ids)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["whole", "stream", "left"])
def test_an_answer_that_was_cut_off_is_found(make, how, overlap):
    """By a stop string or by its reader: all full pages whose tokens have KV, of what was kept."""
    found, length = cached(make("ngram", page_size=PAGE, overlap=overlap), how)
    assert found >= (length - 1) // PAGE * PAGE > 16


@pytest.mark.parametrize("how", ["whole", "stream", "left"])
def test_control_one_that_is_dropped_is_not(make, how, monkeypatch):
    monkeypatch.setattr(RequestRelease, "abort", RequestRelease.remove)
    found, length = cached(make("ngram", page_size=PAGE), how)
    assert found < (length - 1) // PAGE * PAGE
