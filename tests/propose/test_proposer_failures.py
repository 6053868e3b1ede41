"""A proposer that fails, on the host or on the device, costs its drafts and nothing else."""

from __future__ import annotations

import pytest
import torch

import proposers
import tiny
from draftproof.errors import ConfigError
from draftproof.sampling_params import SamplingParams
from draftproof.types import Draft
from exact import check_empty, count_errors


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("method", "name"),
    [("proposers:Junk", name) for name in ("start", "propose", "stop")]
    + [("ngram", "draft"), ("ngram", "stop")]
    + [("suffix", name) for name in ("start", "prepare", "learn", "draft")],
)
def test_a_proposer_that_raises_costs_drafts_and_no_tokens(method, name, overlap, monkeypatch, caplog):
    """On the host and on the device, in the middle of prompts, of decoding and of prompt logprobs."""
    options = [{"logprobs": 2}, {"logprobs": 2}, {"prompt_logprobs": 2}]
    cases = [tiny.request(i, SamplingParams(max_tokens=6 + 9 * i, **options[i])) for i in range(3)]
    want = tiny.run(tiny.engine(), cases)
    spec = {"method": method, "adaptive": False}
    target = tiny.engine(speculative=spec, debug=False, overlap=overlap)
    real, calls = getattr(target.loop.proposer, name), []

    def breaks(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("the drafter broke")
        return real(*arguments)

    monkeypatch.setattr(target.loop.proposer, name, breaks)
    got = tiny.run(target, cases, arrivals=[0, 1, 4])
    assert {key: r.same() for key, r in got.items()} == {key: r.same() for key, r in want.items()}
    assert "switched off" in caplog.text and len(calls) == 3
    assert all(not count_errors(key, record) for key, record in got.items())
    check_empty(target)
    again = tiny.run(target, cases, arrivals=[0, 1, 4])  # it stays off, and the engine is none the worse
    assert {key: r.same() for key, r in again.items()} == {key: r.same() for key, r in want.items()}
    assert len(calls) == 3 and not any(step.num_draft for r in again.values() for step in r.steps)


@pytest.mark.parametrize(("method", "name"), [("proposers:Junk", "propose"), ("ngram", "draft")])
def test_a_proposer_that_raises_is_heard_in_debug_mode(method, name, monkeypatch):
    target = tiny.engine(speculative={"method": method})

    def breaks(batch):
        raise RuntimeError("the drafter broke")

    monkeypatch.setattr(target.loop.proposer, name, breaks)
    with pytest.raises(RuntimeError, match="the drafter broke"):
        tiny.run(target, [tiny.request(0, SamplingParams(max_tokens=9))])


def _ints(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize("method", ["proposers:Junk", "ngram"])
@pytest.mark.parametrize(
    "nonsense",
    [
        lambda b, k: Draft(_ints(b, k + 1), _ints(b)),
        lambda b, k: Draft(_ints(b, k - 1), _ints(b)),
        lambda b, k: Draft(_ints(1, k)[:0], _ints(b)),
        lambda b, k: Draft(_ints(b, k), _ints(b + 1)),
        lambda b, k: Draft(_ints(b, k).float(), _ints(b)),
        lambda b, k: Draft(_ints(b, k), _ints(b), logprobs=torch.zeros(b)),
        lambda b, k: Draft(_ints(b, k), _ints(b), sources=torch.zeros((b, 1), dtype=torch.int8)),
        lambda b, k: Draft(_ints(b, k), _ints(b) - 1),
        lambda b, k: Draft(_ints(b, k), _ints(b) + k, sources=torch.ones((b, k), dtype=torch.int8)),
        lambda b, k: Draft(_ints(b, k), _ints(b) + k, sources=torch.full((b, k), -1, dtype=torch.int8)),
        lambda b, k: None,
    ],
)
def test_drafts_that_make_no_sense_are_a_proposers_failure(method, nonsense, monkeypatch, caplog):
    cases = [tiny.request(i, SamplingParams(max_tokens=8)) for i in range(2)]
    want = tiny.run(tiny.engine(), cases)
    target = tiny.engine(speculative={"method": method}, debug=False)
    proposer = target.loop.proposer
    name = "draft" if proposer.graph_safe else "propose"
    k = proposer.env.k
    monkeypatch.setattr(proposer, name, lambda batch: nonsense(len(batch.slots), k))
    got = tiny.run(target, cases)
    assert {key: r.same() for key, r in got.items()} == {key: r.same() for key, r in want.items()}
    assert "switched off" in caplog.text


class SafeByWord(proposers.Junk):
    graph_safe = True


def test_a_proposer_that_calls_itself_graph_safe_must_draft_on_the_device() -> None:
    """It would never be asked."""
    with pytest.raises(ConfigError, match="DeviceProposer"):
        tiny.engine(speculative={"method": "test_proposer_failures:SafeByWord", "num_speculative_tokens": 2})
