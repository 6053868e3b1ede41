"""Steps in which nobody comes or goes: the next plan is the last one again, found without looking at anybody.

Most steps of a service are like that, and small models are quick: what the host spends on a plan must be
little. So when all that run decode it is worked out once how many tokens they can surely still have, and
until those are used up no request is looked at; with drafts, only how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.engine.budget import DraftBudgets
from draftproof.engine.sequence import HostColumns, Planned


@dataclass(slots=True)
class Calm:
    """For as long as the `version` of those that run is the plan's."""

    plan: Planned  # without drafts
    room: int  # tokens that anybody can have beyond the most it may have now: on its pages, before its end
    widest: int  # drafts that anybody may have

    @classmethod
    def after(cls, planned: Planned, host: HostColumns, budgets: DraftBudgets, page_size: int) -> Calm:
        """After a plan in which all that run decode."""
        lines = planned.slots
        ends = host.num_pages[lines] * page_size
        room = min(int((ends - host.most[lines]).min()), int((host.max_length - host.most)[lines].min()))
        return cls(planned.with_drafts(planned.nothing, 0), room, int(budgets.limit[lines].max()))

    def again(
        self, host: HostColumns, budgets: DraftBudgets, max_rows: int, lookahead: int
    ) -> Planned | None:
        """The next step, with the drafts that there are now; None if somebody may be short of room."""
        planned, count, widest = self.plan, 0, 0
        lines = planned.slots
        if self.widest:
            drafts = host.num_draft[lines]
            each = drafts.tolist()
            count, widest = sum(each), max(each)
        if self.room < max(1, widest + lookahead) or len(lines) + count > max_rows:
            return None
        self.room -= 1 + widest
        host.most[lines] += 1
        host.under_way[lines] += 1
        if count:
            planned = planned.with_drafts(drafts, count)
            host.most[lines] += drafts
            host.num_draft[lines] = 0
        if self.widest:
            budgets.pay(lines, planned.drafts)
        return planned
