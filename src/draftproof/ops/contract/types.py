"""Data types of the ops contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.types import Rows, Windows


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy on its way to the host; a call waits for it."""

    read: Callable[[], Tensor]
    is_ready: Callable[[], bool] = lambda: True  # has it come?

    def __call__(self) -> Tensor:
        return self.read()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where `Ops.layout` writes the rows of a step; all of it is written, padding included."""

    rows: Rows  # [R]
    windows: Windows  # [B] windows, [L] logits rows
    at: Tensor  # [L] int64: the forward row of each logits row; 0 where it is padding


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at N rows; those of padding may hold anything."""

    values: Tensor  # [N, 1 + top] fp32: of the token itself, then of the best
    ids: Tensor  # [N, top] int64: the best, in the order (value down, id up)
    ranks: Tensor  # [N] int64: of the token itself

    def put(self, found: TokenLogprobs) -> TokenLogprobs:
        """What was found into these tensors."""
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
    window: int  # keys older than position - window + 1 are not seen; 0 = all are


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and storage of the paged KV cache of one attention layer."""

    num_pages: int
    page_size: int  # tokens per page
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one layer's cache: keys, then values."""
        return 2, self.num_pages, self.page_size, self.num_kv_heads, self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer's cache."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        """Allocate one layer's cache, filled with zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder block's weights, packed by the backend."""

    attention_norm: Tensor | None  # [hidden]; None: a head's first layer may read its rows as they are
    qkv: Any
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Any
    mlp_norm: Tensor  # [hidden]
    gate_up: Any
    down: Any
    heads: AttentionShape
    # a head's first layer may read two rows side by side: the token's embedding, normed, then its own
    token_norm: Tensor | None = None  # [hidden]
    norm_around: bool = False  # what goes around its attention is normed too
