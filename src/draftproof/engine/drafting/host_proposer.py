"""What a proposer on the host is shown after a step: who is still here, and their hidden rows if it asks."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from torch import Tensor

from draftproof.arrays import Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.types import ProposeBatch


def batch_of(
    slots: Slots,
    planned: StepPlan,
    here: Many[int],
    computed: Ints,
    lengths: Ints,
    budget: Ints,
    hidden: Tensor | None,
) -> ProposeBatch:
    """`here`: entries of the step that are still in the engine; `lengths`: of all slots, after it.

    `hidden` [R, hidden] of all its rows: those whose input token is committed are given on.
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
