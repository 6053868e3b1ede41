"""Grammar masks: sent to the device before a step, advanced by the tokens that the step committed.

The masks of a step depend on the tokens before it, so the host waits for the steps of requests with a
grammar. It is not needed within a step: a step with masks is captured like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

import numpy as np
import torch

from draftproof.array_types import Bools, Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.engine.step.device_step import DeviceStep
from draftproof.engine.step.mask_thread import MaskTask, MaskThread
from draftproof.engine.step.step_results import GrammarErrors
from draftproof.types import FIRST_ROW, NUM_OUT, TOKENS


def send_masks(planned: StepPlan, slots: Slots, device: DeviceStep, thread: MaskThread) -> GrammarErrors:
    """Send the masks of every window of a request with a grammar. No step may be in flight."""
    entries = [b for b, s in enumerate(planned.sequences) if s.guide is not None and planned.is_sampled[b]]
    if not entries:
        return {}
    counts = planned.drafts[entries]
    draft = np.zeros((0, 0), np.int64)
    if counts.any():
        draft = device.ops.runtime.fetch(slots.columns.draft)().numpy()
    depths = slots.columns.draft.shape[1] + 1
    tasks: list[MaskTask] = []
    places: list[int] = []
    for b, count in zip(entries, counts.tolist(), strict=True):
        guide, slot = planned.sequences[b].guide, int(planned.slots[b])
        assert guide is not None
        tasks.append(MaskTask(guide, draft[slot, :count].tolist() if count else []))
        places += range(slot * depths, slot * depths + count + 1)
    masks, errors = thread.fill(tasks, -(-slots.vocab // 32))
    device.set_masks(torch.tensor(places), masks)
    return {b: own for b, own in zip(entries, errors, strict=True) if own}


def commit_tokens(planned: StepPlan, table: Ints, is_current: Bools) -> None:
    """Advance the grammars by the tokens that a step committed. `is_current` [B]: entries still here."""
    for b, sequence in enumerate(planned.sequences):
        if sequence.guide is not None and is_current[b]:
            sequence.guide.commit(table[b, TOKENS : TOKENS + int(table[b, NUM_OUT])].tolist())


def errors_by_row(
    line: Many[int], errors: Mapping[int, str], grammar_errors: Mapping[int, str] | None
) -> Mapping[int, str]:
    """Return `errors` by logits row, with those of an entry's grammar; `line` of the outcome table."""
    if not grammar_errors:
        return errors
    return {**errors, **{line[FIRST_ROW] + depth: text for depth, text in grammar_errors.items()}}
