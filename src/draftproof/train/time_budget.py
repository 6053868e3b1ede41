"""How many updates fit into a time: what they take on this machine, and all that is done beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from draftproof.train.evaluate import GROUP
from draftproof.train.trainer import SAVE_EVERY, Trainer

TIMED = 24  # updates


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds on this machine."""

    update: float
    point: float  # of the curve
    saving: float
    once: float  # what measuring took, and what comes once: reading, what is kept, sharpening

    def steps(self, seconds: float, eval_every: int) -> int:
        """The updates of a phase of so long, one at least."""
        left = seconds - self.beside(0, seconds, eval_every)
        return max(1, int(left / (self.update + self.point / eval_every)))

    def beside(self, steps: int, seconds: float, eval_every: int) -> float:
        """What is not updates. The curve has a point at both ends; two formats are written twice."""
        return self.once + (2 + steps / eval_every) * self.point + (5 + seconds / SAVE_EVERY) * self.saving


def measured(trainer: Trainer, began: float, tokens: int) -> Pace:
    """Spoils the weights. `began` (`time.monotonic()`): when the phase did; `tokens`: of all the text, which
    the trainer may have a part of."""
    reading = time.monotonic() - began  # comes once more
    lessons, plan, held = trainer.lessons, trainer.plan, trainer.held
    once = reading
    if plan.keep:
        lessons.remember()  # compiles and allocates
        lessons.forget()
        once += _timed(trainer, lessons.remember) * tokens / int(trainer.batches.begins[-1])
    update, first = seconds_an_update(trainer)
    once += 2 * max(0.0, first - TIMED * update)  # compiling and capturing; other shapes are still to come
    trainer.accepted(held[:GROUP])  # compiles, too
    point = _timed(trainer, lambda: trainer.accepted(held[: plan.eval_texts]))
    if trainer.sharpens:
        warm = [text for text in held if text.temperature > 0]
        some, weights = warm[:GROUP], trainer.rounded()
        spent = _timed(trainer, lambda: trainer.examiner.sharpest(weights, some, plan.max_len))
        once += spent * len(warm) / max(1, len(some))
    with TemporaryDirectory() as folder:
        saving = _timed(trainer, lambda: trainer.save(Path(folder)))
    return Pace(update, point, saving, once + time.monotonic() - began)


def seconds_an_update(trainer: Trainer, updates: int = TIMED) -> tuple[float, float]:
    """And what all of them took the first time. Spoils the weights."""
    batches = list(islice(trainer.batches.from_step(0), updates))
    first = _timed(trainer, lambda: [trainer.learn(batch, False) for batch in batches])
    return _timed(trainer, lambda: [trainer.learn(batch, False) for batch in batches]) / updates, first


def _timed(trainer: Trainer, work: Callable[[], object]) -> float:
    trainer.decays.cpu()  # waits for the device
    began = time.monotonic()
    work()
    trainer.decays.cpu()
    return time.monotonic() - began
