"""Drafting with a model behind a step: the contract of what surrounds its forward passes.

All of it is worked out on the device and waits for nobody. A round is so short that every launch counts, so
what the rounds need beside the drafts themselves is made for all of them at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftproof.types import Rows, SlotColumns, Windows


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Where the drafts of B entries come to stand, round by round. int64, each line in one piece."""

    count: Tensor  # [B]: drafts that an entry is to have
    last_token: Tensor  # [B]: its last committed token
    slots: Tensor  # [rounds, B]: -1: the entry has no draft in this round
    output_index: Tensor  # [rounds, B]: index in the output of the draft: the key of its noise
    positions: Tensor  # [rounds, B]: of the row that it comes from
    kv_index: Tensor  # [rounds, B]: where K and V of that row are stored
    tokens: Tensor  # [K, B]: zeros; the drafts are written here


class Following(ABC):
    """A part of the ops contract. Padding, slot -1, changes nothing, and nothing is read for it."""

    @abstractmethod
    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        """The rows of a step that was committed, each with the token that follows it; [B] int64 places.

        A row whose next token is not committed becomes padding: slot -1, the rest 0. The place is that of
        an entry's row before its newest token: -1 if the step had none.
        """

    @abstractmethod
    def plan_draft_rows(
        self,
        columns: SlotColumns,
        slots: Tensor,  # [B] int64
        budget: Tensor,  # [B] int64
        last: Tensor,  # [B] int64: below 0: the model has not seen all that this entry has said
        rounds: int,
        lag: int,
        page_size: int,
    ) -> DraftRows:
        """Drafts are as many as budget, rounds and max_length (after one token more) allow; none for whoever
        has ended or is not ready. Draft j comes from the row at length - 1 - lag + j, or 0 if that is below.
        Where an entry has no draft: slot -1, the rest 0; `newest` is 0 where it has none at all."""

    @abstractmethod
    def lm_head_sample(
        self,
        x: Tensor,  # [R, hidden]
        at: Tensor | None,  # [B] int64: the row of x of each entry, below 0: any; None: R is B
        norm: Tensor,  # [hidden]
        eps: float,
        packed: Any,  # an LM head
        ids: Tensor | None,  # [N] int64: what its columns are in the vocabulary; None: all of it, in order
        windows: Windows,  # of B rows
        greedy: bool,
        out: Tensor,  # [B] int64
        sure: Tensor | None = None,  # [B] fp32
    ) -> Tensor:
        """`choose` of the logits of the norm of x into `out`; the rows [B, hidden] that it was taken of,
        anything where there is no slot.

        With `greedy` the temperature counts as 0. Ids that the head does not know are never chosen. Where
        logits are not finite: any number. Into `sure`, if given: the chance that the head itself gives what
        was chosen, at the temperature that counts, or at 1 where that is 0; anything where there is no slot.
        """
