"""What the target says of the texts: computed whenever it is needed, or once, and kept on the device.

Kept rows are computed before training, in an order that depends on the texts alone: a run that goes on after
a cut computes them again and has the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.ops import Ops
from draftproof.train.data.dataset import Batch, Batches
from draftproof.train.model.target import Lesson, Teacher


class Lessons:
    """`keep`: all rows stay on the device, (layers + 1) * hidden numbers a token."""

    def __init__(
        self, teacher: Teacher, batches: Batches, layers: tuple[int, ...], ops: Ops, keep: bool
    ) -> None:
        self.teacher, self.batches, self.layers, self.ops = teacher, batches, layers, ops
        self._rows: Tensor | None = None  # [tokens of all texts + 1, (layers + 1) * hidden]
        self.keep = keep

    def __call__(self, tokens: Tensor, stored: Tensor) -> Lesson:
        """tokens [B, T]: those of a batch; stored: its places. Both on the device."""
        if not self.keep:
            return self.teacher(tokens, self.layers)
        rows = F.embedding(stored, self.remember())  # [B, T, (layers + 1) * hidden]
        wide = len(self.layers) * self.teacher.config.hidden_size
        return Lesson(rows[..., :wide], rows[..., wide:])

    def remember(self) -> Tensor:
        """All rows; computed if they are not there."""
        if self._rows is None:
            self._rows = self._compute()
        return self._rows

    def forget(self) -> None:
        self._rows = None

    def places(self, batch: Batch) -> Tensor:
        """[B, T]: where the rows of each text stand; those beyond its end have the last place. [0]: nothing
        is kept."""
        if not self.keep:
            return torch.zeros(0, dtype=torch.int64)
        column = torch.arange(batch.tokens.shape[1])[None, :]
        begins = torch.from_numpy(self.batches.begins[batch.which])[:, None]
        lengths = torch.from_numpy(batch.lengths)[:, None]
        return torch.where(column < lengths, begins + column, self.batches.begins[-1])

    def _compute(self) -> Tensor:
        hidden, total = self.teacher.config.hidden_size, int(self.batches.begins[-1])
        shape = (total + 1, (len(self.layers) + 1) * hidden)
        rows = torch.zeros(shape, dtype=self.teacher.dtype, device=self.teacher.device)
        for batch in self.batches.in_order():
            lesson = self.teacher(self.ops.runtime.send(torch.from_numpy(batch.tokens)), self.layers)
            both = torch.cat([lesson.features, lesson.hidden], dim=-1)
            for line, (which, length) in enumerate(zip(batch.which, batch.lengths.tolist(), strict=True)):
                begin = int(self.batches.begins[which])
                rows[begin : begin + length] = both[line, :length]
        return rows
