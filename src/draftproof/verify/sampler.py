"""The sampler, the only one: logits rows and windows in, a choice for every row out.

Requests in one step may use different strategies; each judges over the same scores, and a row gets the
answer of its own request's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.config import SpeculativeConfig
from draftproof.ops import Ops
from draftproof.types import Choice, FinishStatus, Request, StepFeatures, Windows
from draftproof.verify import Scores, Strategy, judge, one_for_each
from draftproof.verify.logits_processing import process


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's choices, before it is known which of them count."""

    choice: Choice
    bad: Tensor  # [L] int64: an `FinishStatus` where nothing could be sampled, else 0
    processed: Tensor  # [L, V]
    errors: dict[int, str]  # by logits row, of the user's code; counts only where the row does


class Sampler:
    """Scores every row once, then lets the strategies judge."""

    def __init__(
        self, ops: Ops, strategies: Sequence[Strategy], policy: SpeculativeConfig | None = None
    ) -> None:
        self.ops = ops
        self.strategies = strategies  # by the number in the slots' column
        self.policy = policy

    def __call__(
        self, logits: Tensor, windows: Windows, features: StepFeatures, hosted: Mapping[int, Request]
    ) -> Sampled:
        """logits [L, V] fp32 (never changed)."""
        base, errors = process(self.ops, logits, windows, features, hosted)
        processed = self.ops.process_logits(base, windows) if features.needs_processed else base
        sampled, bad = self.ops.sample(processed, windows, scaled=features.needs_processed)
        if features.needs_processed:
            bad = _hopeless(base)  # what truncation makes of NaN says nothing
        if errors:
            bad[torch.tensor(list(errors), device=bad.device)] = int(FinishStatus.FAILED)
        scores = Scores(base, processed, sampled)
        judges = {i: self.strategies[i] for i in features.strategies}
        choices = {i: judge(strategy, windows, scores, self.policy) for i, strategy in judges.items()}
        return Sampled(one_for_each(choices, windows), bad, processed, errors)


def _hopeless(base: Tensor) -> Tensor:
    """[L, V] -> [L]: the `FinishStatus` of rows from which nothing can be sampled, else 0."""
    peak = base.amax(-1)
    bad = torch.where(torch.isfinite(peak), 0, int(FinishStatus.NOT_FINITE))
    return torch.where(peak == -math.inf, int(FinishStatus.NO_ALLOWED_TOKEN), bad)
