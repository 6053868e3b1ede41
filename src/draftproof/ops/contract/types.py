"""Data types of the ops contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftproof.types import Rows, Windows


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """Copy to the host that was started; calling it waits and returns the tensor."""

    read: Callable[[], Tensor]
    is_ready: Callable[[], bool] = lambda: True  # whether the copy has arrived

    def __call__(self) -> Tensor:
        """Wait for the copy."""
        return self.read()


@dataclass(frozen=True, slots=True)
class Layout:
    """Output tensors of `StepOps.layout`; every element is written, padding included."""

    rows: Rows  # [R]
    windows: Windows  # [B] windows, [L] logits rows
    at: Tensor  # [L] int64: forward row of each logits row; 0 for padding


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at N rows; undefined for padding."""

    values: Tensor  # [N, 1 + top] fp32: of the token, then of the best
    ids: Tensor  # [N, top] int64: the best, in the order (value down, id up)
    ranks: Tensor  # [N] int64: rank of the token

    def put(self, found: TokenLogprobs) -> TokenLogprobs:
        """Copy `found` into these tensors."""
        for mine, theirs in ((self.values, found.values), (self.ids, found.ids), (self.ranks, found.ranks)):
            mine.copy_(theirs)
        return self


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape and flags of an attention layer."""

    num_q: int
    num_kv: int
    dim: int
    scale: float
    window: int  # number of newest keys that are visible; 0: all


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of an attention block, packed by the backend, and its shape."""

    heads: AttentionShape
    qkv: Any  # [(num_q + 2 num_kv) * dim, hidden]: all q heads, then k, then v
    out: Any  # [hidden, num_q * dim]
    q_norm: Tensor | None = None  # [dim]
    k_norm: Tensor | None = None  # [dim]


@dataclass(frozen=True, slots=True)
class Mlp:
    """Weights of a gated MLP, packed by the backend."""

    gate_up: Any  # [2 I, hidden]: gate, then up
    down: Any  # [hidden, I]


@dataclass(frozen=True, slots=True)
class Layer:
    """Decoder layer: a normed attention block, then a normed MLP, each added to the residual."""

    attention_norm: Tensor | None  # [hidden]; None: the attention reads the residual without a norm
    attention: Attention
    mlp_norm: Tensor  # [hidden]
    mlp: Mlp
    # The first layer of an EAGLE-3 draft head reads [normed token embedding, normed residual].
    token_norm: Tensor | None = None  # [hidden]
    residual_is_normed: bool = False  # the residual around the attention is the normed row


@dataclass(frozen=True, slots=True)
class QuantizedTable:
    """Embedding table in a packed quantised weight; rows are dequantised on lookup."""

    packed: Any  # [V, D]
    shape: tuple[int, int]
    dtype: torch.dtype  # of the rows


@dataclass(frozen=True, slots=True)
class PackedState:
    """Packed weight as a tensor and values that JSON can store, for a cache on disk."""

    weight: Tensor  # parts of a weight that were packed alike are concatenated along the first dimension
    columns: int
    values: dict[str, Any]


class FusedLayers(Protocol):
    """Kernel of a backend that runs all layers of a pass in one launch."""

    def __call__(
        self,
        residual: Tensor,  # [R, hidden]; may be overwritten
        layers: Sequence[Layer],
        rows: Rows,
        rope: Tensor,  # [max_len, dim]
        caches: Sequence[Tensor],  # one per layer
        eps: float,
        taps: Sequence[int],  # layers whose residual is returned
        embedding: Tensor | QuantizedTable | None,  # [V, hidden], for a first layer with `token_norm`
    ) -> tuple[Tensor, ...] | None:
        """Return the residual after the last layer, then after each layer of `taps`, [R, hidden] each.

        None: the kernel does not support this pass and has written nothing.
        """
