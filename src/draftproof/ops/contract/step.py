"""Contract of the step ops: rows of a step from the slots, commit of its tokens, storage of new drafts.

No op waits for the device, and shapes do not depend on the data, so a step can be captured. An entry with
slot -1 is padding: it changes nothing, and nothing is read for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from draftproof.ops.contract.types import Layout
from draftproof.types import Choice, Draft, DraftRanking, Outcome, PlanColumns, SlotColumns, Windows


class StepOps(ABC):
    """Op family that moves tokens between the slots and a step's rows."""

    @abstractmethod
    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        """Write the rows of a step from the slots, ragged, in the order of the plan's entries.

        An entry that has ended has no rows. An entry with `chunk` computes that many committed tokens from
        `computed` on and has no drafts. An entry without computes its newest token and then its drafts,
        min(plan.drafts, num_draft). An entry whose rows reach the newest committed token has a window:
        logits rows of that token and of every draft. Padding rows have slot -1, token, position and kv_index
        0, draft -1. Rows beyond R or L are not written; the scheduler guarantees that there are none.
        """

    @abstractmethod
    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        """Accept drafts, append the committed tokens to their slots, and write all of `out`.

        Drafts are accepted up to the first rejected one; then one more token is committed. Committed tokens
        end at the first end token, at max_length, and before the first row with bad [L] > 0, which ends the
        request with that code unless it ended before. Afterwards `computed` is length - 1 and num_draft 0.
        An entry without a window has its `computed` advanced by its chunk.
        """

    @abstractmethod
    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        """Store drafts for slots [B] in their columns.

        num_draft is the minimum of count, budget, what max_length leaves after one more token, and the
        number of tokens before the first outside the vocabulary.
        """

    def store_ranking(self, held: DraftRanking, slots: Tensor, ranking: DraftRanking | None) -> None:
        """Store the ranking of drafts for slots [B] in the lines [S + 1] of `held`; None: all have rank 0.

        The first T of the likeliest tokens are written. Padding may be written to the last line.
        """
        lines = torch.where(slots < 0, len(held.ranks) - 1, slots)
        if ranking is None:
            held.ranks.index_fill_(0, lines, 0)  # `ranks[lines] = 0` would copy from the host
            return
        held.ranks[lines] = ranking.ranks
        top = ranking.top_ids.shape[2]
        held.top_ids[lines, :, :top] = ranking.top_ids
        held.top_logprobs[lines, :, :top] = ranking.top_logprobs
