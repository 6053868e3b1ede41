"""bench/replay.py on a small model: a table of step times instead of the clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftproof
import heads
import tiny

BENCH = Path(draftproof.__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import head
    import replay

    def small(model: str, speculative_config: dict[str, Any] | None, dtype: str, **options: Any) -> Any:
        return SimpleNamespace(engine=tiny.engine("llama", dtype, speculative_config, **options))

    monkeypatch.setattr(replay, "LLM", small)
    monkeypatch.setattr(head, "LLM", small)
    monkeypatch.setattr(head, "encoded", lambda options, asked: {"a": [tiny.prompt(1), tiny.prompt(2)]})
    monkeypatch.setattr(head, "read", lambda path, each: {})
    return replay


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_a_replay(bench: Any, machine: str) -> None:
    given = ["--prompts", "none", "--tokens", "24", "--max-len", "64", "--methods", "eagle3,suffix,hybrid"]
    options = bench.parsed(["hybrid", *given, "--head", heads.head("eagle3", "llama", "bfloat16")])
    found = bench.replay(machine, options)["a"]
    assert found["hybrid over the best other"] > 0.5
    assert found["suffix"]["rounds"] == 0 < found["eagle3"]["rounds"]
    assert found["hybrid"]["rounds"] < 4  # half of the rounds, or stopped early: the head is random
