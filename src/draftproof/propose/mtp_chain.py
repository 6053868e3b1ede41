"""Chain of MTP layers: layer k makes draft k from the rows of layer k - 1, the last layer all further drafts.

Row p of layer k has the row p of layer k - 1 as its feature (of the target for k = 0) and the token at
p + k + 1, as DeepSeek-V3's report defines them. A step whose rows end at the newest token therefore gives
layer k rows that end k positions earlier. The last k rows before a draft depend on drafts: each round
computes them, and the next step computes them again from the committed tokens.

Of the last row of a step every layer but the last keeps its output for the next step. Behind a prefix cache
hit there is none: the rows that need it keep the K and V of the request that computed the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.models.draft_head.model import DraftHeadModel
from draftproof.propose.base import ProposerEnv
from draftproof.propose.draft_rounds import DraftRounds
from draftproof.types import Rows


@dataclass(frozen=True, slots=True)
class ChainRows:
    """Rows that a layer gives the next one, and which of them are known."""

    feature: Tensor  # [R, hidden]
    is_known: Tensor  # [R] bool

    def at(self, rows: Tensor) -> ChainRows:
        """Return the rows with these indices [B]."""
        return ChainRows(self.feature[rows], self.is_known[rows])

    def before(self, others: ChainRows, entries: int) -> ChainRows:
        """Return a row of each entry, then the others of the entry: [B] and [B * n] -> [B * (n + 1)]."""
        hidden = self.feature.shape[-1]
        feature = torch.cat([self.feature[:, None], others.feature.reshape(entries, -1, hidden)], 1)
        is_known = torch.cat([self.is_known[:, None], others.is_known.reshape(entries, -1)], 1)
        return ChainRows(feature.view(-1, hidden), is_known.view(-1))

    def last_of(self, entries: int) -> ChainRows:
        """Return the last row of each entry: [B * n] -> [B]."""
        feature = self.feature.view(entries, -1, self.feature.shape[-1])[:, -1]
        return ChainRows(feature.contiguous(), self.is_known.view(entries, -1)[:, -1])


class MtpChain:
    """Layers of a chain, their K and V, and what they keep from step to step."""

    def __init__(
        self,
        models: Sequence[DraftHeadModel],
        caches: Sequence[Tensor],
        env: ProposerEnv,
        dtype: torch.dtype,
    ) -> None:
        """Capture the passes of every layer; `caches`: one a layer."""
        self.models, self.page_size = models, env.page_size
        ops, count = env.ops, len(models)
        max_rows = max(ops.runtime.bucket(env.max_rows), env.num_slots * (count - 1))

        def captured(index: int, is_store: bool) -> Callable[[Rows, Tensor], tuple[Tensor, ...]]:
            model, cache = models[index], [caches[index]]

            def run(rows: Rows, feature: Tensor) -> tuple[Tensor, ...]:
                if is_store:
                    model.store(rows, feature, cache)
                    return ()
                return (model.forward(rows, feature, cache),)

            return ops.runtime.capture(run, max_rows)

        self._forward = [captured(i, is_store=False) for i in range(count)]
        self._store = captured(count - 1, is_store=True)
        shape = (count - 1, env.num_slots + 1)  # rows that are not the last of a slot write to the last line
        self._last = torch.zeros((*shape, models[0].config.hidden_size), dtype=dtype, device=ops.device)
        self._has_last = torch.zeros(shape, dtype=torch.bool, device=ops.device)

    def start(self, slot: int) -> None:
        """Forget the rows of the last request in `slot`."""
        self._has_last[:, slot].fill_(False)

    def layer_of(self, draft: int) -> int:
        """Return the index of the layer that makes a draft."""
        return min(draft, len(self.models) - 1)

    def run_step(self, rows: Rows, last: Tensor, feature: Tensor) -> tuple[Tensor, list[ChainRows]]:
        """Run all layers over the rows of a step; `rows` and `last` as `shift_rows` returns them.

        Return the first layer's output [B, hidden] at `last`, and what each layer but the last one gives the
        next one there.
        """
        at, given, behind = last.clamp(min=0), ChainRows(feature, rows.slots >= 0), []
        first = feature
        for k, model in enumerate(self.models[:-1]):
            placed = self._place(rows.tokens, rows.positions, rows.slots, given.is_known, k, rows.page_table)
            (out,) = self._forward[k](placed, given.feature)
            if k == 0:
                first = out[at]
            made = ChainRows(model.next_feature(out), given.is_known)
            behind.append(made.at(at))
            given = self._next_rows(rows, made, k)
        k = len(self.models) - 1
        placed = self._place(rows.tokens, rows.positions, rows.slots, given.is_known, k, rows.page_table)
        self._store(placed, given.feature)
        return first, behind

    def run_round(self, rounds: DraftRounds, j: int, given: ChainRows) -> Tensor:
        """Run the rows of entries that precede draft j >= 1 and depend on drafts: n each, entry by entry.

        `given` [B * n]: the rows of the layer before, or of the draft before where the last layer is used
        again. Return [B * n, hidden].
        """
        k, planned = self.layer_of(j), rounds.draft_rows
        count = len(given.is_known) // len(planned.count)
        rows = slice(j - count + 1, j + 1)
        tokens = planned.tokens[j - count : j].t().reshape(-1)
        positions = planned.positions[rows].t().reshape(-1)
        slots = planned.slots[j][:, None].expand(-1, count).reshape(-1)
        table = rounds.columns.page_table
        (out,) = self._forward[k](
            self._place(tokens, positions, slots, given.is_known, k, table), given.feature
        )
        return out

    def _place(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        is_known: Tensor,
        k: int,
        page_table: Tensor,
    ) -> Rows:
        """Return the rows of layer k, k positions before those of layer 0; unknown rows are padding."""
        is_real = is_known & (slots >= 0)
        position = torch.where(is_real, positions - k, 0)
        page = page_table[slots.clamp(min=0), position // self.page_size].long()
        return Rows(
            torch.where(is_real, tokens, 0),
            position,
            torch.where(is_real, slots, -1),
            torch.where(is_real, page * self.page_size + position % self.page_size, 0),
            page_table,
        )

    def _next_rows(self, rows: Rows, made: ChainRows, k: int) -> ChainRows:
        """Return the features of layer k + 1: the output of layer k for the row before each.

        The first row of a slot takes what the last step kept; what this step keeps is stored.
        """
        slots, edge = rows.slots, rows.slots.new_full((1,), -1)
        line = torch.where(slots >= 0, slots, self._last.shape[1] - 1)
        is_first = torch.cat([edge, slots[:-1]]) != slots
        is_final = (torch.cat([slots[1:], edge]) != slots) & (slots >= 0)
        feature = torch.where(is_first[:, None], self._last[k, line], made.feature.roll(1, 0))
        is_known = torch.where(is_first, self._has_last[k, line], made.is_known.roll(1, 0)) & (slots >= 0)
        kept = torch.where(is_final, slots, self._last.shape[1] - 1)
        self._last[k].index_copy_(0, kept, made.feature)
        self._has_last[k].index_copy_(0, kept, made.is_known & is_final)
        return ChainRows(torch.where(is_known[:, None], feature, 0), is_known)
