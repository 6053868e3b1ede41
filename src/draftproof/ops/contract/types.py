"""Data types of the ops contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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


class NamedIds(NamedTuple):
    """Ids whose logprobs are reported beside the token's, by slot."""

    table: Tensor  # [S, W] int64; -1: no id
    slots: Tensor  # [R] int64: slot of each logits row; negative for padding
    width: int  # columns of the table that are used

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return the ids [N, width] of logits rows [N]; those of a negative row are not defined."""
        return self.table[:, : self.width][self.slots[rows.clamp(min=0)].clamp(min=0)]


class NamedLogprobs(NamedTuple):
    """Logprobs and ranks of M ids at N rows; undefined for padding and for an id of -1."""

    values: Tensor  # [N, M] fp32
    ranks: Tensor  # [N, M] int64


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at N rows; undefined for padding."""

    values: Tensor  # [N, 1 + top] fp32: of the token, then of the best
    ids: Tensor  # [N, top] int64: the best, in the order (value down, id up)
    ranks: Tensor  # [N] int64: rank of the token
    named: NamedLogprobs | None = None  # of ids that a request names

    def put(self, found: TokenLogprobs) -> TokenLogprobs:
        """Copy `found` into these tensors."""
        for mine, theirs in zip(self.tensors, found.tensors, strict=True):
            mine.copy_(theirs)
        return self

    def put_rows(self, rows: Tensor, found: TokenLogprobs) -> TokenLogprobs:
        """Copy `found` into these rows [n] of the tensors."""
        for mine, theirs in zip(self.tensors, found.tensors, strict=True):
            mine.index_copy_(0, rows, theirs)
        return self

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return self.values, self.ids, self.ranks, *(self.named or ())


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Vocabulary of a draft head, where it is a part of the target's."""

    ids: Tensor  # [N] int64, ascending: ids of the target
    places: Tensor  # [V] int64: index into `ids`; -1: not in it


# Gated activations of `ForwardOps.act_mul`, see `ops/reference/activations.py`.
ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape and flags of an attention layer."""

    num_q: int
    num_kv: int
    dim: int
    scale: float
    window: int  # number of newest keys that are visible; 0: all
    value_dim: int = 0  # a value is the first `value_dim` columns of its key; 0: it is stored apart, as wide

    @property
    def out_dim(self) -> int:
        """Return the width of a head's result."""
        return self.value_dim or self.dim


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of an attention block, packed by the backend, and its shape."""

    heads: AttentionShape
    qkv: Any  # [(num_q + 2 num_kv) * dim, hidden]: all q heads, then k, then v
    out: Any  # [hidden, num_q * dim]
    q_norm: Tensor | None = None  # [dim]
    k_norm: Tensor | None = None  # [dim]
    # Norms of q and k over all heads together, before rope; both or none, and not beside norms of a head.
    # A tensor, or what `ops/parallel` makes of it where the heads are cut between ranks.
    q_row_norm: Any = None  # [num_q * dim]
    k_row_norm: Any = None  # [num_kv * dim]
    sinks: Tensor | None = None  # [num_q] fp32: logit of each head that takes part in the softmax, no value


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Weights of latent attention (MLA) in the absorbed form, packed by the backend.

    The cache holds one row a token for all heads: the normed latent, then the rotated rope key. The query of
    a head is multiplied by the head's key projection, so that its product with a latent is its product with
    the key. A value is the latent, and the result of a head is multiplied by the head's value projection.
    """

    heads: AttentionShape  # num_kv 1; dim: latent and rope columns; value_dim: latent columns
    nope_dim: int  # columns of a query head before its rope columns
    qkv: Any  # [q columns + dim, hidden]: queries or their low-rank input, then latent, then rope key
    q_norm: Tensor | None  # [q rank]; None: `qkv` gives the queries
    q_up: Any  # [num_q * (nope_dim + rope columns), q rank]; None: as above
    latent_norm: Tensor  # [value_dim]
    key_up: Any  # per head [value_dim, nope_dim]
    value_up: Any  # per head [columns of a value, value_dim]
    out: Any  # [hidden, num_q * columns of a value]
    rope_pairs: bool  # rotary pairs are adjacent columns, not halves
    norm_eps: float  # of `q_norm` and `latent_norm`

    @property
    def rope_dim(self) -> int:
        """Return the number of rope columns of a query head or a key."""
        return self.heads.dim - self.heads.value_dim

    @property
    def q_columns(self) -> int:
        """Return the number of columns of `qkv` that belong to queries."""
        if self.q_norm is not None:
            return len(self.q_norm)
        return self.heads.num_q * (self.nope_dim + self.rope_dim)


@dataclass(frozen=True, slots=True)
class Mlp:
    """Weights of a gated MLP, packed by the backend."""

    gate_up: Any  # [2 I, hidden]: gate, then up
    down: Any  # [hidden, I]
    activation: str = "silu"  # one of ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of the experts of a token from its router logits.

    A score is the softmax of the logits or the sigmoid of a logit. The correction bias is added to the scores
    for the choice alone. With groups, the experts are those of the `top_groups` best groups. Equal scores, of
    experts and of groups, are ordered by ascending id.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"  # or "sigmoid"
    normalize: bool = True  # whether the weights of a token are divided by their sum
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # of a group's experts; or "top2_sum"
    scale: float = 1.0  # of the weights, after normalisation


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Experts of a mixture that this rank has: `count` ids from `first` on."""

    first: int
    count: int
    owners: Tensor  # [E] int64: rank of each expert


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts, each a gated MLP, with weights packed by the backend.

    With a `part`, `gate_up` and `down` hold the experts of this rank alone.
    """

    routing: Routing
    router: Any  # [E, hidden], packed by `pack_router`
    gate_up: Any  # E weights [2 I, hidden], one a tuple entry, or stacked: see `ForwardOps.stacks_experts`
    down: Any  # E weights [hidden, I]
    correction: Tensor | None = None  # [E] fp32
    shared: Mlp | None = None  # applied to every token
    shared_gate: Any = None  # [1, hidden], packed as a router; its sigmoid scales the shared expert
    activation: str = "silu"  # of the experts, one of ACTIVATIONS
    part: ExpertPart | None = None  # None: all experts are here


@dataclass(frozen=True, slots=True)
class ExpertOutputs:
    """Outputs of the experts that rows selected; those of experts that another rank has are undefined."""

    values: Tensor  # [R * top_k, hidden] fp32
    experts: Tensor  # [R, top_k] integers, best first
    weights: Tensor  # [R, top_k] fp32
    places: Tensor | None = None  # [R, top_k] int64: line of `values` of each; None: by row, then rank


@dataclass(frozen=True, slots=True)
class Layer:
    """Decoder layer: an attention block, then an MLP, each added to the residual.

    A norm before a block, after it, or both. Norms before a block read the residual.
    """

    attention_norm: Tensor | None  # [hidden]; None: the attention reads the residual without a norm
    attention: Attention | LatentAttention
    mlp_norm: Tensor | None  # [hidden]; None: the MLP reads the residual without a norm
    mlp: Mlp | Moe
    attention_output_norm: Tensor | None = None  # [hidden]: of the block's output, before the sum
    mlp_output_norm: Tensor | None = None  # [hidden]
    residual_scale: float = 1.0  # factor of both outputs before the sum
    # The first layer of an EAGLE-3 draft head reads [normed token embedding, normed residual].
    token_norm: Tensor | None = None  # [hidden]
    residual_is_normed: bool = False  # the residual around the attention is the normed row


@dataclass(frozen=True, slots=True)
class QuantizedTable:
    """Embedding table in a packed quantised weight; rows are dequantised on lookup."""

    packed: Any  # [V, D]
    shape: tuple[int, int]
    dtype: torch.dtype  # of the rows
    lm_head_dtype: torch.dtype | None = None  # of the rows it multiplies as the LM head, if it is that too


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
        ropes: Sequence[Tensor],  # one per layer, [max_len, dim]
        caches: Sequence[Tensor],  # one per layer
        eps: float,
        taps: Sequence[int],  # layers whose residual is returned
        embedding: Tensor | QuantizedTable | None,  # [V, hidden], for a first layer with `token_norm`
    ) -> tuple[Tensor, ...] | None:
        """Return the residual after the last layer, then after each layer of `taps`, [R, hidden] each.

        None: the kernel does not support this pass and has written nothing.
        """
