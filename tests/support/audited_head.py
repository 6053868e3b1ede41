"""Head proposers that check their features and KV against a computation from nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

import tiny
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.propose.head import HeadProposer


class Audited(HeadProposer):
    """Head that computes every request anew after each step, one at a time, on pages 1, 2, 3 and so on."""

    defaults = {**HeadProposer.defaults, "weights": "llama/float32", "cached": False}
    rows_checked: ClassVar[int] = 0

    def __init__(self, env: Any, options: Any) -> None:
        super().__init__(env, options)
        made = tiny.checkpoint(*self.options["weights"].split("/"))
        pages = -(-env.max_len // env.page_size)
        sizes = {"num_pages": pages + 1, "page_size": env.page_size, "max_rows": env.max_len}
        model = create_model(made.config, made.weights, env.ops, env.max_len)
        self.target = Runner(model, env.ops, made.dtype, taps=self.taps, **sizes)
        self.again = [torch.zeros_like(cache[:, : pages + 1]) for cache in self.caches]
        self.table = torch.arange(1, pages + 1, dtype=torch.int32)[None]

    def draft(self, batch: Any) -> Any:
        made = super().draft(batch)
        for slot in batch.slots.tolist():
            if slot >= 0:
                self.audit(batch, slot)
        return made

    def audit(self, batch: Any, slot: int) -> None:
        columns, size = batch.columns, self.env.page_size
        computed = int(columns.computed[slot])
        here = (batch.rows.slots == slot).nonzero()[:, 0]
        if not computed or not len(here):
            return  # finished before this step, or not started
        at = torch.arange(computed)
        tokens, line = columns.tokens[slot], torch.zeros_like(at)
        rows = self.target.rows(tokens[:computed], at, line, self.table)
        hidden, *tapped = self.target.forward_tapped(rows)
        wanted = torch.cat([hidden, *tapped] if self.needs_hidden else tapped, 1)
        committed = here[batch.rows.positions[here] < computed]
        places = batch.rows.positions[committed]
        assert torch.equal(batch.features[committed], wanted[places]), "a feature differs"
        rows = replace(rows, tokens=tokens[1 : computed + 1].contiguous())
        self.model.forward(rows, self.model.feature(wanted), self.again)
        pages = columns.page_table[slot, at // size].long()
        if self.options["cached"]:  # the last row of a found page has the token of the request that filled it
            at, pages = at[at % size < size - 1], pages[at % size < size - 1]
        for mine, anew in zip(self.caches, self.again, strict=True):
            assert torch.equal(mine[:, pages, at % size], anew[:, 1 + at // size, at % size]), "KV differs"
        Audited.rows_checked += computed
