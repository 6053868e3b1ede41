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
from draftproof.models.draft_head.bundled import find_bundled_head, find_bundled_head_by_size
from draftproof.models.draft_head.formats import load_draft_head, read_draft_head
from draftproof.models.draft_head.model import DraftHeadModel
from draftproof.ops import Rows
from draftproof.propose import DeviceProposer, ProposerEnv
from draftproof.propose.calibration import Sureness
from draftproof.propose.draft_rounds import SAMPLING, Rounds, drafts_greedily
from draftproof.types import DeviceBatch, Draft


class HeadProposer(DeviceProposer):
    """The methods differ in the kind of head that they take, and in nothing else."""

    kind: ClassVar[str]
    follows_rows = True
    stores_kv = True
    reports_probs = True
    keeps_to_budget = True
    defaults = {"model": None, **SAMPLING}

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self.ends_chains = not env.ops.runtime.asynchronous
        self.sureness = Sureness(env.num_slots)
        self.greedy = drafts_greedily(self.options)
        source, target = self.options["model"], env.target
        if source is None and target is not None:
            source = self.default_source(target.config) or find_bundled_head(self.kind, target.identity)
        if source is None:
            raise ConfigError(
                f"method {self.kind!r} needs a head: the model's files hold none, and none for this model "
                "comes with the package: give the folder of one as 'model' (`draftproof train` trains heads "
                "for method 'eagle3')"
            )
        assert target is not None
        config, weights = load_draft_head(source, target.identity)
        if config.kind != self.kind:
            raise ConfigError(f"{source} is a head of kind {config.kind!r}: use method {config.kind!r}")
        self.model = DraftHeadModel(config, weights, env.ops, env.max_len, target, env.num_slots)
        self.needs_hidden = config.feature == "last_normed"
        self.taps = config.aux_layers if config.feature == "aux" else ()
        if config.feature == "last":
            self.taps = (target.config.num_layers - 1,)
        layout = config.kv_layout(target.dtype)
        self.caches = layout.allocate(env.num_pages, env.page_size, env.ops.device)
        self._none = torch.zeros(env.num_slots, dtype=torch.int64, device=env.ops.device)
        self._forward, self._store = (
            env.ops.runtime.capture(function, env.ops.runtime.bucket(env.max_rows))
            for function in (self._row, self._kv)
        )

    @classmethod
    def default_source(cls, target: ModelConfig) -> str | None:
        """Return the folder of a draft head that belongs to the target, or None."""
        return None

    @classmethod
    def storage(cls, options: Mapping[str, Any], target: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
        source = options.get("model")
        if source is None:
            source = cls.default_source(target) or find_bundled_head_by_size(cls.kind, target)
        if source is None:
            return 0, 0
        config, _ = read_draft_head(source, target.num_layers)
        weights = sum(math.prod(shape) for shape in config.tensors().values())
        if config.share_lm_head and config.has_reduced_vocab:
            weights += config.draft_vocab_size * config.hidden_size
        return config.kv_layout(dtype).bytes_per_token, weights * dtype.itemsize

    def _row(self, rows: Rows, feature: Tensor) -> tuple[Tensor]:
        return (self.model.forward(rows, feature, self.caches),)

    def _kv(self, rows: Rows, feature: Tensor) -> tuple[()]:
        self.model.store(rows, feature, self.caches)
        return ()

    def begin(self, batch: DeviceBatch) -> Any:
        """Its rows, [B] the last of each entry's, features."""
        assert batch.rows is not None and batch.features is not None
        rows, last = self.env.ops.rounds.shift_rows(batch.rows, batch.columns, batch.slots)
        return rows, last, self.model.feature(batch.features)

    def draft(self, batch: DeviceBatch) -> Draft:
        assert batch.spec is not None
        ops, model, count = self.env.ops, self.model, batch.spec.rounds
        begun = self.begin(batch) if batch.begun is None else batch.begun
        if not count:  # whatever the tokens are: there are none of them
            self._store(begun[0], begun[2])
            self.asked_rounds = 0
            return Draft(batch.columns.draft[: len(batch.slots)], self._none[: len(batch.slots)])
        rows, last, feature = begun
        # the head's row of a draft stands one before it: that is where the row of its feature stands
        rounds = Rounds(ops, batch, self.greedy, last, 1, self.env.page_size, self.sureness)
        at: Tensor | None = last  # [B] the row that an entry's first draft comes from
        if model.config.num_layers == 1 and len(rows.tokens) > max(ops.forward.fused_rows_limit, len(last)):
            # of all rows but these K and V are wanted, and nothing else
            self._store(rows, feature)
            rows, feature, at = rounds.rows(0), feature[last.clamp(min=0)], None
        for j in range(count):
            (row,) = self._forward(rounds.rows(j) if j else rows, feature)
            if rounds.plain:
                row = model.sample(
                    row, at, rounds.windows(j), self.greedy, rounds.ahead.tokens[j], rounds.sure
                )
            else:
                row = row if at is None else row[at.clamp(min=0)]
                rounds.take(j, model.logits(row))
            feature, at, self.asked_rounds = model.next_feature(row), None, j + 1
            if not rounds.goes_on(j):
                break
        return rounds.draft()


class MtpProposer(HeadProposer):
    kind = "mtp"
    sources = ("mtp",)

    @classmethod
    def default_source(cls, target: ModelConfig) -> str | None:
        """Return the target's own folder where its files hold MTP layers."""
        return target.mtp_source or None


class EagleProposer(HeadProposer):
    kind = "eagle"
    sources = ("eagle",)


class Eagle3Proposer(HeadProposer):
    kind = "eagle3"
    sources = ("eagle3",)
