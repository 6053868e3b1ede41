"""Is it worth asking a model for drafts, where others of a hybrid have some?

A head's rounds take time whether its drafts are then the better ones or not. What they cost is told in
tokens: as many as the engine makes in that time. Where the device is waited for, a hybrid weighs that itself,
behind every step and round by round, against the drafts that its searches have just found; what a round
takes is clocked, since a busy machine makes what was timed at start worth little. Where steps are queued
ahead it is decided here, before the step, from what became of the last windows: while a search fills them and
its drafts stand to the last, nobody else is needed; and of the model it is remembered for each request what
it has brought. A newcomer is thought to be as those before it; whoever seems not to be worth the price is
hoped to be after a while. That hope is told in prices, not in tokens: where tokens come quickly the price is
high, and a hope below it would never be tested. What it costs was timed at start; steps with its drafts and
without say it better (`costs`). Where the host would often be late without them its rounds cost less, since a
device that is done sooner soon has nothing to do; by how much it is late is not known, so half of the price
is always asked. The budgets leave it to this: a search's drafts do not cost it.

How many rounds it is asked for is decided here too, where several numbers of them are captured: behind the
model's last draft a search goes on, and what it finds there costs no round.

A model without others that ends its chains itself (`Proposer.ends_chains`) is told the same prices; whether
it is asked at all is left to the budgets.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from draftproof.engine.drafting.budget import Bools, Ints
from draftproof.engine.drafting.device_proposer import Drafting
from draftproof.engine.drafting.draft_gate_kernels import heard, hoped, worth_it
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import StepPlan
from draftproof.propose import Proposer

FOLLOW = 1 / 32  # of a step in what steps bring and take
SLOW = 3.0  # times what was usual: by how much more does not matter
KEEPS_UP = 1 / 8  # of what drafts take with a model, that they take without: while that is not known
USUAL = 1 / 32  # of a step's windows in what it brings anybody
LEAST = 0.5  # of its price, where the host is always late
HOPE = 1.2  # times its price, that it may bring a request of which nothing is known
STANDS, GOES_ON = 2 / 3, 1 / 2  # of a model's drafts, and of those that a search has behind them: as is hoped
HOPES = 1 / 512  # of that hope, with a step for which all rounds are wanted


class Asking:
    """One line a slot. Without prices a model is always asked."""

    @classmethod
    def of(cls, proposer: Proposer | None, scheduler: Scheduler, drafting: Drafting) -> Asking | None:
        """None: there is nothing to choose."""
        if proposer is None or proposer.weighed < 0 and not proposer.ends_chains:
            return None
        return cls(scheduler, drafting, max(0, proposer.weighed), proposer.search >= 0)

    def __init__(self, scheduler: Scheduler, drafting: Drafting, model: int, searches: bool = True) -> None:
        """`model`: which of the sources it is. `searches`: another goes on from its drafts."""
        num_slots = len(drafting.slots.requests)
        self.priced = False  # is it known what steps and asking cost?
        self.scheduler, self.drafting = scheduler, drafting
        self._ahead = drafting.slots.ops.runtime.asynchronous
        self._model = model
        self._brings = np.ones(num_slots)  # tokens a window that nobody else would have brought
        self._usual = 1.0  # the same of anybody lately
        self._price = 0.0  # of the last step that was weighed, for each of its requests
        # of the model's drafts that are reached, how many stand, and of a search's behind them: of anybody
        self._goes_on = GOES_ON * searches
        self._chain = np.array([STANDS, self._goes_on])
        self._copies = np.zeros(num_slots, np.bool_)  # a search's last window was full and stood to the last
        # of a step, lately: tokens of each request, of which there may be fewer now; seconds, by the clock or
        # by the prices
        self._tokens = self._spent = 0.0
        self._without = self._round = 0.0  # seconds for drafts without the model, and more for a round of it
        self._was_asked = False  # for the drafts of the next step that is heard of
        self._mark = 0.0  # when the last step was heard of

    def price(self, seconds: float, requests: int) -> float:
        """What so much time is worth to so many, in tokens."""
        return seconds * requests * self._tokens / self._spent if self.priced and self._spent else 0.0

    def weigh(self, planned: StepPlan, budget: Ints, late: float = 0.0) -> None:
        """Before a step: shall the model be asked behind it? If that is seen there: at what price? `late`: of
        the steps without it, for how many the device is done before the host."""
        for sequence in planned.admitted:
            self._brings[sequence.slot] = max(self._usual, HOPE * self._price)
            self._copies[sequence.slot] = False
        drafting, costs, count = self.drafting, self.scheduler.budgets.costs, len(planned.slots)
        drafting.asks, drafting.price, drafting.verify = True, 0.0, 0.0
        drafting.most = drafting.k
        if not self.priced or not all(sequence.adaptive for sequence in planned.sequences):
            return  # somebody is to have all the drafts there can be
        if not self._ahead:
            seconds = self._round, costs.another(planned.num_rows)
            drafting.price, drafting.verify = (self.price(each, count) for each in seconds)
            return
        share, most = max(LEAST, 1 - late), int(budget.max(initial=0))
        if each := self.price(share * costs.round(count), count) / count:
            drafting.most = worth_it(self._chain, most, each)
            if drafting.most >= most:  # and nothing will be heard of a search behind them
                self._chain[1] += HOPES * max(self._goes_on - self._chain[1], 0.0)
        fewer = drafting.fewer(count, min(most, drafting.most), planned.has_prompts)
        price = self.price(share * costs.asks(count, fewer), count)  # a captured step knows of none
        self._price = price / count
        drafting.asks = not price or hoped(planned.slots, budget, self._copies, self._brings) > price

    def hear(
        self,
        planned: StepPlan,
        table: Ints,
        sources: NDArray[np.int8],
        here: Bools,
        asked: int,
        fewer: int = 0,
        waited: bool = False,
    ) -> None:
        """What a step did, behind which the model was `asked` for so many, in so many rounds `fewer`.

        `here`: entries that are still those that were planned. `waited`: it was planned with the drafts that
        there were, and says nothing of a search that had none.
        """
        if not self.priced:
            return
        now, mark = time.perf_counter(), self._mark
        self._mark = now
        was_asked, self._was_asked = self._was_asked, asked > 0
        tokens, windows, brought = heard(
            *(table, sources, planned.slots, here, self.scheduler.budgets.limit, self._model),
            *(was_asked, HOPE * self._price, self._brings, self._copies),
            *(planned.zeros if waited else planned.drafts, self._chain),
        )
        if windows:
            self._usual += USUAL * (brought / windows - self._usual)
        if not planned.has_prompts:
            spent, scheduler, drafting = now - mark, self.scheduler, self.drafting
            if self._ahead:
                keys = int(scheduler.mirror.length[planned.slots].sum())
                costs = scheduler.budgets.costs
                spent = costs.takes(planned.num_rows, keys) + costs.asks(asked, fewer)
            elif drafting.rounds:  # of the last drafts: where steps overlap, not those behind this one
                each = drafting.took - (self._without or KEEPS_UP * drafting.took)
                self._round = _followed(self._round, max(0.0, each) / drafting.rounds)
            else:
                self._without = _followed(self._without, drafting.took)
            self._spent = _followed(self._spent, spent)
            self._tokens = _followed(self._tokens, tokens / len(table))


def _followed(usual: float, now: float) -> float:
    return usual + FOLLOW * (min(now, SLOW * usual) - usual) if usual else now
