"""A head's forward pass: features of the target's rows and the tokens after them in, drafts' logits out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.decoder import Weights, decoder_layer
from draftproof.models.draft_head.config import HeadConfig, Target
from draftproof.models.layers import first_layer_input, run_layers, store_kv
from draftproof.models.rope import rope_table
from draftproof.ops import Ops, Rows
from draftproof.types import Windows


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head may use of the model that it drafts for."""

    config: ModelConfig
    facts: Target
    dtype: torch.dtype
    embedding: Tensor  # [V, hidden]
    head: Any  # the LM head, packed
    head_rows: Callable[
        [Tensor], Tensor
    ]  # ids [n] -> those rows of it [n, hidden]; while the engine is built


class HeadModel:
    """Weights and the order of the ops. Storage of K and V is the caller's."""

    def __init__(
        self,
        config: HeadConfig,
        tensors: dict[str, Tensor],
        ops: Ops,
        max_len: int,
        target: TargetParts,
        most: int,
    ) -> None:
        """`most`: rows that logits are asked of at a time."""
        self.config, self.ops = config, ops
        tensors = _folded(config, tensors)
        tensors = {n: t if n == "d2t" else t.to(target.dtype) for n, t in tensors.items()}
        decoder, take = config.decoder(), Weights(tensors, ops, rough=True)
        self.vocab = config.target.vocab_size
        self.rope = rope_table(decoder, max_len).to(ops.device)
        self.embedding = target.embedding
        if config.own_embedding:  # many a public head has a copy of its target's
            own = take.tensor("embed_tokens.weight")
            self.embedding = self.embedding if torch.equal(own, self.embedding) else own
        self.ids = take.tensor("d2t") if config.reduced else None  # [draft vocab] target ids
        if self.ids is not None:  # ids that it does not know stay as they are
            self._logits = torch.full((most, self.vocab), -math.inf, device=ops.device)
        self.feature_norm = take.tensor("feature_norm.weight") if config.feature_norm != "none" else None
        join = config.join
        self.norms: list[Tensor] = []  # of the embedding, of the feature, before they are projected
        if join.norms_both and not join.reads_both:
            self.norms = [take.tensor(f"{name}.weight") for name in ("enorm", "hnorm")]
        self.fc = take.packed([join.fuses], config.fc_bias)
        first = "hidden_norm" if join.reads_both else "input_layernorm" if config.input_norm else ""
        self.layers = [
            decoder_layer(take, f"layers.{i}.", decoder, i, "input_layernorm" if i else first)
            for i in range(config.num_layers)
        ]
        if join.reads_both:
            of_token = take.tensor("layers.0.input_layernorm.weight")
            around = config.norm_before_residual
            self.layers[0] = replace(self.layers[0], token_norm=of_token, residual_is_normed=around)
        self.norm = take.tensor("norm.weight") if config.final_norm else None
        if not config.share_head:
            self.head = take.packed(["lm_head"], bias=False)
        else:
            self.head = (
                target.head if self.ids is None else ops.forward.pack_draft_linear(target.head_rows(self.ids))
            )

    def feature(self, rows: Tensor) -> Tensor:
        """What it makes of the target's rows, [R, target's hidden, once or several times]: [R, hidden]."""
        if not self.config.join.reads_both:
            return rows
        ops, eps, count = self.ops, self.config.rms_norm_eps, len(rows)
        if self.feature_norm is not None:  # of each layer's part, or of all of it
            rows = ops.forward.rms_norm(rows.reshape(-1, len(self.feature_norm)), self.feature_norm, eps)
        return ops.forward.linear(rows.view(count, -1), self.fc)

    def forward(self, rows: Rows, feature: Tensor, caches: list[Tensor]) -> Tensor:
        """rows.tokens are those that follow; stores K and V of every row. `feature` may be overwritten.

        [R, hidden], before the last norm: what `logits` and `following` take.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        ops.forward.begin_pass(rows)
        row = self._projected(rows, feature)
        return run_layers(
            ops, row, self.layers, None, rows, self.rope, caches, eps, embedding=self.embedding
        )[0]

    def store(self, rows: Rows, feature: Tensor, caches: list[Tensor]) -> None:
        """K and V of every row, and nothing else: nobody wants drafts of these."""
        if len(self.layers) > 1:
            self.forward(rows, feature, caches)
            return
        ops, layer, eps = self.ops, self.layers[0], self.config.rms_norm_eps
        row = self._projected(rows, feature)
        x, _ = first_layer_input(ops, row, layer, rows, self.embedding, eps)
        store_kv(ops, layer.attention, x, rows, self.rope, caches[0], eps)

    def _projected(self, rows: Rows, feature: Tensor) -> Tensor:
        """The row that its first layer is given: the feature, unless the two are projected to one."""
        ops, eps = self.ops, self.config.rms_norm_eps
        if self.config.join.reads_both:
            return feature
        embedded = ops.forward.embed(rows.tokens, self.embedding)
        if self.norms:
            embedded = ops.forward.rms_norm(embedded, self.norms[0], eps)
            feature = ops.forward.rms_norm(feature.contiguous(), self.norms[1], eps)
        return ops.forward.linear(ops.forward.concat_columns(embedded, feature), self.fc)

    def _normed(self, row: Tensor) -> Tensor:
        return (
            row if self.norm is None else self.ops.forward.rms_norm(row, self.norm, self.config.rms_norm_eps)
        )

    def following(self, row: Tensor) -> Tensor:
        """The features of the rows after these."""
        return self._normed(row) if self.config.norm_output else row

    def logits(self, row: Tensor) -> Tensor:
        """[R, hidden] -> [R, V] fp32 over the target's vocabulary; -inf at ids that it does not know.

        Valid until the next call.
        """
        logits = self.ops.forward.linear(self._normed(row), self.head, torch.float32)
        if self.ids is None:
            return logits
        return self._logits[: len(logits)].index_copy_(1, self.ids, logits)

    def pick(
        self,
        row: Tensor,
        at: Tensor | None,
        windows: Windows,
        greedy: bool,
        out: Tensor,
        sure: Tensor | None = None,
    ) -> Tensor:
        """Drafts into `out` [B], each from the row at its place, as plain sampling would take them; into
        `sure` [B], if given, how likely the head thinks each to be.

        Returns these rows, [B, hidden].
        """
        if self.norm is not None:
            norm, eps = self.norm, self.config.rms_norm_eps
            return self.ops.rounds.lm_head_sample(
                row, at, norm, eps, self.head, self.ids, windows, greedy, out, sure
            )
        row = row if at is None else row[at.clamp(min=0)]
        logits = self.logits(row)
        token = self.ops.sampling.argmax(logits) if greedy else self.ops.sampling.sample(logits, windows)[0]
        out.copy_(torch.where(windows.slot >= 0, token, 0))
        return row


def _folded(config: HeadConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the weights of the layers' own feature norms in `fc`, so that one pass norms all of them."""
    if config.feature_norm != "each":
        return tensors
    names = [name for name in config.tensors() if "feature_norm" in name]
    weights = [tensors[name] for name in names]
    fuse = f"{config.join.fuses}.weight"
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    kept[fuse] = tensors[fuse].float() * torch.cat(weights).float()
    return kept | {"feature_norm.weight": torch.ones_like(weights[0])}
