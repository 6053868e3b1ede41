"""Number of updates that fit a time budget, from timings on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from draftproof.train.evaluate import GROUP_TEXTS
from draftproof.train.trainer import SAVE_INTERVAL_SECONDS, Trainer

TIMED_UPDATES = 24  # updates


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds of the parts of a training phase on this machine."""

    update: float
    point: float  # of the curve
    saving: float
    once: float  # timing itself and what runs once: reading, cached states, logit scaling

    def steps(self, seconds: float, eval_every: int) -> int:
        """Return the number of updates of a phase of this length, at least 1."""
        left = seconds - self.overhead(0, seconds, eval_every)
        return max(1, int(left / (self.update + self.point / eval_every)))

    def overhead(self, steps: int, seconds: float, eval_every: int) -> float:
        """Return the seconds outside updates: curve points, saved states, what runs once."""
        return (
            self.once
            + (2 + steps / eval_every) * self.point
            + (5 + seconds / SAVE_INTERVAL_SECONDS) * self.saving
        )


def measured(trainer: Trainer, began: float, tokens: int) -> TimeEstimate:
    """Time the parts of a phase that began at `began`, for a text of `tokens` tokens; changes the weights."""
    once = time.monotonic() - began  # the text is read once more
    target_states, plan, held = trainer.target_states, trainer.plan, trainer.held
    if plan.keep:
        target_states.compute_all()  # compiles and allocates
        target_states.release()
        once += _timed(trainer, target_states.compute_all) * tokens / int(trainer.batches.begins[-1])
    update, first = time_updates(trainer, TIMED_UPDATES)
    # Compilation and capture, twice: other shapes follow.
    once += 2 * max(0.0, first - TIMED_UPDATES * update)
    trainer.accepted(held[:GROUP_TEXTS])  # compiles, too
    point = _timed(trainer, lambda: trainer.accepted(held[: plan.eval_texts]))
    if trainer.scales_logits:
        warm = [text for text in held if text.temperature > 0]
        some, weights, evaluator = warm[:GROUP_TEXTS], trainer.rounded(), trainer.evaluator
        spent = _timed(trainer, lambda: evaluator.acceptance_by_logit_scale(weights, some, plan.max_len))
        once += spent * len(warm) / max(1, len(some))
    with TemporaryDirectory() as folder:
        saving = _timed(trainer, lambda: trainer.save(Path(folder)))
    return TimeEstimate(update, point, saving, once + time.monotonic() - began)


def time_updates(trainer: Trainer, updates: int) -> tuple[float, float]:
    """Return seconds per update and the total of the first run; changes the weights."""
    batches = list(islice(trainer.batches.from_step(0), updates))
    first = _timed(trainer, lambda: [trainer.learn(batch, False) for batch in batches])
    return _timed(trainer, lambda: [trainer.learn(batch, False) for batch in batches]) / updates, first


def _timed(trainer: Trainer, work: Callable[[], object]) -> float:
    trainer.decays.cpu()  # waits for the device
    began = time.monotonic()
    work()
    trainer.decays.cpu()
    return time.monotonic() - began
