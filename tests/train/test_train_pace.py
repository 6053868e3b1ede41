"""Time budget of a training run, and the held-out texts that are evaluated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
import trained
from draftproof.train import time_budget
from draftproof.train.data.dataset import Text
from draftproof.train.progress import ProgressReporter
from draftproof.train.time_budget import TimeEstimate, measured
from draftproof.train.trainer import Trainer


def test_steps_are_the_largest_number_that_fits_the_time() -> None:
    found = TimeEstimate(update=0.1, point=2.0, saving=0.2, once=30.0)
    steps = found.steps(300.0, 250)
    assert steps == 2444

    def whole(count: int) -> float:
        return count * found.update + found.overhead(count, 300.0, 250)

    assert whole(steps) <= 300 < whole(steps + 1)
    assert found.steps(20.0, 250) == 1


@pytest.mark.parametrize(
    ("options", "once"),
    [({"scale_logits": 0}, 0.0), ({"scale_logits": 1}, 2.0), ({"scale_logits": 0, "keep": 1}, 100.0)],
)
def test_measured_estimate_scales_the_timed_part_to_the_whole_text(
    options: dict[str, int], once: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let every timed part take one second."""

    def timed(trainer: Trainer, work: Any) -> float:
        work()
        return 1.0

    monkeypatch.setattr(time_budget, "_timed", timed)
    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(time_budget, "GROUP_TEXTS", 2)
    made = trained.trainer(**options)
    found = measured(made, 0.0, 100 * int(made.batches.begins[-1]))
    assert found == TimeEstimate(update=1 / time_budget.TIMED_UPDATES, point=1.0, saving=1.0, once=once)


def test_held_out_texts_with_prompts_beyond_max_len_are_left_out() -> None:
    every = trained.texts()
    long = Text(np.arange(90, dtype=np.uint16), 70, 0.0, 1)
    held = [long, *every[:8], Text(np.arange(70, dtype=np.uint16), 64, 1.0, 1)]
    device = torch.device("cpu")
    made = Trainer(trained.plan(), tiny.checkpoint("llama"), every[8:], held, device, ProgressReporter())
    assert made.held == list(every[:8])
    assert set(made.accepted(made.held)) == {"greedy", "coupled", "argmax"}
