"""Device buffers of a step. They are allocated once and never move: captured graphs hold their addresses."""

from __future__ import annotations

from operator import is_

import numpy as np
import torch
from torch import Tensor

from draftproof.array_types import Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import ALIGN, Slots
from draftproof.engine.step.result_buffer import PackedResults, buffer_bytes
from draftproof.engine.step.step_features import LOGPROB_WIDTHS
from draftproof.ops import Layout, Ops, Rows
from draftproof.types import MAX_NAMED_IDS, TOKENS, Outcome, PlanColumns, Windows

NO_BUDGET = np.zeros(0, np.int64)
MAX_LAYOUTS = 16  # kept at once; prompts have steps of many sizes


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class PlanBuffer:
    """Device copy of the current step plan, sent only if the plan changed."""

    def __init__(self, num_slots: int, device: torch.device, ops: Ops) -> None:
        self._ops = ops
        self._device = torch.zeros((4, _padded(num_slots)), dtype=torch.int64, device=device)
        self._device[0] = -1
        self.columns = PlanColumns(*self._device[:, :num_slots])
        self._host = np.zeros(tuple(self._device.shape), np.int64)
        self._host_tensor = torch.from_numpy(self._host)  # shares memory with `_host`
        self._sent: bytes | None = None  # contents of the device copy; None: not known
        self._source: tuple[Ints, ...] = ()  # arrays that the sent plan was made of

    def load(self, planned: StepPlan | None, budget: Ints = NO_BUDGET) -> None:
        """Send a plan to the device unless it has the same arrays as the last one; None: an empty plan."""
        columns = (planned.slots, planned.chunk, planned.drafts, budget) if planned is not None else ()
        is_same = len(columns) == len(self._source) and all(map(is_, columns, self._source))
        if is_same and self._sent is not None:
            return
        table = self._host
        size = len(planned.slots) if planned is not None else 0
        for line, column in zip(table, columns, strict=False):
            line[:size] = column
        table[0, size:], table[1:, size:] = -1, 0
        plan = table.tobytes()
        if plan != self._sent:
            self._sent = None
            self._ops.runtime.send(self._host_tensor, self._device)
            self._sent = plan
        self._source = columns

    def invalidate(self) -> None:
        """Send the next plan in any case: the device copy was changed."""
        self._sent = None


class StepBuffers:
    """Row, window, result and mask buffers, sized for the largest step."""

    def __init__(self, slots: Slots, max_rows: int, max_logits: int, hidden_row: Tensor) -> None:
        """`hidden_row`: a tensor with the shape, dtype and device of one hidden row."""
        self._slots = slots
        columns, device = slots.columns, slots.device
        num_slots, k = columns.draft.shape

        def lines(number: int, size: int) -> Tensor:
            """Return [number, size] int64; every line is aligned for vector loads."""
            return torch.zeros((number, _padded(size)), dtype=torch.int64, device=device)[:, :size]

        self._rows, self._entries = lines(4, max_rows).unbind(), lines(3, num_slots).unbind()
        self._logits, self._picks = lines(5, max_logits).unbind(), lines(2, max_logits).unbind()
        self.logits_rows = self._logits[-1]  # [max_logits] row of the step that each logits row belongs to
        self.table_width = TOKENS + k + 1
        widths = LOGPROB_WIDTHS[-1], MAX_NAMED_IDS
        room = buffer_bytes(num_slots, self.table_width, k, max_logits, *widths)
        self.results = torch.zeros(room, dtype=torch.uint8, device=device)
        hidden_size = hidden_row.shape[-1]
        self.picked = hidden_row.new_zeros((max_logits, hidden_size))  # hidden rows that have logits
        # Hidden rows of the forward graph, outside the graphs' memory pool: they are read after the next
        # graph of the pool has run.
        asynchronous = slots.ops.runtime.asynchronous
        self.hidden = hidden_row.new_zeros((max_rows, hidden_size)) if asynchronous else None
        self.allowed: Tensor | None = None  # [S, K + 1, words]: grammar masks, allocated on first use
        self._layouts: dict[tuple[int, int], Layout] = {}  # by rows and logits rows

    def masks(self) -> Tensor:
        """Return the grammar masks [S, K + 1, ceil(V / 32)] int32, allocating them on the first call."""
        if self.allowed is None:
            num_slots, k = self._slots.columns.draft.shape
            shape = (num_slots, k + 1, -(-self._slots.vocab // 32))
            self.allowed = torch.full(shape, -1, dtype=torch.int32, device=self._slots.device)
        return self.allowed

    def layout(self, rows: int, logits: int, draft_probs: Tensor | None) -> Layout:
        """Return views of the buffers for a step of this size, the same object for most steps."""
        layout = self._layouts.get((rows, logits))
        if layout is None or not (
            layout.windows.draft_probs is draft_probs and layout.windows.allowed is self.allowed
        ):
            if len(self._layouts) == MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[rows, logits] = self._make_layout(rows, logits, draft_probs)
        return layout

    def _make_layout(self, rows: int, logits: int, draft_probs: Tensor | None) -> Layout:
        columns = self._slots.columns
        tokens, positions, slots, kv_index = (line[:rows] for line in self._rows)
        entry_slots, first, num_draft = self._entries
        slot, depth, position, draft, at = (line[:logits] for line in self._logits)
        return Layout(
            Rows(tokens, positions, slots, kv_index, columns.page_table),
            Windows(
                columns=columns,
                slots=entry_slots,
                first=first,
                num_draft=num_draft,
                slot=slot,
                depth=depth,
                position=position,
                draft=draft,
                draft_probs=draft_probs,
                allowed=self.allowed,
            ),
            at,
        )

    def outcome(self, entries: int, logits: int) -> tuple[Outcome, PackedResults]:
        """Return the outcome that a commit writes, and the step's results, which begin with it."""
        packed = PackedResults(self.results)
        table = packed.add_table(entries, self.table_width)
        return Outcome(table, *(line[:logits] for line in self._picks)), packed
