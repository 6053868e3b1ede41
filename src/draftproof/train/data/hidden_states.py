"""Hidden states of the target for the texts: computed for every batch, or once and kept on the device.

Kept rows are computed before training, in an order that depends on the texts alone, so that a resumed run
computes the same bits again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.ops import Ops
from draftproof.train.data.dataset import Batch, Batches
from draftproof.train.model.target_forward import TargetModel, TargetStates


class TargetStateCache:
    """Target states; with `keep` all rows stay on the device, (layers + 1) * hidden numbers a token."""

    def __init__(
        self, target_model: TargetModel, batches: Batches, layers: tuple[int, ...], ops: Ops, keep: bool
    ) -> None:
        self.target_model, self.batches, self.layers, self.ops = target_model, batches, layers, ops
        self._rows: Tensor | None = None  # [tokens of all texts + 1, (layers + 1) * hidden]
        self.keep = keep

    def __call__(self, tokens: Tensor, stored: Tensor) -> TargetStates:
        """Return the states of a batch from its tokens [B, T] and its `places`, both on the device."""
        if not self.keep:
            return self.target_model(tokens, self.layers)
        rows = F.embedding(stored, self.compute_all())  # [B, T, (layers + 1) * hidden]
        wide = len(self.layers) * self.target_model.config.hidden_size
        return TargetStates(rows[..., :wide], rows[..., wide:])

    def compute_all(self) -> Tensor:
        """Return all rows, computed at the first call."""
        if self._rows is None:
            self._rows = self._compute()
        return self._rows

    def release(self) -> None:
        self._rows = None

    def places(self, batch: Batch) -> Tensor:
        """Return the stored row of each token [B, T]; padding has the last row. [0] without `keep`."""
        if not self.keep:
            return torch.zeros(0, dtype=torch.int64)
        column = torch.arange(batch.tokens.shape[1])[None, :]
        begins = torch.from_numpy(self.batches.begins[batch.which])[:, None]
        lengths = torch.from_numpy(batch.lengths)[:, None]
        return torch.where(column < lengths, begins + column, self.batches.begins[-1])

    def _compute(self) -> Tensor:
        hidden, total = self.target_model.config.hidden_size, int(self.batches.begins[-1])
        shape = (total + 1, (len(self.layers) + 1) * hidden)
        rows = torch.zeros(shape, dtype=self.target_model.dtype, device=self.target_model.device)
        for batch in self.batches.in_order():
            states = self.target_model(self.ops.runtime.send(torch.from_numpy(batch.tokens)), self.layers)
            both = torch.cat([states.features, states.hidden], dim=-1)
            for line, (which, length) in enumerate(zip(batch.which, batch.lengths.tolist(), strict=True)):
                begin = int(self.batches.begins[which])
                rows[begin : begin + length] = both[line, :length]
        return rows
