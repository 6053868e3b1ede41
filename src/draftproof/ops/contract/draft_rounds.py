"""Contract of the ops around the forward passes of a draft model.

Every op runs on the device and waits for nothing. A draft round is so short that each launch counts, so
what the rounds need besides the drafts themselves is computed for all rounds at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.types import DeviceBatch, Rows, SlotColumns, Windows


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of the draft model for B entries, round by round. int64, each row of a tensor contiguous."""

    count: Tensor  # [B]: number of drafts of an entry
    last_token: Tensor  # [B]: newest committed token
    slots: Tensor  # [rounds, B]: -1: the entry has no draft in this round
    output_index: Tensor  # [rounds, B]: index of the draft in the output, the position of its noise
    positions: Tensor  # [rounds, B]: position of the row that produces the draft
    kv_index: Tensor  # [rounds, B]: where K and V of that row are stored
    tokens: Tensor  # [K, B]: zeros; the drafts are written here


class DraftRoundOps(ABC):
    """Op family of draft rounds. Padding, slot -1, changes nothing, and nothing is read for it."""

    def join_features(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Store `parts` [R, …] side by side in the first R rows of `out`."""
        torch.cat(tuple(parts), 1, out=out[: parts[0].shape[0]])

    @abstractmethod
    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        """Pair the rows of a committed step with the tokens that follow them.

        Result: the rows with their next tokens, and for each entry [B] int64 the index of its row before its
        newest token (-1 if the step had none). A row whose next token is not committed becomes padding:
        slot -1, the rest 0.
        """

    def head_rows(
        self, rows: Rows, columns: SlotColumns, slots: Tensor, features: Tensor
    ) -> tuple[Rows, Tensor, Tensor]:
        """Return `shift_rows` and the features [R, F] of its rows, without padding if the host waits."""
        return *self.shift_rows(rows, columns, slots), features

    @abstractmethod
    def plan_draft_rows(
        self, batch: DeviceBatch, last: Tensor, rounds: int, lag: int, page_size: int
    ) -> DraftRows:
        """Compute the rows of all rounds.

        last [B] int64 is negative where the draft model has not processed all tokens of an entry.

        The number of drafts is limited by budget, rounds and max_length (after one more token); it is 0 for
        entries that have ended or have a negative `last`. Draft j comes from the row at position
        length - 1 - lag + j, at least 0. Without a draft the slot is -1 and the rest 0; `last_token` is 0
        for an entry without any draft.
        """

    @abstractmethod
    def lm_head_sample(
        self,
        x: Tensor,  # [R, hidden]
        at: Tensor | None,  # [B] int64: row of x of each entry, negative: any; None: R is B
        norm: Tensor,  # [hidden]
        eps: float,
        packed: Any,  # an LM head
        ids: Tensor | None,  # [N] int64: vocabulary ids of the head's columns; None: all ids, in order
        windows: Windows,  # B rows
        greedy: bool,
        out: Tensor,  # [B] int64
        draft_prob: Tensor | None = None,  # [B] fp32
        logits: Tensor | None = None,  # [B, N] fp32
    ) -> Tensor:
        """Norm the rows, apply the LM head, sample one token per entry into `out`.

        Returns the rows of x [B, hidden] that were used, undefined for padding. With `greedy` the
        temperature counts as 0. Ids outside `ids` are never sampled. Logits that are not finite give any
        token. `draft_prob`, if given, receives the draft model's probability of the sampled token, at the
        row's temperature, or at 1 for a greedy row; undefined for padding. `logits`, if given, receives the
        logits of the head's columns, with the bits of `linear` on normed rows; undefined for padding.
        """
