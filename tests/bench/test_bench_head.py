"""bench/head.py and bench/simulate_policy.py on a small model: they finish in time with valid figures."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import head
import numpy as np
import pytest
import simulate_policy
from common import closed_batch_replay

import heads
import tiny
from draftproof.errors import ConfigError

SIDES = "eagle3,ngram,suffix,hybrid"
FEW = ["--parts", "speed", "--tokens", "12", "--rounds", "2", "--max-len", "64", "--count", "2"]

pytestmark = pytest.mark.slow


def tiny_llm(model: str, speculative_config: dict[str, Any] | None, dtype: str, **options: Any) -> Any:
    return SimpleNamespace(engine=tiny.engine("llama", dtype, speculative_config, **options))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    prompts = {task: [tiny.prompt(10 * i + j) for j in range(4)] for i, task in enumerate(("a", "b"))}
    monkeypatch.setattr(head, "LLM", tiny_llm)
    monkeypatch.setattr(head, "encoded", lambda options, texts: prompts)
    monkeypatch.setattr(head, "read", lambda path, each: {})
    return head


def options_of(bench: Any, *more: str) -> Any:
    given = [*FEW, "--prompts", "none", "--head", heads.head("eagle3", "llama", "bfloat16"), *more]
    return bench.parsed(given)


def test_every_method_is_measured(bench: Any) -> None:
    found = bench.measure(options_of(bench, "--batches", "1,9", "--methods", SIDES))["speed"]
    json.dumps(found)
    for batch, tasks in (("1", ("a", "b", "all")), ("9", ("all",))):
        cell = found[batch]
        assert cell["differing answers"] == 0 and cell["rounds"] == 2
        for task in tasks:
            assert set(cell[task]["over plain"]) == set(SIDES.split(","))
            assert cell[task]["hybrid over the best other"] > 0
            assert all(length >= 1 for length in cell[task]["tokens a step"].values())


def test_forced_ends_of_one_task_have_their_own_figures(bench: Any) -> None:
    options = options_of(bench, "--batches", "1", "--methods", "eagle3", "--ends", "natural,forced")
    bench.encoded = lambda options, texts: {"a": [tiny.prompt(j) for j in range(4)]}
    found = bench.measure(options)["speed"]
    assert set(found) == {"1", "1, forced ends"}
    assert found["1, forced ends"]["differing answers"] == 0


def test_control_different_outputs_are_reported(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.ops.cpu.sampling.ops import CpuSampling

    sample = CpuSampling.sample

    def wrong(self: Any, logits: Any, windows: Any, scaled: bool = False) -> Any:
        tokens, bad = sample(self, logits, windows, scaled)
        return (tokens.clamp(max=3) if len(tokens) > 1 else tokens), bad  # steps that verify drafts

    monkeypatch.setattr(CpuSampling, "sample", wrong)
    found = bench.measure(options_of(bench, "--batches", "1", "--methods", "ngram"))["speed"]
    assert found["1"]["differing answers"] > 0


def test_methods_without_time_left_are_reported(bench: Any) -> None:
    found = bench.measure(options_of(bench, "--batches", "1", "--methods", "ngram", "--seconds", "0"))
    assert found == {"speed": {"does not start": dict.fromkeys(("plain", "ngram"), "no time left")}}


def test_method_that_does_not_start_is_reported(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = bench.LLM

    def refuse_suffix(model: str, speculative_config: dict[str, Any] | None, **options: Any) -> Any:
        if speculative_config and speculative_config["method"] == "suffix":
            raise ConfigError("not today")
        return start(model, speculative_config, **options)

    monkeypatch.setattr(bench, "LLM", refuse_suffix)
    found = bench.measure(options_of(bench, "--batches", "1", "--methods", "ngram,suffix"))["speed"]
    assert found["does not start"] == {"suffix": "ConfigError: not today"}
    assert set(found["1"]["all"]["over plain"]) == {"ngram"}


def test_kv_memory_is_bounded_by_the_batch(bench: Any) -> None:
    options = options_of(bench, "--batches", "1,9")
    engines = bench.Engines(options, {})
    each = 12 + options.tokens + 32
    assert engines.room == 5 * 18 * each // 4  # two for each request of the largest batch


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_replay_uses_step_times_of_a_table(bench: Any, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_policy, "LLM", tiny_llm)
    given = ["--prompts", "none", "--tokens", "24", "--max-len", "64", "--methods", "eagle3,suffix,hybrid"]
    options = simulate_policy.parsed(["hybrid", *given, "--head", heads.head("eagle3", "llama", "bfloat16")])
    found = simulate_policy.replay(machine, options)["a"]
    assert found["hybrid over the best other"] > 0.5
    assert found["suffix"]["rounds"] == 0 < found["eagle3"]["rounds"]
    assert found["hybrid"]["rounds"] < 4  # half of the rounds, or stopped early: the head is random


def test_closed_batches_slow_down_little_by_drafts_that_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_batch_replay, "BATCHES", (8, 256))
    shape = (4, 65)
    recorded = SimpleNamespace(tokens=64, prompt=np.full(4, 300))
    recorded.drafts, recorded.accepted = np.full(shape, 5), np.zeros(shape, np.int64)
    found = closed_batch_replay.closed_batches(recorded, 5)
    assert min(found["adaptive"]) > 0.98 > found["k=1"][1]
    recorded.accepted = recorded.drafts
    assert min(closed_batch_replay.closed_batches(recorded, 5)["adaptive"]) > 2
