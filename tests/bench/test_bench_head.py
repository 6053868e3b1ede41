"""bench/head.py on a small model: it ends in time with valid figures, and a change cannot break it unseen."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftproof
import heads
import tiny
from draftproof.errors import ConfigError

BENCH = Path(draftproof.__file__).parents[2] / "bench"
SIDES = "eagle3,ngram,suffix,hybrid"
FEW = ["--parts", "speed", "--tokens", "12", "--rounds", "2", "--max-len", "64", "--count", "2"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import head

    def small(model: str, speculative_config: dict[str, Any] | None, dtype: str, **options: Any) -> Any:
        return SimpleNamespace(engine=tiny.engine("llama", dtype, speculative_config, **options))

    def some(options: Any, asked: Any) -> Any:
        return {task: [tiny.prompt(10 * i + j) for j in range(4)] for i, task in enumerate(("a", "b"))}

    monkeypatch.setattr(head, "LLM", small)
    monkeypatch.setattr(head, "encoded", some)
    monkeypatch.setattr(head, "read", lambda path, each: {})
    return head


def options_of(bench: Any, *more: str) -> Any:
    given = [*FEW, "--prompts", "none", "--head", heads.head("eagle3", "llama", "bfloat16"), *more]
    return bench.parsed(given)


def test_all_sides_are_measured(bench: Any) -> None:
    found = bench.measure(options_of(bench, "--batches", "1,9", "--methods", SIDES))["speed"]
    json.dumps(found)
    for batch, tasks in (("1", ("a", "b", "all")), ("9", ("all",))):
        cell = found[batch]
        assert cell["differing answers"] == 0 and cell["rounds"] == 2
        for task in tasks:
            assert set(cell[task]["over plain"]) == set(SIDES.split(","))
            assert cell[task]["hybrid over the best other"] > 0
            assert all(length >= 1 for length in cell[task]["tokens a step"].values())


def test_control_answers_that_differ_are_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.ops.cpu.sampling.ops import CpuSampling

    choose = CpuSampling.sample

    def wrong(self: Any, logits: Any, windows: Any, scaled: bool = False) -> Any:
        tokens, bad = choose(self, logits, windows, scaled)
        return (tokens.clamp(max=3) if len(tokens) > 1 else tokens), bad  # whoever verifies drafts

    monkeypatch.setattr(CpuSampling, "sample", wrong)
    found = bench.measure(options_of(bench, "--batches", "1", "--methods", "ngram"))["speed"]
    assert found["1"]["differing answers"] > 0


def test_no_time_left(bench: Any) -> None:
    found = bench.measure(options_of(bench, "--batches", "1", "--methods", "ngram", "--seconds", "0"))
    assert found == {"speed": {"does not start": dict.fromkeys(("plain", "ngram"), "no time left")}}


def test_a_side_that_does_not_start_costs_itself(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = bench.LLM

    def fussy(model: str, speculative_config: dict[str, Any] | None, **options: Any) -> Any:
        if speculative_config and speculative_config["method"] == "suffix":
            raise ConfigError("not today")
        return start(model, speculative_config, **options)

    monkeypatch.setattr(bench, "LLM", fussy)
    found = bench.measure(options_of(bench, "--batches", "1", "--methods", "ngram,suffix"))["speed"]
    assert found["does not start"] == {"suffix": "ConfigError: not today"}
    assert set(found["1"]["all"]["over plain"]) == {"ngram"}


def test_memory_is_bounded_by_what_runs(bench: Any) -> None:
    options = options_of(bench, "--batches", "1,9")
    engines = bench.Engines(options, {})
    each = 12 + options.tokens + 32
    assert engines.room == 5 * 18 * each // 4  # two for each seat of the largest batch
