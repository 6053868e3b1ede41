"""A proposer that fails, on the host or on the device, loses its drafts and nothing else."""

from __future__ import annotations

import pytest
import torch

import heads
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
    + [("suffix", name) for name in ("start", "prepare", "learn", "draft")]
    + [("draft_model", "draft")],
)
def test_proposer_that_raises_is_switched_off_and_output_is_exact(method, name, overlap, monkeypatch, caplog):
    options = [{"logprobs": 2}, {"logprobs": 2}, {"prompt_logprobs": 2}]
    requests = [tiny.request(i, SamplingParams(max_tokens=6 + 9 * i, **options[i])) for i in range(3)]
    want = tiny.run(tiny.engine(), requests)
    spec = {"method": method, "adaptive": False, **heads.options(method, "llama", "float32")}
    target = tiny.engine(speculative=spec, debug=False, overlap=overlap)
    real, calls = getattr(target.loop.proposer, name), []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("the drafter broke")
        return real(*arguments)

    monkeypatch.setattr(target.loop.proposer, name, fail)
    got = tiny.run(target, requests, arrivals=[0, 1, 4])
    assert {key: r.same() for key, r in got.items()} == {key: r.same() for key, r in want.items()}
    assert "switched off" in caplog.text and len(calls) == 3
    assert all(not count_errors(key, record) for key, record in got.items())
    check_empty(target)
    again = tiny.run(target, requests, arrivals=[0, 1, 4])  # it stays off
    assert {key: r.same() for key, r in again.items()} == {key: r.same() for key, r in want.items()}
    assert len(calls) == 3 and not any(step.num_draft for r in again.values() for step in r.steps)


@pytest.mark.parametrize(("method", "name"), [("proposers:Junk", "propose"), ("ngram", "draft")])
def test_proposer_that_raises_fails_the_engine_in_debug_mode(method, name, monkeypatch):
    target = tiny.engine(speculative={"method": method})

    def fail(batch):
        raise RuntimeError("the drafter broke")

    monkeypatch.setattr(target.loop.proposer, name, fail)
    with pytest.raises(RuntimeError, match="the drafter broke"):
        tiny.run(target, [tiny.request(0, SamplingParams(max_tokens=9))])


def _ints(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize("method", ["proposers:Junk", "ngram"])
@pytest.mark.parametrize(
    "invalid",
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
def test_invalid_drafts_switch_the_proposer_off(method, invalid, monkeypatch, caplog):
    requests = [tiny.request(i, SamplingParams(max_tokens=8)) for i in range(2)]
    want = tiny.run(tiny.engine(), requests)
    target = tiny.engine(speculative={"method": method}, debug=False)
    proposer = target.loop.proposer
    name = "draft" if proposer.graph_safe else "propose"
    monkeypatch.setattr(proposer, name, lambda batch: invalid(len(batch.slots), proposer.env.k))
    got = tiny.run(target, requests)
    assert {key: r.same() for key, r in got.items()} == {key: r.same() for key, r in want.items()}
    assert "switched off" in caplog.text


class FalselyGraphSafe(proposers.Junk):
    graph_safe = True


def test_graph_safe_proposer_must_draft_on_the_device() -> None:
    with pytest.raises(ConfigError, match="DeviceProposer"):
        tiny.engine(
            speculative={"method": "test_proposer_failures:FalselyGraphSafe", "num_speculative_tokens": 2}
        )
