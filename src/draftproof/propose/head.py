"""mtp, eagle, eagle3: a head over the target's own rows drafts; its K and V lie on the same pages.

After every step the head runs over the step's rows, prompts included: the row at position p with the target's
feature there and the token that follows, if that is committed. So what it has stored is always that of the
committed tokens, whatever was rejected, and nothing has to be taken back. The last of an entry's rows gives
its first draft; each further draft takes a round over one row an entry, with the head's own feature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig
from draftproof.models.head_formats import load_head, read_head
from draftproof.models.head_model import HeadModel
from draftproof.models.runner import kv_bytes_per_token
from draftproof.ops import Rows
from draftproof.propose import DeviceProposer, ProposerEnv
from draftproof.propose.rounds import SAMPLING, Rounds, drafts_greedily
from draftproof.types import DeviceBatch, Draft


class HeadProposer(DeviceProposer):
    """The methods differ in the kind of head that they take, and in nothing else."""

    kind: ClassVar[str]
    follows_rows = True
    stores_kv = True
    reports_probs = True
    defaults = {"model": None, **SAMPLING}

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self.greedy = drafts_greedily(self.options)
        source, target = self.options["model"], env.target
        if source is None:
            raise ConfigError(f"method {self.kind!r} needs a head: give its folder as 'model'")
        assert target is not None
        config, tensors = load_head(source, target.facts)
        if config.kind != self.kind:
            raise ConfigError(f"{source} is a head of kind {config.kind!r}: use method {config.kind!r}")
        self.model = HeadModel(config, tensors, env.ops, env.max_len, target, env.num_slots)
        self.needs_hidden = config.feature == "last_normed"
        self.taps = config.aux_layers if config.feature == "aux" else ()
        if config.feature == "last":
            self.taps = (target.config.num_layers - 1,)
        shape = (2, env.num_pages, env.page_size, config.num_kv_heads, config.head_dim)
        self.caches = [
            torch.zeros(shape, dtype=target.dtype, device=env.ops.device) for _ in range(config.num_layers)
        ]

    @classmethod
    def storage(cls, options: Mapping[str, Any], target: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
        if options.get("model") is None:
            return 0, 0
        config, _ = read_head(options["model"], target.num_layers)
        weights = sum(math.prod(shape) for shape in config.tensors().values())
        if config.share_head and config.reduced:
            weights += config.draft_vocab_size * config.hidden_size
        each = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        return each, weights * dtype.itemsize

    def draft(self, batch: DeviceBatch) -> Draft:
        assert batch.traits is not None
        # the head's row of a draft stands one before it: that is where the row of its feature stands
        rounds = Rounds(self.env.ops, batch, self.greedy, 1, self.env.page_size)
        rows, last = self._follow(batch)
        feature = self.model.feature(batch.features)
        if not batch.traits.rounds:
            self.model.store(rows, feature, self.caches)
            return rounds.draft()
        normed, feature = self.model.forward(rows, feature, self.caches)
        at = last[rounds.line]  # [B] the row that an entry's first draft comes from
        normed, feature = normed[at.clamp(min=0)], feature[at.clamp(min=0)]
        rounds.take(0, self.model.logits(normed))
        for j in range(1, batch.traits.rounds):
            normed, feature = self.model.forward(rounds.rows(j), feature, self.caches)
            rounds.take(j, self.model.logits(normed))
        return rounds.draft(at >= 0)

    def _follow(self, batch: DeviceBatch) -> tuple[Rows, Tensor]:
        """The step's rows with the tokens that follow them; [S] the last row of each slot, or -1."""
        rows, columns = batch.rows, batch.columns
        assert rows is not None
        slot, after = rows.slots.clamp(min=0), rows.positions + 1
        length = columns.length[slot]
        known = (rows.slots >= 0) & (after < length)
        tokens = columns.tokens[slot, after.clamp(max=columns.tokens.shape[1] - 1)]
        shifted = Rows(
            torch.where(known, tokens, 0),
            torch.where(known, rows.positions, 0),
            torch.where(known, rows.slots, -1),
            torch.where(known, rows.kv_index, 0),
            rows.page_table,
        )
        scrap = len(columns.length)
        last = torch.full((scrap + 1,), -1, dtype=torch.int64, device=slot.device)
        place = torch.arange(len(slot), device=slot.device)
        last[torch.where(known & (after + 1 == length), rows.slots, scrap)] = place
        return shifted, last


class MtpProposer(HeadProposer):
    kind = "mtp"
    sources = ("mtp",)


class EagleProposer(HeadProposer):
    kind = "eagle"
    sources = ("eagle",)


class Eagle3Proposer(HeadProposer):
    kind = "eagle3"
    sources = ("eagle3",)
