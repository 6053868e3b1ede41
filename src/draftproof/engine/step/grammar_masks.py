"""Requests with a grammar: their masks go to the device before a step, and what was committed back to them.

The masks of a step are known once the tokens before it are, so the host waits for the steps of such requests
and is not needed inside them: a step with masks is captured like any other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from draftproof.engine.drafting.budget import Bools, Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.engine.step.device_step import DeviceStep
from draftproof.types import FIRST_ROW, NUM_OUT, TOKENS

Complaints = Mapping[int, Mapping[int, str]]  # entry -> depth -> what its grammar's code raised


def send_masks(planned: StepPlan, slots: Slots, device: DeviceStep) -> Complaints:
    """Masks of every window of a request with a grammar. Nothing may be under way."""
    entries = [b for b, s in enumerate(planned.sequences) if s.guide is not None and planned.samples[b]]
    if not entries:
        return {}
    counts = planned.drafts[entries]
    draft = np.zeros((0, 0), np.int64)
    if counts.any():
        draft = device.ops.runtime.fetch(slots.columns.draft)().numpy()
    depths = slots.columns.draft.shape[1] + 1
    masks = torch.zeros((int((counts + 1).sum()), -(-slots.vocab // 32)), dtype=torch.int32)
    places: list[int] = []
    complaints, first = {}, 0
    for b, count in zip(entries, counts.tolist(), strict=True):
        guide, slot = planned.sequences[b].guide, int(planned.slots[b])
        assert guide is not None
        drafts = draft[slot, :count].tolist() if count else []
        errors = guide.fill(drafts, masks[first : first + count + 1])
        if errors:
            complaints[b] = errors
        places += range(slot * depths, slot * depths + count + 1)
        first += count + 1
    device.allow(torch.tensor(places), masks)
    return complaints


def take_in(planned: StepPlan, table: Ints, here: Bools) -> None:
    """What a step committed is said in the grammars too."""
    for b, sequence in enumerate(planned.sequences):
        if sequence.guide is not None and here[b]:
            sequence.guide.commit(table[b, TOKENS : TOKENS + int(table[b, NUM_OUT])].tolist())


def errors_of(
    line: Ints, errors: Mapping[int, str], complaints: Mapping[int, str] | None
) -> Mapping[int, str]:
    """By logits row, those of an entry's grammar among them."""
    if not complaints:
        return errors
    return {**errors, **{int(line[FIRST_ROW]) + depth: text for depth, text in complaints.items()}}
