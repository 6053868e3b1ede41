"""Smoke test of bench/micro/gpu/draft_rounds.py on a small model without a GPU."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import draftproof
import tiny

BENCH = Path(draftproof.__file__).parents[2] / "bench"
FEW = ["--device", "cpu", "--vocab", "64", "--k", "3", "--context", "20", "--repeat", "2", "--copy", "1"]

pytestmark = pytest.mark.slow


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH / "micro" / "gpu"))
    import draft_rounds as rounds

    monkeypatch.setattr(rounds, "SMOLLM2", tiny.model_config("llama"))
    return rounds


def test_rounds_are_timed_and_checked(rounds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = rounds.measure(rounds.parsed([*FEW, "--batches", "1,3", "--check"]))
    assert [line["batch"] for line in found["microseconds"]] == [1, 3]
    assert all(line["as op by op"] for line in found["microseconds"])
    assert all(line[name] > 0 for line in found["microseconds"] for name in ("plain", "drafts", "floor"))
    assert "batches, 2 of 2" in capsys.readouterr().out


def test_control_defect_in_an_op_is_reported(rounds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.ops.cpu.draft_rounds import CpuRounds

    ahead = CpuRounds.plan_draft_rows

    def shift_positions(self: Any, *given: Any) -> Any:
        made = ahead(self, *given)
        made.positions.add_(1)
        return made

    monkeypatch.setattr(CpuRounds, "plan_draft_rows", shift_positions)
    found = rounds.measure(rounds.parsed([*FEW, "--batches", "2", "--check"]))
    assert not found["microseconds"][0]["as op by op"]


@pytest.mark.skipif(find_spec("triton") is None or torch.cuda.is_available(), reason="needs triton, no GPU")
@torch.inference_mode()
def test_every_kernel_is_compiled_ahead(rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from no_gpu import simulate_gpu

    kernels, compiled = simulate_gpu(monkeypatch)
    options = rounds.parsed([*FEW, "--backend", "triton", "--batches", "1,40"])
    made = rounds.checkpoint(options)
    decoding = rounds.Decoding(options, rounds.dummy_head(made, options.vocab, tmp_path), made)
    decoding.capture_all(options.batches, check=True)
    ahead = set(kernels)
    assert len(ahead) > 10 and len(compiled) == 1 + 4 * 2 + 2
    kernels.clear()

    def run_all() -> None:
        for batch in options.batches:
            for drafts in (0, decoding.k):
                decoding.restore_state(batch, drafts)
                for part in decoding.parts(batch, drafts):
                    part()
            decoding.with_separate_ops(partial(decoding.drafted, batch))

    decoding.engine.ops.runtime.compile([run_all], lambda *_: None)
    assert kernels and set(kernels) <= ahead
    assert decoding.device.drafting.failure is None
