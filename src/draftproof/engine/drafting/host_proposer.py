"""Input of a host proposer after a step: the requests that are still there, and their hidden rows."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from torch import Tensor

from draftproof.arrays import Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.types import ProposeBatch


def propose_batch(
    slots: Slots,
    planned: StepPlan,
    here: Many[int],
    computed: Ints,
    lengths: Ints,
    budget: Ints,
    hidden: Tensor | None,
) -> ProposeBatch:
    """Build the batch of a host proposer.

    here: entries of the step whose requests are still there. lengths [S]: committed tokens after the step.
    hidden [R, hidden]: all rows of the step; those with a committed input token are passed on.
    """
    lines = planned.slots[here]
    starts: list[int] = []
    counts: list[int] = []
    if hidden is not None:
        rows = np.maximum(planned.chunk, 1) + planned.drafts
        index: list[int] = []
        for b in here:
            first, start = int(rows[:b].sum()), int(computed[b])
            stored = int(lengths[planned.slots[b]]) - 1 - start
            starts.append(start)
            counts.append(min(int(rows[b]), stored))
            index.extend(range(first, first + counts[-1]))
        hidden = hidden[index]
    return ProposeBatch(
        columns=slots.columns,
        slots=lines.tolist(),
        budget=budget.tolist(),
        lengths=lengths[lines].tolist(),
        hidden=hidden,
        hidden_start=starts,
        hidden_count=counts,
    )
