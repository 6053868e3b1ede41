"""Calibration: acceptance probability of a draft as a function of the draft model's own probability.

Where rounds are waited for, a chain of drafts stops when another one is not expected to gain its cost. For
greedy requests the model's probability is nearly the acceptance probability. For sampled ones the target's
noise is shared, so drafts are accepted more often. The difference is learned online over all requests,
counted in ten bins of the model's probability, greedy and sampled requests apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftproof.types import SlotColumns

NUM_BINS = 10  # of the model's probability, for greedy and for sampled requests each
SHARED_NOISE_ACCEPTANCE = 0.25  # of drafts with probability 0, in sampled requests
PRIOR_DRAFTS = 8  # drafts after which counts weigh as much as the model's probability
MAX_DRAFTS = 256  # of a bin, after which its counts are halved
PRIOR_NEXT = 2.0, 1.0  # accepted and rejected drafts behind an accepted one, before any is observed


class PendingDrafts(NamedTuple):
    """Drafts of a slot whose results are not known yet."""

    seed: int  # of the request
    length: int  # committed tokens before them
    drafts: list[int]
    bins: list[int]  # of each draft


class Calibration:
    """Counts of one model, as plain Python numbers: arrays would take a tenth of a round."""

    def __init__(self, num_slots: int) -> None:
        self._accepted, self._rejected = [0.0] * (2 * NUM_BINS), [0.0] * (2 * NUM_BINS)
        self._total = list(PRIOR_NEXT)
        self._pending: list[PendingDrafts | None] = [None] * num_slots

    def acceptance(self, draft_prob: float, is_sampled: bool) -> tuple[float, int]:
        """Return the acceptance probability of a draft with this model probability, and its bin."""
        draft_prob = min(max(draft_prob, 0.0), 1.0) if draft_prob == draft_prob else 0.0
        index = min(int(draft_prob * NUM_BINS), NUM_BINS - 1) + (NUM_BINS if is_sampled else 0)
        shared = SHARED_NOISE_ACCEPTANCE
        prior = shared + (1 - shared) * draft_prob if is_sampled else draft_prob
        accepted, rejected = self._accepted[index], self._rejected[index]
        return (accepted + PRIOR_DRAFTS * prior) / (accepted + rejected + PRIOR_DRAFTS), index

    def next_acceptance(self) -> float:
        """Return the acceptance probability of a draft before it is made, if those before are accepted."""
        accepted, rejected = self._total
        return accepted / (accepted + rejected)

    def record(
        self, columns: SlotColumns, slots: Sequence[int], drafts: list[list[int]], bins: list[list[int]]
    ) -> None:
        """Keep the drafts of these requests [B] until their results are known."""
        for slot, mine, kinds in zip(slots, drafts, bins, strict=True):
            if slot >= 0 and mine:
                seed, length = int(columns.seed[slot]), int(columns.length[slot])
                self._pending[slot] = PendingDrafts(seed, length, mine, kinds)

    def learn(self, columns: SlotColumns, slots: Sequence[int]) -> None:
        """Count the results of the last drafts of these requests [B], up to the first one that differs."""
        for slot in slots:
            last = self._pending[slot] if slot >= 0 else None
            if last is None:
                continue
            self._pending[slot] = None
            end = min(int(columns.length[slot]), last.length + len(last.drafts))
            if int(columns.seed[slot]) != last.seed or end <= last.length:
                continue
            tokens = columns.tokens[slot, last.length : end].tolist()
            for token, draft, index in zip(tokens, last.drafts, last.bins, strict=False):
                self._count(index, token == draft)
                if token != draft:
                    break

    def _count(self, index: int, is_accepted: bool) -> None:
        (self._accepted if is_accepted else self._rejected)[index] += 1
        self._total[not is_accepted] += 1
        if self._accepted[index] + self._rejected[index] > MAX_DRAFTS:
            self._accepted[index] /= 2
            self._rejected[index] /= 2
        if sum(self._total) > MAX_DRAFTS * NUM_BINS:
            self._total = [part / 2 for part in self._total]
