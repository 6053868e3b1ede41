"""A head's forward pass: features of the target's rows and the tokens after them in, drafts' logits out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.head import HeadConfig, Target
from draftproof.models.llama import Weights, decoder_layer
from draftproof.models.rope import rope_table
from draftproof.ops import Ops, Rows


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
        tensors = {n: t if n == "d2t" else t.to(target.dtype) for n, t in tensors.items()}
        decoder, take = config.decoder(), Weights(tensors, ops)
        self.vocab = config.target.vocab_size
        self.rope = rope_table(decoder, max_len).to(ops.device)
        self.embedding = target.embedding
        if config.own_embedding:  # many a public head has a copy of its target's
            own = take.tensor("embed_tokens.weight")
            self.embedding = self.embedding if torch.equal(own, self.embedding) else own
        self.ids = take.tensor("d2t") if config.reduced else None  # [draft vocab] target ids
        if self.ids is not None:  # ids that it does not know stay as they are
            self._logits = torch.full((most, self.vocab), -math.inf, device=ops.device)
        self.feature_norms = [take.tensor(name) for name in config.tensors() if "feature_norm" in name]
        self.norms: list[Tensor] = []  # of the embedding, of the feature, before they are joined
        join = config.join
        if join.norms_both:
            names = (
                ("layers.0.input_layernorm", "layers.0.hidden_norm")
                if join.reads_both
                else ("enorm", "hnorm")
            )
            self.norms = [take.tensor(f"{name}.weight") for name in names]
        self.fc = take.packed([join.fuses], config.fc_bias)
        one = torch.ones(config.hidden_size, dtype=target.dtype, device=ops.device)
        self.layers = [
            decoder_layer(
                take,
                f"layers.{index}.",
                decoder,
                index,
                one if index == 0 and (join.reads_both or not config.input_norm) else None,
            )
            for index in range(config.num_layers)
        ]
        self.norm = take.tensor("norm.weight") if config.final_norm else one
        if not config.share_head:
            self.head = take.packed(["lm_head"], bias=False)
        else:
            self.head = target.head if self.ids is None else ops.pack_linear(target.head_rows(self.ids))

    def feature(self, rows: tuple[Tensor, ...]) -> Tensor:
        """What it makes of the target's rows, [R, target's hidden] each: [R, hidden]."""
        if not self.config.join.reads_both:
            return rows[0]
        ops, eps = self.ops, self.config.rms_norm_eps
        if self.config.feature_norm == "each":
            rows = tuple(
                ops.rms_norm(row.contiguous(), norm, eps)
                for row, norm in zip(rows, self.feature_norms, strict=True)
            )
        joined = torch.cat(rows, 1)
        if self.config.feature_norm == "whole":
            joined = ops.rms_norm(joined, self.feature_norms[0], eps)
        return ops.linear(joined, self.fc)

    def forward(self, rows: Rows, feature: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        """rows.tokens are those that follow; stores K and V of every row.

        [R, hidden] that `logits` takes, and the features of the rows after these.
        """
        ops, config, eps = self.ops, self.config, self.config.rms_norm_eps
        ops.begin(rows)
        x, residual = self._joined(ops.embed(rows.tokens, self.embedding), feature)
        following = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        for layer, cache, norm in zip(self.layers, caches, following, strict=True):
            norms = layer.q_norm, layer.k_norm
            q = ops.linear_rope_store(x, layer.qkv, rows, layer.heads, self.rope, cache, *norms, eps)
            x = ops.linear(ops.attention(q, rows, layer.heads, cache), layer.out)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.linear(ops.linear_silu_mul(x, layer.gate_up), layer.down)
            x, residual = ops.add_rms_norm(x, residual, norm, eps)
        normed = x if config.final_norm else residual
        return normed, normed if config.norm_output else residual

    def store(self, rows: Rows, feature: Tensor, caches: list[Tensor]) -> None:
        """K and V of every row, and nothing else: nobody wants drafts."""
        if len(self.layers) > 1:
            self.forward(rows, feature, caches)
            return
        layer, norms = self.layers[0], (self.layers[0].q_norm, self.layers[0].k_norm)
        x, _ = self._joined(self.ops.embed(rows.tokens, self.embedding), feature)
        eps = self.config.rms_norm_eps
        self.ops.linear_rope_store(x, layer.qkv, rows, layer.heads, self.rope, caches[0], *norms, eps)

    def _joined(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer reads, and what goes around its attention."""
        ops, config, eps = self.ops, self.config, self.config.rms_norm_eps
        known = feature
        if self.norms:
            embedded = ops.rms_norm(embedded, self.norms[0], eps)
            known = ops.rms_norm(feature.contiguous(), self.norms[1], eps)
        joined = torch.cat([embedded, known], 1)
        if config.join.reads_both:
            return joined, known if config.norm_before_residual else feature.contiguous()
        row = ops.linear(joined, self.fc)
        return ops.rms_norm(row, self.layers[0].attention_norm, eps) if config.input_norm else row, row

    def logits(self, normed: Tensor) -> Tensor:
        """[R, hidden] -> [R, V] fp32 over the target's vocabulary; -inf at ids that it does not know.

        Valid until the next call.
        """
        logits = self.ops.linear(normed, self.head, torch.float32)
        if self.ids is None:
            return logits
        return self._logits[: len(logits)].index_copy_(1, self.ids, logits)
