"""Pooling of the hidden rows of prompts, for requests whose result is an embedding.

The rows are those after the last norm. The host adds them one by one, so the bits of a mean do not depend on
chunks, batches or preemptions.
"""

from __future__ import annotations

from torch import Tensor

from draftproof.array_types import Floats64, Ints
from draftproof.engine.sequence import PooledRows
from draftproof.engine.step.device_step import DeviceStep, PendingStep
from draftproof.types import FIRST_ROW


def pool_rows(device: DeviceStep, step: PendingStep, table: Ints) -> dict[int, PooledRows]:
    """Return the sums of pooled rows after a step, by entry; `table`: the outcome [B, _]."""
    pooled, planned = {}, step.planned
    for b, sequence in enumerate(planned.sequences):
        kind = sequence.request.pooling
        if kind == "mean":
            pooled[b] = sequence.pooled.plus(_unread_rows(step, b))
        elif kind == "last" and planned.is_sampled[b]:
            row = int(table[b, FIRST_ROW])
            pooled[b] = PooledRows().plus(_on_host(device.buffers.picked[row : row + 1]))
    return pooled


def _unread_rows(step: PendingStep, b: int) -> Floats64:
    """Return the hidden rows of a chunk [n, hidden] without those that were added before a preemption."""
    assert step.hidden is not None and step.computed is not None
    start, end, offset = step.planned.chunk_rows(b, step.computed)
    count = step.planned.sequences[b].pooled.count
    assert start <= count
    return _on_host(step.hidden[offset + count : offset + end])


def _on_host(rows: Tensor) -> Floats64:
    copied: Floats64 = rows.double().cpu().numpy()
    return copied
