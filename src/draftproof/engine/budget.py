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

from draftproof.config import MAX_SPECULATIVE_TOKENS
from draftproof.engine.clocked import Reals
from draftproof.engine.costs import RowCosts

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# A belief is one weight for each of these chances that a draft stands whose predecessors stood.
RATES = np.array([0.005, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99])
POWERS = RATES ** np.arange(MAX_SPECULATIVE_TOKENS + 1)[:, None]  # [n, rates]: n drafts stand
MANY = 255  # more are not counted: a belief is as firm with these
STOOD, FELL = (np.power(chance, np.arange(MANY + 1)[:, None]) for chance in (RATES, 1 - RATES))
LEAST = 0.002  # what is never quite ruled out of what the engine expects of a newcomer
LEARN = 1 / 32  # weight of a newcomer's window in that
NEW = 32  # windows for which a request counts as a newcomer: a long one is still one request
FADE = 0.02  # of a belief, at every step
WORTH = 0.01  # a draft that is less likely to stand is not given, but for a probe
SHARE = 0.01  # of the time, for probes
SAVED = 64  # steps for which the purse may fill up
REST = 8  # steps in which nothing is decided anew, at most
KEEP = 3  # such steps where somebody is, and the host has time
NEARLY = 0.7  # of what the device takes, that the host may surely take and still has time
AT_ONCE = -1  # before everybody whose turn it is


class DraftBudgets:
    """One line a slot, and whole columns at a time: a step asks for all its requests at once."""

    def __init__(self, num_slots: int, costs: RowCosts) -> None:
        self.costs = costs
        self.asked_apart = False  # is what drafts cost before they are verified weighed elsewhere (`Asking`)?
        self.limit, self._windows, self._turn, self._reach = np.zeros((4, num_slots), np.int64)
        self._fixed, self._probed = np.zeros((2, num_slots), np.bool_)
        self._probing = False  # is anybody probed?
        self._answers = 0  # step by which those that were have been told
        # since the last decision: windows that were told, drafts that stood, and windows of which one fell
        self._told, self._stood, self._fell = np.zeros((3, num_slots), np.int64)
        self._newcomer = np.full(len(RATES), 1 / len(RATES))
        self._belief = np.tile(self._newcomer, (num_slots, 1))  # [S, rates]
        self._purse = 0.0  # in the time of empty steps
        self._still = 0.0  # what the last step that was asked about costs beside its rows
        self._least = 0.0  # what its rows cost at least
        self._steps = 0
        # what was decided holds for some steps: how many are left of those, since when, the size of the step
        # that it was for, what each slot has, those that asked last and what they were given
        self._rest = self._since = self._size = 0
        self._held = np.zeros(num_slots, np.int64)
        self._last = np.zeros(num_slots)  # how likely the last draft that each slot has is to stand
        self._likely = np.inf  # of all that anybody has the least
        self._tokens = 1.0  # that the step brings
        self._resting = self._given = np.zeros(0, np.int64)
        self._first = 0  # what a newcomer has meanwhile
        self._gives = False  # does anybody have any?
        self._hurries = False  # has the host no time to decide?

    def start(self, slot: int, limit: int, adaptive: bool) -> None:
        """A request that may have `limit` drafts sits down; not adaptive: it always has them."""
        self.limit[slot], self._fixed[slot] = limit, not adaptive
        self._windows[slot] = self._turn[slot] = self._probed[slot] = 0
        self._reach[slot] = 1
        self._belief[slot] = self._newcomer
        self._told[slot] = self._stood[slot] = self._fell[slot] = 0
        self._held[slot] = min(self._first, limit) if adaptive else limit
        self._last[slot] = self._likely if adaptive else np.inf
        if not self._gives:
            self._rest = 0

    def take(self, slots: Ints, most: Ints, keys: int) -> Ints:
        """Drafts allowed to each in the coming step, of the `most` that there may be.

        `keys`: tokens that these requests have stored.
        """
        self._steps += 1
        fixed = self._fixed[slots]
        num_fixed = np.count_nonzero(fixed)
        budget = np.where(fixed, most, 0) if num_fixed else np.zeros_like(most)
        if num_fixed == len(slots):
            return self._hold(slots, budget)
        self._still = self.costs.still(keys)
        self._least = self.costs.least(self._still)
        self._probed[slots], self._probing = False, False
        asking = 0.0 if num_fixed else self._asking(len(slots))
        if not asking and self._free(len(slots) + int(most.sum())):  # all that there may be
            self._first, self._likely = MAX_SPECULATIVE_TOKENS, 0.0
            return self._hold(slots, most.copy())
        limit = most - budget if num_fixed else most  # what is still to be decided
        survival = self._survival(slots, int(most.max(initial=1)))
        place = np.arange(1, survival.shape[1] + 1)
        rows, tokens = len(slots), float(len(slots))
        if num_fixed:
            rows += int(budget.sum())
            tokens += float(survival[place <= budget[:, None]].sum())
        open_to = np.where(place <= limit[:, None], survival, 0.0)
        more, gained, self._likely = self._afford(rows, tokens, open_to, asking)
        budget += more
        self._tokens = tokens + gained
        self._first = int(np.count_nonzero(POWERS[1:] @ self._newcomer >= self._likely))
        last = survival[np.arange(len(slots)), np.maximum(budget, 1) - 1]
        self._last[slots] = np.where(fixed, np.inf, last) if num_fixed else last
        given = self._hold(slots, budget.copy())  # a probe is made once
        self._probe(slots, budget, limit)
        if not self._gives:
            self._rest = 0 if np.count_nonzero(budget) else self._until_probe(slots)
        return budget if self._probing else given

    def _hold(self, slots: Ints, given: Ints) -> Ints:
        """It is so decided, for some steps."""
        self._resting, self._given, self._since = slots, given, self._steps
        self._held[slots] = given
        rows = len(slots) + int(given.sum())
        self._gives, self._size = rows > len(slots), self.costs.size(rows)
        takes, host = self.costs.of(rows) + self._still, self._least + self._still
        self._hurries = host > NEARLY * takes
        self._rest = REST if self._hurries else KEEP
        return given

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
        survival: Reals = self._belief[slots] @ POWERS[1 : int(drafts.max()) + 1].T
        place = np.arange(1, survival.shape[1] + 1)
        # a probe is worth no rows of its own, but those that are left over
        survival = np.where(self._probed[slots][:, None], np.maximum(survival, 2 * WORTH), survival)
        survival = np.where(place <= (drafts - fixed)[:, None], survival, 0.0)
        return fixed + self._afford(rows + int(fixed.sum()), float(len(slots)), survival)[0]

    def _cut(self, slots: Ints, drafts: Ints, rows: int, over: int) -> Ints:
        """Without those `over` of the last drafts of requests that are least likely to stand, if the step is
        the quicker for it. That is most of what `_afford` would find, and far less work."""
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

    def _until_probe(self, slots: Ints) -> int:
        """Nobody was given a draft, or a probe. For how many steps will there be no money for one?"""
        room, price = self._beyond(len(slots), 0)
        saves = SHARE * (self._price(len(slots)) + self._still)
        if AT_ONCE not in self._turn[slots]:
            price *= 2
        if not room or price <= self._purse or saves <= 0:
            return 0
        return min(REST, int((price - self._purse) / saves))

    def _beyond(self, requests: int, given: int) -> tuple[int, float]:
        """Rows that a step has for probes beside the drafts that are given, and what they cost."""
        room = self.costs.beyond(requests + given)
        price = self._price(requests + given + room) - self._price(requests + given)
        return room, price if given else price + self._asking(requests)

    def _asking(self, requests: int) -> float:
        return 0.0 if self.asked_apart else self.costs.asking(requests)

    def _price(self, rows: int) -> float:
        return max(self.costs.of(rows), self._least)

    def _free(self, rows: int) -> bool:
        """Is the device done with them before the host is with its part?"""
        return self.costs.of(rows) <= self._least

    def pay(self, slots: Ints, drafts: Ints) -> None:
        """A step is planned, with so many of them: those that were found and had room."""
        if not np.count_nonzero(drafts):
            if np.count_nonzero(self.limit[slots]):
                self._purse += SHARE * (self._price(len(slots)) + self._still)
            return
        rows = len(slots) + int(drafts.sum())
        seconds = self._price(rows)
        if not self._probing:
            self._purse += SHARE * (seconds + self._still)
            return
        probes = int(drafts[self._probed[slots]].sum())
        without = self._price(rows - probes)
        if probes == rows - len(slots):  # they alone were asked for
            seconds += self._asking(len(slots))
        self._purse += SHARE * (without + self._still) - (seconds - without)

    def record(self, slots: Ints, granted: Ints, accepted: Ints) -> None:
        """What became of a window each: rows set aside for drafts, and drafts that stood.

        A row that was set aside and had no draft in it did not stand.
        """
        if not self._gives and np.count_nonzero(granted):
            self._rest = 0  # nothing was given, and there is news
        fell, told = accepted < granted, granted > 0
        self._stood[slots] += accepted
        self._fell[slots] += fell
        self._told[slots] += told
        if self._steps <= self._answers:
            probes = told & (self._held[slots] == 0)
            whole = slots[probes & ~fell]  # another at once, of twice the length
            self._reach[slots[probes]] = 1
            self._reach[whole] = np.minimum(2 * granted[probes & ~fell], self.limit[whole])
            self._turn[whole] = AT_ONCE

    def _learn(self, slots: Ints, belief: Reals) -> Reals:
        """[B, rates] beliefs with what was recorded since the last time, and of newcomers as well."""
        told = self._told[slots]
        if not np.count_nonzero(told):
            return belief
        stood, fell = self._stood[slots], self._fell[slots]
        self._told[slots] = self._stood[slots] = self._fell[slots] = 0
        belief *= STOOD[np.minimum(stood, MANY)]
        belief *= FELL[np.minimum(fell, MANY)]
        belief /= belief.sum(1, keepdims=True)
        windows = self._windows[slots]
        self._windows[slots] = windows + told
        new = np.where(windows < NEW, told, 0)
        num_new = int(new.sum())
        if num_new:
            keep = (1 - LEARN) ** num_new
            expected = np.maximum(keep * self._newcomer + (1 - keep) / num_new * (new @ belief), LEAST)
            self._newcomer = expected / expected.sum()
        return belief

    def _survival(self, slots: Ints, most: int) -> Reals:
        """[B, K] how likely each draft is to be reached and to stand; falls along K."""
        belief = self._learn(slots, self._belief[slots])
        belief += (1 - (1 - FADE) ** (self._steps - self._since)) * (self._newcomer - belief)
        self._belief[slots] = belief
        survival: Reals = belief @ POWERS[1 : most + 1].T
        return survival

    def _afford(
        self, rows: int, tokens: float, survival: Reals, asking: float = 0.0
    ) -> tuple[Ints, float, float]:
        """[B] the drafts that make the most tokens a second, beside `rows` rows that bring `tokens`; what
        they bring, and how likely the least of them is to stand."""
        gains = survival[survival > WORTH]
        gains.sort()
        gains = gains[::-1]
        count = self.costs.best(rows, self._still, tokens, gains, asking, self._least)
        if count == 0:
            return np.zeros(len(survival), np.int64), 0.0, np.inf
        least = float(gains[count - 1])
        budget: Ints = (survival >= least).sum(1, dtype=np.int64)
        over = int(budget.sum()) - count
        if over:  # ties: the last of them go without
            ties = np.flatnonzero((survival == least).any(1))
            budget[ties[-over:]] -= 1
        return budget, float(gains[:count].sum()), least

    def _probe(self, slots: Ints, budget: Ints, limit: Ints) -> None:
        """A few drafts for those who have none and waited longest, as many as a step has room for that is
        one size larger; if there is money for it. `budget` is added to."""
        room, price = self._beyond(len(slots), int(budget.sum()))
        saved = SAVED * SHARE * (self._price(len(slots)) + self._still)
        self._purse = min(self._purse, max(2 * price, saved))
        if not room or price > self._purse:
            return
        idle = (budget == 0) & (limit > 0)
        if 2 * price > self._purse:  # what is left is for those whose last probe stood
            idle &= self._turn[slots] == AT_ONCE
        who = idle.nonzero()[0]
        if not len(who):
            return
        who = who[np.argsort(self._turn[slots[who]], kind="stable")]
        reach = np.minimum(np.minimum(self._reach[slots], limit)[who], room)
        count = max(1, int(np.searchsorted(np.cumsum(reach), room, side="right")))
        chosen = who[:count]
        budget[chosen] = reach[:count]
        self._turn[slots[chosen]] = self._steps
        self._probed[slots[chosen]] = self._probing = True
        self._answers = self._steps + REST
        self._last[slots[chosen]] = 2 * WORTH  # it is worth no rows of its own, but those that are left over
