"""Forward pass of a draft head: features of the target's rows and the next tokens in, draft logits out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.decoder import decoder_layer
from draftproof.models.draft_head.config import DraftHeadConfig, TargetIdentity
from draftproof.models.layers import first_layer_input, run_layers, store_kv
from draftproof.models.rope import rope_table
from draftproof.models.weight_formats import FloatWeight, PackedEntry, WeightPacker, WeightTensor
from draftproof.models.weights.packed_tree import copy_into
from draftproof.models.weights.update import WeightForms, check_update
from draftproof.ops import DraftVocab, Ops, QuantizedTable, Rows
from draftproof.types import Windows


@dataclass(frozen=True, slots=True)
class TargetParts:
    """Parts of the target model that its proposer may use."""

    config: ModelConfig
    identity: TargetIdentity
    dtype: torch.dtype
    embedding: Tensor | QuantizedTable  # [V, hidden]
    lm_head: Any  # packed
    # ids [n] -> rows of the LM head's weight [n, hidden]; usable only while the engine is built
    lm_head_rows: Callable[[Tensor], Tensor]


class DraftHeadModel:
    """Draft head packed for a backend. The caller owns the storage of K and V."""

    def __init__(
        self,
        config: DraftHeadConfig,
        weights: dict[str, WeightTensor],
        ops: Ops,
        max_len: int,
        target: TargetParts,
        max_logits_rows: int,
        at: str = "",
    ) -> None:
        """Pack the weights whose names begin with `at`; `max_logits_rows`: rows of one call of `logits`."""
        self.config, self.ops = config, ops
        decoder = config.decoder()
        packer = WeightPacker(_fold_feature_norms(config, weights), ops, target.dtype, draft=True)
        self.vocab = config.target.vocab_size
        self.rope = rope_table(decoder, max_len).to(ops.device)
        self.embedding = target.embedding
        if config.own_embedding:  # public heads often hold a copy of the target's
            own = packer.tensor(at + "embed_tokens.weight")
            shared = self.embedding
            if isinstance(shared, QuantizedTable):
                shared = ops.forward.embed(torch.arange(shared.shape[0], device=ops.device), shared)
            if torch.equal(own, shared):
                packer.entries.clear()  # the copy is not kept
            else:
                self.embedding = own
        self.ids = packer.tensor(at + "d2t") if config.has_reduced_vocab else None  # [draft vocab] target ids
        self.draft_vocab_size = self.vocab if self.ids is None else len(self.ids)
        self.draft_vocab: DraftVocab | None = None  # where it is a part of the vocabulary, in its order
        if self.ids is not None and bool((self.ids[1:] > self.ids[:-1]).all()):
            places = torch.full((self.vocab,), -1, dtype=torch.int64, device=ops.device)
            places[self.ids] = torch.arange(len(self.ids), device=ops.device)
            self.draft_vocab = DraftVocab(self.ids, places)
        if self.ids is not None:  # logits of ids outside the draft vocabulary stay -inf
            self._logits = torch.full((max_logits_rows, self.vocab), -math.inf, device=ops.device)
        self.feature_norm = (
            packer.tensor(at + "feature_norm.weight") if config.feature_norm != "none" else None
        )
        join = config.join
        self.norms: list[Tensor] = []  # of the embedding and of the feature, before the projection
        if join.norms_inputs and not join.attends_to_pair:
            self.norms = [packer.tensor(f"{at}{name}.weight") for name in ("enorm", "hnorm")]
        self.fc = packer.packed([at + join.projection], config.fc_bias)
        begin = decoder.num_layers - config.num_layers
        first = "hidden_norm" if join.attends_to_pair else "input_layernorm" if config.input_norm else None
        self.layers = [
            decoder_layer(packer, f"{at}layers.{i}.", decoder, begin + i, "input_layernorm" if i else first)
            for i in range(config.num_layers)
        ]
        if join.attends_to_pair:
            token_norm = packer.tensor(at + "layers.0.input_layernorm.weight")
            self.layers[0] = replace(
                self.layers[0], token_norm=token_norm, residual_is_normed=config.norm_before_residual
            )
        self.norm = packer.tensor(at + "norm.weight") if config.final_norm else None
        if not config.share_lm_head:
            self.lm_head = packer.packed([at + "lm_head"], bias=False)
        elif self.ids is None:
            self.lm_head = target.lm_head
        else:
            self.lm_head = ops.forward.pack_draft_linear(target.lm_head_rows(self.ids))
        self.entries = packer.entries

    def check_weights(
        self, weights: Mapping[str, WeightTensor], entries: Sequence[PackedEntry]
    ) -> dict[str, WeightTensor]:
        """Return new weights of the head in the form that `entries` take; LoadError if they do not fit.

        `entries` are those of this layer, and of all others of its chain.
        """
        given = dict(weights)
        ids = given.pop("d2t", None)  # files store the id, or its difference to the draft id
        if ids is not None and (self.ids is None or not _has_ids(ids.data, self.ids.cpu())):
            raise LoadError("d2t differs: the draft vocabulary of a head cannot be updated")
        known = {name for entry in entries for name in entry.formats}
        if "embed_tokens.weight" in given and "embed_tokens.weight" not in known:
            raise LoadError(
                "the head uses the embedding of its target, which is updated with the target: "
                "leave embed_tokens.weight out"
            )
        if self.config.feature_norm == "each":
            if missing := self.config.tensors().keys() - given.keys() - {"d2t"}:
                raise LoadError(f"{min(missing)} is missing: the norms of this head are part of its fc")
            given = _fold_feature_norms(self.config, given)
        check_update(WeightForms.of_entries(entries), given)
        return given

    def refresh_lm_head(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Take the rows of the target's LM head again; `rows`: as `TargetParts.lm_head_rows`."""
        if self.config.share_lm_head and self.ids is not None:
            copy_into(self.lm_head, self.ops.forward.pack_draft_linear(rows(self.ids)))

    def feature(self, rows: Tensor) -> Tensor:
        """Reduce rows of the target [R, layers * target hidden] to feature rows [R, hidden]."""
        if not self.config.join.attends_to_pair:
            return rows
        ops, eps = self.ops, self.config.rms_norm_eps
        if self.feature_norm is not None:  # over each layer's part, or over the whole row
            rows = ops.forward.rms_norm(rows, self.feature_norm, eps)
        return ops.forward.linear(rows, self.fc)

    def forward(self, rows: Rows, feature: Tensor, caches: list[Tensor]) -> Tensor:
        """Run rows whose `tokens` are the next tokens, and store their K and V. `feature` may be overwritten.

        Return [R, hidden] before the final norm, the input of `logits` and `next_feature`.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        ops.forward.begin_pass(rows)
        row = self._projected(rows, feature)
        return run_layers(
            ops, row, self.layers, None, rows, self.rope, caches, eps, embedding=self.embedding
        )[0]

    def store(self, rows: Rows, feature: Tensor, caches: list[Tensor]) -> None:
        """Store K and V of every row, without computing drafts."""
        if len(self.layers) > 1:
            self.forward(rows, feature, caches)
            return
        ops, layer, eps = self.ops, self.layers[0], self.config.rms_norm_eps
        row = self._projected(rows, feature)
        x, _ = first_layer_input(ops, row, layer, rows, self.embedding, eps)
        store_kv(ops, layer.attention, x, rows, self.rope, caches[0], eps)

    def _projected(self, rows: Rows, feature: Tensor) -> Tensor:
        """Return the input rows of the first layer: features, or projected embeddings and features."""
        ops, eps = self.ops, self.config.rms_norm_eps
        if self.config.join.attends_to_pair:
            return feature
        embedded = ops.forward.embed(rows.tokens, self.embedding)
        if self.norms:
            embedded = ops.forward.rms_norm(embedded, self.norms[0], eps)
            feature = ops.forward.rms_norm(feature.contiguous(), self.norms[1], eps)
        pair = (feature, embedded) if self.config.is_hidden_first else (embedded, feature)
        return ops.forward.linear(ops.forward.concat_columns(*pair), self.fc)

    def _normed(self, row: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        return row if self.norm is None else self.ops.forward.rms_norm(row, self.norm, eps)

    def next_feature(self, row: Tensor) -> Tensor:
        """Return the features of the next round."""
        return self._normed(row) if self.config.norm_output else row

    def logits(self, row: Tensor) -> Tensor:
        """Return fp32 logits [R, V], -inf outside the draft vocabulary, valid until the next call."""
        logits = self.ops.forward.linear(self._normed(row), self.lm_head, torch.float32)
        if self.ids is None:
            return logits
        return self._logits[: len(logits)].index_copy_(1, self.ids, logits)

    @property
    def can_store_logits(self) -> bool:
        """Return whether `sample` can store logits, and their columns are in the order of the vocabulary."""
        return self.norm is not None and (self.ids is None or self.draft_vocab is not None)

    def sample(
        self,
        row: Tensor,
        at: Tensor | None,
        windows: Windows,
        greedy: bool,
        out: Tensor,
        draft_probs: Tensor | None = None,
        logits_out: Tensor | None = None,
    ) -> Tensor:
        """Sample one draft per entry into `out` [B], with the noise of plain sampling, from row `at` of each.

        `draft_probs` [B], if given, receives the probability of each draft; `logits_out`
        [B, draft_vocab_size] the logits, where `can_store_logits`. Return the sampled rows [B, hidden].
        """
        if self.norm is not None:
            norm, eps = self.norm, self.config.rms_norm_eps
            return self.ops.rounds.lm_head_sample(
                row, at, norm, eps, self.lm_head, self.ids, windows, greedy, out, draft_probs, logits_out
            )
        assert logits_out is None
        row = row if at is None else row[at.clamp(min=0)]
        logits = self.logits(row)
        token = self.ops.sampling.argmax(logits) if greedy else self.ops.sampling.sample(logits, windows)[0]
        out.copy_(torch.where(windows.slot >= 0, token, 0))
        return row


def _has_ids(stored: Tensor, ids: Tensor) -> bool:
    """Return whether a file's d2t means `ids`."""
    same = stored.to("cpu", torch.int64)
    return same.shape == ids.shape and (
        torch.equal(same, ids) or torch.equal(same + torch.arange(len(ids)), ids)
    )


def _fold_feature_norms(config: DraftHeadConfig, weights: dict[str, WeightTensor]) -> dict[str, WeightTensor]:
    """Multiply the weights of per-layer feature norms into `fc`, so that one op norms all layers' parts."""
    if config.feature_norm != "each":
        return weights
    names = [name for name in config.tensors() if "feature_norm" in name]
    norms = [weights[name].dequantize() for name in names]
    projection = f"{config.join.projection}.weight"
    kept = {name: weight for name, weight in weights.items() if name not in names}
    folded = weights[projection].dequantize().float() * torch.cat(norms).float()
    kept[projection] = FloatWeight(folded)
    return kept | {"feature_norm.weight": FloatWeight(torch.ones_like(norms[0]))}
