"""How likely a model's drafts are to stand, by how likely the model itself thinks them to be.

Where drafts are waited for, a chain can end when it is no longer likely enough to be worth another round. At
temperature 0 what a head says of its draft is nearly the chance that it stands. Above that the target's noise
is shared, so drafts stand more often than they are likely, and by how much is found out: for a few ranges of
what was said it is counted, over all requests, what became of such drafts. Of that the committed tokens tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.types import SlotColumns

RANGES = 10  # of what was said, each for requests without and with a temperature
SHARED = 0.25  # of the drafts that are as good as ruled out, by which shared noise makes them stand
FIRM = 8  # drafts that must be heard of before they count as much as what was said
MANY = 256  # drafts of a range that are remembered
GOES_ON = 2.0, 1.0  # drafts behind another that stood and fell, while nothing is known


class Sureness:
    """Of one model. Plain numbers: a few of them are looked at in every round, and arrays would take longer
    than a tenth of it."""

    def __init__(self, num_slots: int) -> None:
        self._stood, self._fell = [0.0] * (2 * RANGES), [0.0] * (2 * RANGES)
        self._total = list(GOES_ON)
        # of each slot: seed and length of the request, its last drafts and the range of each
        self._last: list[tuple[int, int, list[int], list[int]] | None] = [None] * num_slots

    def chance(self, said: float, hot: bool) -> tuple[float, int]:
        """How likely a draft is to stand of which the model says that, and which range this is."""
        said = min(max(said, 0.0), 1.0) if said == said else 0.0
        at = min(int(said * RANGES), RANGES - 1) + (RANGES if hot else 0)
        expected = SHARED + (1 - SHARED) * said if hot else said
        stood, fell = self._stood[at], self._fell[at]
        return (stood + FIRM * expected) / (stood + fell + FIRM), at

    def further(self) -> float:
        """How likely a draft is to stand whose predecessors do, before it is made."""
        stood, fell = self._total
        return stood / (stood + fell)

    def note(
        self, columns: SlotColumns, slots: Sequence[int], drafts: list[list[int]], ranges: list[list[int]]
    ) -> None:
        """These requests [B] were given drafts."""
        for slot, mine, kinds in zip(slots, drafts, ranges, strict=True):
            if slot >= 0 and mine:
                self._last[slot] = int(columns.seed[slot]), int(columns.length[slot]), mine, kinds

    def learn(self, columns: SlotColumns, slots: Sequence[int]) -> None:
        """What became of the drafts that these requests [B] were given last: all up to the first that is not
        what was committed stood, whether it was verified or not."""
        for slot in slots:
            last = self._last[slot] if slot >= 0 else None
            if last is None:
                continue
            self._last[slot] = None
            seed, begin, drafts, ranges = last
            end = min(int(columns.length[slot]), begin + len(drafts))
            if int(columns.seed[slot]) != seed or end <= begin:
                continue
            for token, draft, at in zip(
                columns.tokens[slot, begin:end].tolist(), drafts, ranges, strict=False
            ):
                self._count(at, token == draft)
                if token != draft:
                    break

    def _count(self, at: int, stands: bool) -> None:
        (self._stood if stands else self._fell)[at] += 1
        self._total[not stands] += 1
        if self._stood[at] + self._fell[at] > MANY:
            self._stood[at], self._fell[at] = self._stood[at] / 2, self._fell[at] / 2
        if sum(self._total) > MANY * RANGES:
            self._total = [part / 2 for part in self._total]
