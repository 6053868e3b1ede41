"""Outputs are found in the prefix cache by the next turn, however they finished."""

import pytest

from async_serving import ALLOWED
from draftproof.engine.request_release import RequestRelease
from draftproof.sampling_params import SamplingParams

PAGE = 8


def first_turn_ids(llm, how):
    """Return the prompt and the kept output of a first turn."""
    options = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "allowed_token_ids": ALLOWED}
    whole = llm.generate("ab" * 5, SamplingParams(max_tokens=60, cache_salt="whole", **options))[0].outputs[0]
    stop = whole.text[30:33]
    params = SamplingParams(max_tokens=60, stop=None if how == "aborted" else [stop], **options)
    if how == "whole":
        done = llm.generate("ab" * 5, params)[0]
        assert done.outputs[0].stop_reason == stop
        return done.prompt_token_ids + done.outputs[0].token_ids
    events = []
    for event in llm.stream("ab" * 5, params):
        events.append(event)
        if how == "aborted" and len(events) == 32:
            break  # an abort
    assert how == "aborted" or events[-1].stop_reason == stop
    received = [event.token_id for event in events if event.token_id is not None]
    return llm.read_prompt("ab" * 5)[1] + received


def cached_and_total(llm, how):
    ids = first_turn_ids(llm, how)
    found = llm.generate({"prompt_token_ids": ids + ids[:3]}, SamplingParams(max_tokens=1))[0]
    return found.num_cached_tokens, len(ids)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["whole", "stream", "aborted"])
def test_stopped_or_aborted_output_is_cached(make, how, overlap):
    """All full pages with KV are found after a stop string or an abort by the reader."""
    found, length = cached_and_total(make("ngram", page_size=PAGE, overlap=overlap), how)
    assert found >= (length - 1) // PAGE * PAGE > 16


@pytest.mark.parametrize("how", ["whole", "stream", "aborted"])
def test_control_output_without_kept_pages_is_not_cached(make, how, monkeypatch):
    monkeypatch.setattr(RequestRelease, "abort", RequestRelease.remove)
    found, length = cached_and_total(make("ngram", page_size=PAGE), how)
    assert found < (length - 1) // PAGE * PAGE
