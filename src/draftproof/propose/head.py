"""Head proposers (mtp, eagle, eagle3): a draft head on the target's hidden rows, with KV on the same pages.

After every step the head runs over the step's rows, prompts included: the row at position p has the
target's feature at p and the token at p + 1, if that is committed. So the stored KV is always that of the
committed tokens, whatever was rejected. The last row of an entry gives its first draft; each further draft
takes a round of one row per entry, with the head's own feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError, LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.draft_head.bundled_heads import find_bundled_head, find_bundled_head_by_size
from draftproof.models.draft_head.config import chain_prefix
from draftproof.models.draft_head.formats import load_draft_head, named_weights, read_draft_head
from draftproof.models.draft_head.model import DraftHeadModel
from draftproof.models.weight_formats import WeightTensor
from draftproof.models.weights.update_source import WeightSource, is_path, read_tensors
from draftproof.ops import Rows
from draftproof.ops.contract.kv_layout import resolve_kv_dtype
from draftproof.propose.base import ProposerEnv
from draftproof.propose.draft_rounds import DraftRounds, ModelProposer
from draftproof.propose.mtp_chain import ChainRows, MtpChain
from draftproof.types import DeviceBatch, Draft, Request


class HeadProposer(ModelProposer):
    """Proposer with a draft head. The methods differ in the kind of head alone."""

    kind: ClassVar[str]
    lag = 1  # the row of a draft lies where the row of its feature does

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        source, target = self.options["model"], env.target
        if source is None and target is not None:
            source = self.default_source(target.config) or find_bundled_head(self.kind, target.identity)
        if source is None:
            raise ConfigError(
                f"method {self.kind!r} needs a head: the model's files hold none, and none for this model "
                "comes with the package: give the folder of one as 'model', or train one (`draftproof train "
                "--kind eagle3` or `--kind mtp`)"
            )
        assert target is not None
        config, weights = load_draft_head(source, target.identity)
        if config.kind != self.kind:
            raise ConfigError(f"{source} is a head of kind {config.kind!r}: use method {config.kind!r}")
        self.models = [
            DraftHeadModel(config, weights, env.ops, env.max_len, target, env.num_slots, chain_prefix(i))
            for i in range(config.chain_length)
        ]
        self.model = self.models[0]
        self.entries = [entry for model in self.models for entry in model.entries]
        self.needs_hidden = config.feature == "last_normed"
        self.taps = config.aux_layers if config.feature == "aux" else ()
        if config.feature == "last":
            self.taps = (target.config.num_layers - 1,)
        layout = config.kv_layout(resolve_kv_dtype(env.kv_cache_dtype, target.dtype))
        self.caches = layout.allocate(env.num_pages, env.page_size, env.ops.device)
        capture, rows = env.ops.runtime.capture, env.ops.runtime.bucket(env.max_rows)
        # Features of the target are reduced in the captured pass, or on a device beside a search (`begin`).
        self._reduces_in_pass = not env.ops.runtime.asynchronous
        self._forward, self._store = capture(self._row, rows), capture(self._kv, rows)
        self._first = capture(self._first_row, rows) if self._reduces_in_pass else self._forward
        self._chain: MtpChain | None = None
        if len(self.models) > 1:
            self._chain = MtpChain(self.models, self.caches, env, target.dtype)

    @classmethod
    def default_source(cls, target: ModelConfig) -> str | None:
        """Return the folder of a draft head that belongs to the target, or None."""
        return None

    @classmethod
    def storage(
        cls,
        options: Mapping[str, Any],
        target: ModelConfig,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> tuple[int, int]:
        """Return the bytes of KV per token and of the head's weights."""
        source = options.get("model")
        if source is None:
            source = cls.default_source(target) or find_bundled_head_by_size(cls.kind, target)
        if source is None:
            return 0, 0
        config, _ = read_draft_head(source, target.num_layers)
        weights = sum(math.prod(shape) for shape in config.tensors().values())
        if config.share_lm_head and config.has_reduced_vocab:
            weights += config.draft_vocab_size * config.hidden_size
        kv_dtype = resolve_kv_dtype(kv_cache_dtype, dtype)
        return config.kv_layout(kv_dtype).bytes_per_token, weights * dtype.itemsize

    def check_weights(self, source: WeightSource) -> dict[str, WeightTensor]:
        """Return new weights of the head, from a folder or under the names of any format of heads."""
        assert self.env.target is not None
        num_layers = self.env.target.config.num_layers
        if not is_path(source):
            given = named_weights(read_tensors(source), num_layers)
            return self.model.check_weights(given, self.entries)
        config, weights = read_draft_head(str(source), num_layers)
        if replace(config, target=self.model.config.target) != self.model.config:
            raise LoadError(f"{source} is a head of another form than the one in use")
        return self.model.check_weights(weights, self.entries)

    def device_memory(self) -> tuple[Any, Sequence[Tensor]]:
        """Return the head and its caches."""
        return [vars(model) for model in self.models], self.caches

    def refresh_lm_head(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Take the rows of the draft vocabulary from the target's new LM head."""
        for model in self.models:
            model.refresh_lm_head(rows)

    def start(self, slot: int, request: Request) -> None:
        """Begin a request in `slot`."""
        if self._chain is not None:
            self._chain.start(slot)

    @classmethod
    def needs_target(cls, options: Mapping[str, Any]) -> bool:
        """Return True: heads share the target's embedding and often its LM head."""
        return True

    def _row(self, rows: Rows, feature: Tensor) -> tuple[Tensor]:
        return (self.model.forward(rows, feature, self.caches),)

    def _first_row(self, rows: Rows, features: Tensor) -> tuple[Tensor]:
        return self._row(rows, self.model.feature(features))

    def _kv(self, rows: Rows, feature: Tensor) -> tuple[()]:
        if self._reduces_in_pass:
            feature = self.model.feature(feature)
        self.model.store(rows, feature, self.caches)
        return ()

    def begin(self, batch: DeviceBatch) -> Any:
        """Return the head's rows, the last row [B] of each entry, and the features.

        The features are reduced, unless the captured pass does that.
        """
        assert batch.rows is not None and batch.features is not None
        given, rounds = (batch.rows, batch.columns, batch.slots), self.env.ops.rounds
        if self._chain is not None:
            return *rounds.shift_rows(*given), self.model.feature(batch.features)
        rows, last, features = rounds.head_rows(*given, batch.features)
        return rows, last, features if self._reduces_in_pass else self.model.feature(features)

    def draft(self, batch: DeviceBatch) -> Draft:
        """Store KV of the step's rows, then run the rounds."""
        assert batch.spec is not None
        begun = self.begin(batch) if batch.begun is None else batch.begun
        if self._chain is not None:
            return self._draft_in_chain(self._chain, batch, begun)
        if not batch.spec.rounds:
            self._store(begun[0], begun[2])
            return self.no_draft(batch)
        ops, model, (rows, last, feature) = self.env.ops, self.model, begun
        rounds = self.start_rounds(batch, last)
        at: Tensor | None = last  # [B] row of each entry's first draft
        if model.config.num_layers == 1 and len(rows.tokens) > max(ops.forward.fused_rows_limit, len(last)):
            # all rows but the last of each entry are needed for KV alone
            self._store(rows, feature)
            rows, feature, at = rounds.rows(0), feature[last.clamp(min=0)], None
        for j in range(batch.spec.rounds):
            (row,) = self._forward(rounds.rows(j), feature) if j else self._first(rows, feature)
            row = self._sample(rounds, j, model, row, at)
            feature, at = model.next_feature(row), None
            if not rounds.should_continue(j):
                break
        return rounds.draft()

    def _draft_in_chain(self, chain: MtpChain, batch: DeviceBatch, begun: Any) -> Draft:
        """Run all layers over the step's rows, then the rounds."""
        assert batch.spec is not None
        rows, last, feature = begun
        row, behind = chain.run_step(rows, last, feature)
        if not batch.spec.rounds:
            return self.no_draft(batch)
        rounds, made = self.start_rounds(batch, last), ChainRows(row[:0], last[:0] >= 0)
        for j in range(batch.spec.rounds):
            model = self.models[chain.layer_of(j)]
            if j:
                is_further = j >= len(self.models)
                given = made.last_of(len(last)) if is_further else behind[j - 1].before(made, len(last))
                out = chain.run_round(rounds, j, given)
                made = ChainRows(model.next_feature(out), given.is_known)
                row = out.view(len(last), -1, out.shape[-1])[:, -1].contiguous()
            self._sample(rounds, j, model, row, at=None)
            if not rounds.should_continue(j):
                break
        return rounds.draft()

    def _sample(
        self, rounds: DraftRounds, j: int, model: DraftHeadModel, row: Tensor, at: Tensor | None
    ) -> Tensor:
        """Sample draft j of each entry from row `at` of each, or from the rows; return those [B, hidden]."""
        logprobs, stores_logits = rounds.draft_logprobs, self._stores_logits(model)
        if not rounds.needs_logits and (logprobs is None or stores_logits):
            vocab, size = model.draft_vocab, model.draft_vocab_size
            logits = None if logprobs is None else logprobs.logits_buffer(size, vocab)
            tokens, windows = rounds.draft_rows.tokens[j], rounds.windows(j)
            row = model.sample(row, at, windows, self.greedy, tokens, rounds.draft_probs, logits)
            if logprobs is not None:
                logprobs.add_buffered()
        else:
            row = row if at is None else row[at.clamp(min=0)]
            rounds.sample(j, model.logits(row), model.draft_vocab if stores_logits else None)
        self.num_rounds_run = j + 1
        return row

    def _stores_logits(self, model: DraftHeadModel) -> bool:
        """Return whether a round whose drafts are reported stores the logits of the draft vocabulary.

        Logprobs then come from these columns alone, also where a request needs all logits: their bits must
        not depend on the other requests.
        """
        return self.env.ops.runtime.asynchronous and model.can_store_logits


class MtpProposer(HeadProposer):
    """Multi-token-prediction layers."""

    kind = "mtp"
    sources = ("mtp",)

    @classmethod
    def default_source(cls, target: ModelConfig) -> str | None:
        """Return the target's own folder where its files hold MTP layers."""
        return target.mtp_source or None


class EagleProposer(HeadProposer):
    """EAGLE heads."""

    kind = "eagle"
    sources = ("eagle",)


class Eagle3Proposer(HeadProposer):
    """EAGLE-3 heads."""

    kind = "eagle3"
    sources = ("eagle3",)
