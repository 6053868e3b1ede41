"""How many drafts a request may have. Output never depends on this.

Of each request the engine holds a belief: how likely is it that its drafts stand? It begins with what was
learned of the requests before it, is sharpened by every window, and fades back as long as nothing is heard.
With the cost of rows, beliefs say which drafts make the most committed tokens a second, and those are given.

A belief that is low is not tested by that, and may be wrong, or become so: a free text may turn into a copy.
So requests without drafts are probed, in turn and with one draft each; where that stands, again at once and
with more. Probes are paid from a purse that one per cent of the time goes into: that is what they can cost,
whatever the requests and the prices are.

Steps are short, and all this is the host's work in each of them. So what was decided holds for a few steps,
whoever comes or goes meanwhile if the host has no time, and what became of windows is put together until it
is looked at again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftproof.engine.drafting import budget_kernels
from draftproof.engine.drafting.budget_kernels import LAST, POWERS, REST, SHARE, WORTH
from draftproof.engine.drafting.step_cost import RowCosts
from draftproof.engine.drafting.step_cost_filter import Reals
from draftproof.speculative_config import MAX_SPECULATIVE_TOKENS

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FADE = 0.02  # of a belief, at every step
KEEP = 3  # steps in which nothing is decided anew, where somebody is and the host has time; else REST
NEARLY = 0.7  # of what the device takes, that the host may surely take and still has time


class DraftBudgets:
    """One line a slot, and all requests of a step at once: what is done for each is native (`afford`)."""

    def __init__(self, num_slots: int, costs: RowCosts) -> None:
        self.costs = costs
        self.asked_apart = False  # is what drafts cost before they are verified weighed elsewhere (`Asking`)?
        self._columns = np.zeros((budget_kernels.COLUMNS, num_slots), np.int64)
        self.limit, self._fixed, self._windows, self._turn, self._reach, self._probed = self._columns[:6]
        self._probing = False  # is anybody probed?
        self._answers = 0  # step by which those that were have been told
        self._minds = np.full((num_slots + 1, LAST + 1), 1 / LAST)
        self._belief, self._last = self._minds[:-1, :LAST], self._minds[:-1, LAST]
        self._newcomer = self._minds[-1, :LAST]
        self._news: list[tuple[Ints, Ints, Ints, bool]] = []  # what was recorded and is not looked at yet
        self._fixes = False  # has there been anybody whose number of drafts is fixed?
        self._purse = 0.0  # in the time of empty steps
        self._still = 0.0  # what the last step that was asked about costs beside its rows
        self._least = 0.0  # what its rows cost at least
        self._steps = 0
        # what was decided holds for some steps: how many are left of those, since when, the size of the step
        # that it was for, what each slot has, those that asked last and what they were given
        self._rest = self._since = self._size = 0
        self._held = self._columns[budget_kernels.HELD]
        self._likely = np.inf  # of all that anybody has the least
        self._tokens = 1.0  # that the step brings
        self._resting = self._given = np.zeros(0, np.int64)
        self._first = 0  # what a newcomer has meanwhile
        self._gives = False  # does anybody have any?
        self._hurries = False  # has the host no time to decide?

    def start(self, slot: int, limit: int, adaptive: bool) -> None:
        """A request that may have `limit` drafts sits down; not adaptive: it always has them."""
        if limit:
            budget_kernels.ready()
        self._listen()  # of whoever sat there it says nothing later
        self._fixes |= not adaptive
        self._columns[:, slot] = 0
        self.limit[slot], self._fixed[slot], self._reach[slot] = limit, not adaptive, 1
        self._belief[slot] = self._newcomer
        self._held[slot] = min(self._first, limit) if adaptive else limit
        self._last[slot] = self._likely if adaptive else np.inf
        if not self._gives:
            self._rest = 0

    def take(self, slots: Ints, most: Ints, keys: int) -> Ints:
        """Drafts allowed to each in the coming step, of the `most` that there may be.

        `keys`: tokens that these requests have stored.
        """
        self._steps += 1
        self._listen()
        num_fixed = np.count_nonzero(self._fixed[slots]) if self._fixes else 0
        if num_fixed == len(slots):
            return self._all(slots, most)
        costs = self.costs
        self._still = still = costs.still(keys)
        self._least = least = costs.least(still)
        if self._probing:
            self._probed[:], self._probing = 0, False
        paid = self._asking(len(slots))
        asking = 0.0 if num_fixed else paid
        if not asking and self._free(len(slots)) and self._free(len(slots) + int(most.sum())):
            self._first, self._likely = MAX_SPECULATIVE_TOKENS, 0.0
            return self._all(slots, most)
        fades = 1 - (1 - FADE) ** (self._steps - self._since)
        columns, minds = self._columns, self._minds
        survival, gains, rows, tokens = budget_kernels.believe(columns, minds, slots, most, fades)
        gains.sort()  # numpy's is the quickest
        given, total, budget, self._probing, self._tokens, self._likely, self._first, self._purse, wait = (
            budget_kernels.decide(
                *(columns, minds, slots, most, survival, costs.table, gains, rows, tokens),
                *(still, least, asking, paid, self._purse, self._steps),
            )
        )
        self._hold(slots, given, total)
        if self._probing:
            self._answers = self._steps + REST
        if not total:
            self._rest = wait
        return budget  # type: ignore[no-any-return]

    def _all(self, slots: Ints, most: Ints) -> Ints:
        """All that there may be."""
        given = most.copy()
        self._held[slots] = given
        self._hold(slots, given, int(given.sum()))
        return given

    def _hold(self, slots: Ints, given: Ints, total: int) -> None:
        """It is so decided, for some steps; a probe is made once."""
        self._resting, self._given, self._since = slots, given, self._steps
        rows = len(slots) + total
        self._gives, self._size = total > 0, self.costs.size(rows)
        takes, host = self.costs.of(rows) + self._still, self._least + self._still
        self._hurries = host > NEARLY * takes
        self._rest = REST if self._hurries else KEEP

    def fit(self, slots: Ints, drafts: Ints, rows: int) -> Ints:
        """Which of the drafts that were asked for, now that the step has `rows` rows without them.

        Prompts have come into it: with them it may just not be of the size that drafts were chosen for.
        """
        total = rows + int(drafts.sum())
        over = total - max(self._size, self.costs.size(rows))
        if over <= 0 or self._free(total):
            return drafts
        if over < np.count_nonzero(drafts):
            return self._cut(slots, drafts, rows, over)
        fixed = np.where(self._fixed[slots], drafts, 0)
        if (fixed == drafts).all() or not self.costs.knows(rows):
            return drafts
        survival: Reals = self._belief[slots] @ POWERS[:, : int(drafts.max())]
        place = np.arange(1, survival.shape[1] + 1)
        # a probe is worth no rows of its own, but those that are left over
        survival = np.where(self._probed[slots][:, None] > 0, np.maximum(survival, 2 * WORTH), survival)
        survival = np.where(place <= (drafts - fixed)[:, None], survival, 0.0)
        gains = np.sort(survival[survival > WORTH])
        less: Ints = budget_kernels.choose(
            *(survival, self.costs.table, gains, rows + int(fixed.sum()), float(len(slots))),
            *(self._still, self._least, 0.0),
        )[0]
        return fixed + less

    def _cut(self, slots: Ints, drafts: Ints, rows: int, over: int) -> Ints:
        """Without those `over` of the last drafts of requests that are least likely to stand, if the step is
        the quicker for it. That is most of what `choose` would find, and far less work."""
        last = np.where(drafts > 0, self._last[slots], np.inf)
        cut = np.argpartition(last, over - 1)[:over]
        kept, price = self._tokens - float(last[cut].sum()), self._price
        total = rows + int(drafts.sum())
        if kept * (price(total) + self._still) <= self._tokens * (price(total - over) + self._still):
            return drafts
        fewer = drafts.copy()
        fewer[cut] -= 1
        return fewer

    def again(self, slots: Ints) -> Ints | None:
        """What was decided a moment ago, if that still holds; None: it is time to `take`.

        While nobody comes or goes, and `slots` is the very array of the last time, so is the answer.
        """
        if not self._rest or (slots is not self._resting and not self._hurries):
            return None
        self._rest -= 1
        self._steps += 1
        if slots is not self._resting:
            self._resting, self._given = slots, self._held[slots]
        return self._given

    def _asking(self, requests: int) -> float:
        return 0.0 if self.asked_apart else self.costs.asking(requests)

    def _price(self, rows: int) -> float:
        return max(self.costs.of(rows), self._least)

    def _free(self, rows: int) -> bool:
        """Is the device done with them before the host is with its part?"""
        return self.costs.of(rows) <= self._least

    def pay(self, slots: Ints, drafts: Ints, total: int) -> None:
        """A step is planned, with so many of them, `total` in all: those that were found and had room."""
        if not total and not np.count_nonzero(self.limit[slots]):
            return
        rows = len(slots) + total
        seconds = without = self._price(rows)
        if self._probing:
            probes = int(drafts[self._probed[slots] > 0].sum())
            without = self._price(rows - probes)
            if probes and probes == total:  # they alone were asked for
                seconds += self._asking(len(slots))
        self._purse += SHARE * (without + self._still) - (seconds - without)

    def record(self, slots: Ints, granted: Ints, accepted: Ints) -> None:
        """What became of a window each: rows set aside for drafts, and drafts that stood.

        A row that was set aside and had no draft in it did not stand.
        """
        self._news.append((slots, granted, accepted.copy(), self._steps <= self._answers))
        if not self._gives and np.count_nonzero(granted):
            self._rest = 0  # nothing was given, and there is news

    def _listen(self) -> None:
        """To what was recorded: all of it at once, before anything is decided by it."""
        for news in self._news:
            budget_kernels.hear(self._columns, *news)
        self._news.clear()
