"""Contract of the ops of latent attention (MLA) around `attention`; see `LatentAttention`.

A layer calls `linear` with the weight `qkv`, `latent_store`, `linear` with `q_up` where there is one,
`latent_queries`, `attention`, `head_linear` with `value_up`, and `linear` with `out`. Prefill, verify and
decode rows take the same path, so they have the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from draftproof.ops.contract.types import LatentAttention
from draftproof.types import Rows


class LatentOps(ABC):
    """Part of the forward ops."""

    @abstractmethod
    def pack_heads(self, weight: Tensor) -> Any:
        """Pack weights [H, N, K], one for each head, for `head_linear` and `latent_queries`."""

    @abstractmethod
    def head_linear(self, x: Tensor, packed: Any) -> Tensor:
        """Multiply the columns of each head by the head's weight: x [R, H * K] -> [R, H * N]."""

    @abstractmethod
    def latent_store(
        self,
        qkv: Tensor,  # [R, q_columns + dim]: queries or their low-rank input, then latent, then rope key
        rows: Rows,
        attention: LatentAttention,
        rope: Tensor,  # [max_len, rope_dim] fp32: cos of the rope_dim/2 frequencies, then sin
        cache: Tensor,  # of this layer, see `kv_layout`; written
    ) -> Tensor:
        """Store the normed latent and the rotated key, and return the query columns [R, q_columns].

        The query columns are normed if there is a `q_norm`. Rotated columns are stored as halves.
        """

    @abstractmethod
    def latent_queries(self, q: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor) -> Tensor:
        """Return the queries of `attention` [R, num_q * dim] from q [R, num_q * (nope_dim + rope_dim)].

        The first `nope_dim` columns of a head are multiplied by `key_up`; the others are rotated to halves.
        """
