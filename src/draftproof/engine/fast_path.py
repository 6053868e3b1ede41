"""Steps in which nobody comes and no prompt is left: planned without looking at pages and queues.

Most steps of a service are like that, and small models are quick: what the host spends on a plan must be
little. When all that run decode it is worked out once how many tokens they can surely still have, and until
those are used up no request is looked at; with drafts, only how many there are. At a large batch somebody
leaves, or is about to, in every other step: then they are looked at, all at once, if everybody has room.
"""

from __future__ import annotations

import numpy as np

from draftproof.arrays import Ints
from draftproof.engine.drafting.policy import DraftPolicy
from draftproof.engine.sequence import Sequence, SlotMirror, StepPlan


class FastPath:
    """Plans of such steps, until one of them needs a closer look."""

    def __init__(
        self, host: SlotMirror, policy: DraftPolicy, page_size: int, max_rows: int, lookahead: int
    ) -> None:
        self.mirror, self.policy, self.page_size = host, policy, page_size
        self.max_rows, self.lookahead = max_rows, lookahead
        self._plan: StepPlan | None = None  # without drafts; None: the last step was not calm
        self._room = 0  # tokens that anybody can surely have beyond the most it may have now
        self._widest = 0  # drafts that anybody may have

    def plan(self, running: list[Sequence], lines: Ints, version: int) -> StepPlan | None:
        """The next step of those that run, in these slots, if nobody comes; None: look closer."""
        last = self._plan
        planned = self._again(last) if last is not None and last.version == version else None
        return planned or self._among_themselves(running, lines, version)

    def after(self, planned: StepPlan | None) -> None:
        """A plan was made in which all that run decode; None: they do not."""
        self._plan = None
        if planned is None:
            return
        host, lines = self.mirror, planned.slots
        self._plan = planned.with_drafts(planned.zeros, 0)
        room = np.minimum(host.num_pages[lines] * self.page_size, host.max_length[lines])
        self._room = int((room - host.max_committed[lines]).min())
        self._widest = int(self.policy.limit[lines].max())

    def far_from_ends(self, lines: Ints) -> bool:
        """Can nobody in these slots come to an end in the next step, whatever stands?"""
        return self._plan is not None and self._plan.slots is lines and self._room > self._widest

    def _again(self, planned: StepPlan) -> StepPlan | None:
        """The last step once more, with the drafts there are now; None if somebody may be short of room."""
        host, count, widest = self.mirror, 0, 0
        lines = planned.slots
        if self._widest:
            drafts = host.num_draft[lines]
            each = drafts.tolist()
            count, widest = sum(each), max(each)
        if self._room < max(1, widest + self.lookahead) or len(lines) + count > self.max_rows:
            return None
        self._room -= 1 + widest
        host.max_committed[lines] += 1
        host.in_flight[lines] += 1
        if count:
            planned = planned.with_drafts(drafts, count)
            host.max_committed[lines] += drafts
            host.num_draft[lines] = 0
        return planned

    def _among_themselves(self, running: list[Sequence], lines: Ints, version: int) -> StepPlan | None:
        """Those that are not about to end. None if there are prompts, or not enough pages or rows."""
        host, sequences = self.mirror, list(running)
        if np.count_nonzero(host.prompt_left[lines]):
            return None
        ends, most = host.max_length[lines], host.max_committed[lines]
        decodes = host.length[lines] + host.in_flight[lines] < ends
        all_do = np.count_nonzero(decodes) == len(lines)
        if not all_do:
            at = decodes.nonzero()[0]
            lines, ends, most = lines[at], ends[at], most[at]
            sequences = [sequences[i] for i in at.tolist()]
        drafts = host.num_draft[lines]
        count, pages = int(drafts.sum()), host.num_pages[lines] * self.page_size
        most += drafts
        short = np.count_nonzero(np.minimum(most + self.lookahead, ends) > pages)
        if not sequences or short or len(lines) + count > self.max_rows:
            return None
        host.max_committed[lines], host.num_draft[lines] = most + 1, 0
        host.in_flight[lines] += 1
        nothing, requests = np.zeros_like(lines), [s.request for s in sequences]
        samples, generations = np.ones(len(lines), np.bool_), host.generation[lines]
        planned = StepPlan(
            *(sequences, requests, lines, nothing, drafts, samples, generations, version),
            *(len(lines) + count, count, False, nothing),
        )
        self.after(planned if all_do else None)
        return planned
