"""Contract of the forward-pass ops: linear layers, norms, activations, rope with KV store, attention.

Activations have the model's dtype (fp32 or bf16); sums are accumulated in fp32; logits are fp32. `R` is the
number of rows of a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.ops.contract.types import AttentionShape, Layer
from draftproof.types import Rows


class FusedLayers(ABC):
    """Optional accelerator that runs all layers of a decoder in one kernel, with the bits of the ops."""

    @abstractmethod
    def __call__(
        self,
        residual: Tensor,  # [R, hidden]; overwritten with the rows after the last layer
        layers: list[Layer],
        rows: Rows,
        rope: Tensor,
        caches: list[Tensor],  # one per layer
        eps: float,
        taps: Sequence[int] = (),
        embedding: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        """Run the layers; return the rows after each layer in `taps`, or None if unsupported."""


class ForwardOps(ABC):
    """Op family of the forward pass."""

    fused_rows_limit: ClassVar[int] = 16  # rows up to which one pass costs less than two passes on fewer rows
    gather_last_layer_from_rows: ClassVar[int] = 0  # rows from which the last layer keeps only output rows; 0: off
    fused_layers: FusedLayers | None = None

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Pack a weight [N, K] and bias [N] for `linear`; the result is opaque to callers."""

    def pack_draft_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Pack a weight of a draft model; `linear` may compute it with lower precision."""
        return self.pack_linear(weight, bias)

    @abstractmethod
    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """Multiply x [R, K] by a packed weight: [R, N] in x's dtype or `out_dtype` (fp32 for logits)."""

    @abstractmethod
    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Look up tokens [R] in table [V, D]: [R, D]."""

    def concat_columns(self, left: Tensor, right: Tensor) -> Tensor:
        """Concatenate [R, A] and [R, B] to [R, A + B]."""
        return torch.cat([left, right], 1)

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute x [R, D] / rms(x), rounded to x's dtype, times weight [D]."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(s), s) with s = x + residual rounded to x's dtype; both [R, D]."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute silu(gate) * up [R, I] from gate_up [R, 2 I] (gate, then up)."""

    @abstractmethod
    def rope_store(
        self,
        qkv: Tensor,  # [R, (num_q + 2 num_kv) * dim]: all q heads, then k, then v
        rows: Rows,
        heads: AttentionShape,
        rope: Tensor,  # [max_len, dim] fp32: cos of the dim/2 frequencies, then sin
        cache: Tensor,  # [2, pages, page_size, num_kv, dim]: K, then V, of this layer; written
        q_norm: Tensor | None,  # [dim] per-head RMS norm before rope, or None
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Norm and rotate q and k (halves convention), store k and v, and return q [R, num_q * dim]."""

    @abstractmethod
    def attention(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor) -> Tensor:
        """Attend from each row at position p to the keys 0..p of its slot: [R, num_q * dim]."""

    # Two ops in one. A backend may use fewer kernels, with the same bits.

    def linear_rope_store(
        self,
        x: Tensor,  # [R, K]
        packed: Any,  # weight [(num_q + 2 num_kv) * dim, K]
        rows: Rows,
        heads: AttentionShape,
        rope: Tensor,
        cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Compute `rope_store` of `linear`."""
        qkv = self.linear(x, packed)
        return self.rope_store(qkv, rows, heads, rope, cache, q_norm, k_norm, eps)

    def linear_silu_mul(self, x: Tensor, packed: Any) -> Tensor:
        """Compute `silu_mul` of `linear`: x [R, K], weight [2 I, K] -> [R, I]."""
        return self.silu_mul(self.linear(x, packed))

    def blocks(
        self,
        residual: Tensor,  # [R, hidden]: the embedded rows, or a draft head's features
        layers: list[Layer],
        norm: Tensor | None,  # [hidden]: norm after the last layer; None: its result is not needed
        rows: Rows,
        rope: Tensor,
        caches: list[Tensor],  # one per layer
        eps: float,
        taps: Sequence[int] = (),  # indices of layers whose residual rows are returned
        embedding: Tensor | None = None,  # [V, hidden], for a first layer with `token_norm`
        wanted: Tensor | None = None,  # [W] int64: rows that the last layer keeps; None: all
    ) -> tuple[Tensor, ...]:
        """Run all layers and the norm after them, and store K and V of every row.

        Result: the normed rows, the residual rows (both [R, hidden]; without `norm` the residual twice),
        then the residual rows after each layer of `taps`. `residual` may be overwritten.
        """
        if wanted is None and self.fused_layers is not None:
            tapped = self.fused_layers(residual, layers, rows, rope, caches, eps, taps, embedding)
            if tapped is not None:
                normed = residual if norm is None else self.rms_norm(residual, norm, eps)
                return normed, residual, *tapped
        x, residual = self.first_rows(residual, layers[0], rows, embedding, eps)
        next_norms = [layer.attention_norm for layer in layers[1:]] + [norm]
        by_layer: dict[int, Tensor] = {}
        for i, (layer, cache, next_norm) in enumerate(zip(layers, caches, next_norms, strict=True)):
            norms = layer.q_norm, layer.k_norm
            q = self.linear_rope_store(x, layer.qkv, rows, layer.heads, rope, cache, *norms, eps)
            x = self.attention(q, rows, layer.heads, cache)
            if wanted is not None and layer is layers[-1]:  # the other rows have no further use
                x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
            x = self.linear(x, layer.out)
            x, residual = self.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self.linear(self.linear_silu_mul(x, layer.gate_up), layer.down)
            # without a norm any weight will do, because the normed rows are dropped
            after = layer.mlp_norm if next_norm is None else next_norm
            x, residual = self.add_rms_norm(x, residual, after, eps)
            if i in taps:
                by_layer[i] = residual
        return residual if norm is None else x, residual, *(by_layer[i] for i in taps)

    def first_rows(
        self, residual: Tensor, layer: Layer, rows: Rows, embedding: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer ([R, hidden] or twice as wide) and its residual rows."""
        known = residual
        if layer.attention_norm is not None:
            known = self.rms_norm(residual, layer.attention_norm, eps)
        if layer.token_norm is None:
            return known, residual
        assert embedding is not None
        tokens = self.rms_norm(self.embed(rows.tokens, embedding), layer.token_norm, eps)
        return self.concat_columns(tokens, known), known if layer.norm_around else residual

    def begin_pass(self, rows: Rows) -> None:
        """Announce a forward pass over these rows, so that work shared by its layers is done once.

        A hint: an op called without it gives the same result.
        """
