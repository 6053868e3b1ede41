"""Contract of the forward-pass ops: linear layers, norms, activations, rope with KV store, attention.

Activations have the model's dtype (fp32 or bf16); sums are accumulated in fp32; logits are fp32. The residual
has that dtype too, or fp32 where `embed_unrounded` returned it. `R` is the number of rows of a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.ops.contract.latent import LatentOps
from draftproof.ops.contract.types import (
    Attention,
    AttentionShape,
    ExpertOutputs,
    FusedLayers,
    Moe,
    PackedState,
    QuantizedTable,
)
from draftproof.types import Rows


class ForwardOps(LatentOps, ABC):
    """Op family of the forward pass."""

    fused_rows_limit: ClassVar[int] = 16  # rows up to which one pass costs less than two passes on fewer rows
    # rows from which the last layer keeps only output rows; 0: off
    gather_last_layer_from_rows: ClassVar[int] = 0

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Pack a weight [N, K] and bias [N] for `linear`; the result is opaque to callers."""

    def pack_draft_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Pack a weight of a draft model; `linear` may compute it with lower precision."""
        return self.pack_linear(weight, bias)

    # Whether a column of `linear` has the same bits however many columns the weight has.
    has_independent_columns: ClassVar[bool] = True

    norms_round_sums: ClassVar[bool] = False  # `add_rms_norm` takes fp32 sums, and rounds them itself
    int4_format: ClassVar[str] = "blocks"  # format that the engine's option quantization="int4" makes
    # Quantised weight formats that `pack_quantized` takes; a weight of another format is dequantised before.
    weight_formats: ClassVar[frozenset[str]] = frozenset()
    # Formats that `embed` takes as a `QuantizedTable`; a table of another format is dequantised before.
    table_formats: ClassVar[frozenset[str]] = frozenset()

    def pack_quantized(
        self,
        weight_format: str,
        data: Tensor,
        scales: Tensor | None,
        bias: Tensor | None = None,
        zeros: Tensor | None = None,
    ) -> Any:
        """Pack a quantised weight of one of `weight_formats` for `linear`."""
        raise NotImplementedError(weight_format)

    # Whether all experts of a mixture are packed as one weight [E N, K]; else `Moe` holds a tuple of weights.
    stacks_experts: ClassVar[bool] = False

    def pack_router(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Pack a router weight [E, K] for `router_logits`; its values are not rounded."""
        return self.pack_linear(weight.float(), bias)

    # Identity of the packed form of quantised weights on this machine; None: it cannot be stored.
    packed_version: str | None = None

    def packed_state(self, weight_format: str, data: Tensor, scales: Tensor) -> PackedState:
        """Pack a quantised weight for a cache. Several threads may call this at once."""
        raise NotImplementedError

    def restore_packed(self, state: PackedState, bias: Tensor | None) -> Any:
        """Return the packed weight of a state; the tensor of the state is used, not copied."""
        raise NotImplementedError

    @abstractmethod
    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """Multiply x [R, K] by a packed weight: [R, N] in x's dtype or `out_dtype` (fp32 for logits)."""

    @abstractmethod
    def embed(self, tokens: Tensor, table: Tensor | QuantizedTable) -> Tensor:
        """Look up tokens [R] in table [V, D]: [R, D]."""

    def embed_unrounded(self, tokens: Tensor, table: Tensor | QuantizedTable) -> Tensor:
        """Compute `embed`; rows of a quantised table are fp32, not rounded to its dtype."""
        if isinstance(table, QuantizedTable):
            table = replace(table, dtype=torch.float32)
        return self.embed(tokens, table)

    def vocab_places(self, tokens: Tensor, num_rows: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """Return where tokens [R] are in a table of which each rank has `num_rows` rows: two tensors [R].

        First the row in the part of `rank`, any row for a token of another rank. Then the row in the results
        of all ranks, [num_ranks * R, D], in which every rank has looked up the first.
        """
        owners = (tokens // num_rows).clamp(0, num_ranks - 1)
        own = (tokens - rank * num_rows).clamp(0, num_rows - 1)
        return own, owners * len(tokens) + torch.arange(len(tokens), device=tokens.device)

    def concat_columns(self, left: Tensor, right: Tensor) -> Tensor:
        """Concatenate [R, A] and [R, B] to [R, A + B]."""
        return torch.cat([left, right], 1)

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute x / rms(x), rounded to the dtype of weight [D], times weight.

        Each row of x [R, n * D] holds n vectors, and each of them has a norm of its own.
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(s), s) with s = x + residual rounded to the residual's dtype; both [R, D].

        A backend with `norms_round_sums` takes x in fp32 too, and rounds it to that dtype before it is added.
        """

    @abstractmethod
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return x + residual, [R, D] each, rounded to x's dtype: the sum of `add_rms_norm`."""

    @abstractmethod
    def act_mul(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        """Compute act(gate) * up [R, I] from gate_up [R, 2 I] (gate, then up); see `ACTIVATIONS`."""

    @abstractmethod
    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply x [R, D] by the fp32 value of `factor`, rounded to x's dtype."""

    def row_norms(self, qkv: Tensor, attention: Attention, eps: float) -> Tensor:
        """Norm all q heads of a row of qkv [R, (num_q + 2 num_kv) * dim] together, and all k heads.

        Weights: `q_row_norm` and `k_row_norm` of `attention`; v is copied.
        """
        q_norm, k_norm = attention.q_row_norm, attention.k_row_norm
        assert q_norm is not None and k_norm is not None
        q, k, v = qkv.split([len(q_norm), len(k_norm), len(k_norm)], 1)
        return torch.cat([self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps), v], 1)

    @abstractmethod
    def rope_store(
        self,
        qkv: Tensor,  # [R, (num_q + 2 num_kv) * dim]: all q heads, then k, then v
        rows: Rows,
        attention: Attention,  # its heads and the per-head norms before rope
        rope: Tensor,  # [max_len, dim] fp32: cos of the dim/2 frequencies, then sin
        cache: Tensor,  # K, then V, of this layer, see `kv_layout`; written
        eps: float,
    ) -> Tensor:
        """Norm and rotate q and k (halves convention), store k and v, and return q [R, num_q * dim]."""

    def check_kv_dtype(self, dtype: torch.dtype) -> None:
        """Raise ConfigError if this device cannot store K and V in `dtype`, a quantised one."""

    @abstractmethod
    def attention(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from each row at position p to the keys 0..p of its slot: [R, num_q * out_dim].

        `sinks` [num_q] fp32: a logit of each head that takes part in the softmax without a value.
        """

    # Two ops in one. A backend may use fewer kernels, with the same bits.

    def linear_rope_store(
        self, x: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        """Compute `rope_store` of `linear` with the weight `attention.qkv`, x [R, hidden].

        `row_norms` comes between, where there are such norms.
        """
        qkv = self.linear(x, attention.qkv)
        if attention.q_row_norm is not None:
            qkv = self.row_norms(qkv, attention, eps)
        return self.rope_store(qkv, rows, attention, rope, cache, eps)

    def linear_act_mul(self, x: Tensor, packed: Any, activation: str = "silu") -> Tensor:
        """Compute `act_mul` of `linear`: x [R, K], weight [2 I, K] -> [R, I]."""
        return self.act_mul(self.linear(x, packed), activation)

    def router_logits(self, x: Tensor, packed: Any) -> Tensor:
        """Multiply x [R, K] by a packed router in fp32: [R, E] fp32."""
        return self.linear(x.float(), packed)

    def moe(self, x: Tensor, moe: Moe) -> Tensor:
        """Apply the experts that each row of x [R, hidden] selects, and the shared one: [R, hidden].

        Router logits, scores and weights are fp32. A row depends on no other row.
        """
        if not len(x):
            return x.clone()
        return self.combine_experts(self.expert_outputs(x, moe), *self.shared_expert(x, moe), x.dtype)

    @abstractmethod
    def expert_outputs(self, x: Tensor, moe: Moe) -> ExpertOutputs:
        """Return the outputs of the experts that rows x [R, hidden] select.

        The output of an expert, `linear` of `linear_act_mul`, is fp32.
        """

    def shared_expert(self, x: Tensor, moe: Moe) -> tuple[Tensor | None, Tensor | None]:
        """Return the output of the shared expert [R, hidden] fp32 and the logit of its weight [R, 1] fp32."""
        if moe.shared is None:
            return None, None
        inner = self.linear_act_mul(x, moe.shared.gate_up, moe.shared.activation)
        output = self.linear(inner, moe.shared.down, torch.float32)
        return output, None if moe.shared_gate is None else self.router_logits(x, moe.shared_gate)

    @abstractmethod
    def combine_experts(
        self, found: ExpertOutputs, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the sums of all experts of each row, [R, hidden] of `dtype`; see `shared_expert`.

        A sum starts with the best expert, adds weight times output by descending rank, then the shared
        expert, in fp32, and is rounded once.
        """

    def linear_sums(self, x: Any, packed: Any) -> Tensor:
        """Compute `linear` for `add_rms_norm`, which may round the result itself."""
        return self.linear(x, packed)

    # Norms whose result is read by one weight. A backend may return the rows as its kernels for that weight
    # read them, e.g. quantised; only `linear` and the ops that contain it take such rows. Same bits.

    def rms_norm_input(self, x: Tensor, weight: Tensor, eps: float, reader: Any) -> Any:
        """Compute `rms_norm` as input of the packed weight `reader`."""
        return self.rms_norm(x, weight, eps)

    def add_rms_norm_input(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Any = None
    ) -> tuple[Any, Tensor]:
        """Compute `add_rms_norm` with the norm as input of the packed weight `reader`, if not None."""
        return self.add_rms_norm(x, residual, weight, eps)

    def norm_add_rms_norm(
        self, x: Tensor, output_norm: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Any = None
    ) -> tuple[Any, Tensor]:
        """Compute `add_rms_norm_input` of `rms_norm(x, output_norm)`; all but the norms are [R, D]."""
        return self.add_rms_norm_input(self.rms_norm(x, output_norm, eps), residual, weight, eps, reader)

    def moe_add_rms_norm(
        self, x: Tensor, moe: Moe, residual: Tensor, weight: Tensor, eps: float, reader: Any = None
    ) -> tuple[Any, Tensor]:
        """Compute `add_rms_norm_input` of `moe`, x [R, hidden]."""
        return self.add_rms_norm_input(self.moe(x, moe), residual, weight, eps, reader)

    def embed_norm_concat(
        self,
        tokens: Tensor,  # [R]
        table: Tensor | QuantizedTable,  # [V, D]
        token_norm: Tensor,  # [D]
        residual: Tensor,  # [R, D]
        norm: Tensor,  # [D]
        eps: float,
    ) -> Tensor:
        """Concatenate the normed embedding of `tokens` and the normed `residual`: [R, 2 D]."""
        normed = self.rms_norm(residual, norm, eps)
        return self.concat_columns(self.rms_norm(self.embed(tokens, table), token_norm, eps), normed)

    @property
    def fused_layers(self) -> FusedLayers | None:
        """Return a kernel that runs all layers in one launch with the same bits, or None."""
        return None

    def begin_pass(self, rows: Rows) -> None:
        """Announce a forward pass over these rows, so that work shared by its layers is done once.

        A hint: an op called without it gives the same result.
        """
