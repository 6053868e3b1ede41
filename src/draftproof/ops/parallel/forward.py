"""Forward ops of a backend with linear layers that are cut between the ranks.

A column-parallel weight is cut along its output rows and needs nothing here. The product of a row-parallel
weight is a sum over all ranks: each rank computes fp32 sums over its parts of K and adds them pairwise, then
the sums of all ranks are gathered and added pairwise, and the result is rounded once. A rank's own sum is a
subtree of that tree. With the same parts every number of ranks that is a power of two gives the same bits.

The experts of a mixture are whole on one rank each. A rank computes the outputs of its own experts, they are
gathered, and every rank adds those of a row in the row's own order. An output is never a partial sum, so its
bits are the same for every number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.ops.contract.backend import Ops
from draftproof.ops.contract.communicator import Communicator
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import Attention, ExpertOutputs, FusedLayers, Layer, Moe, QuantizedTable
from draftproof.types import Rows

MAX_GATHERED_BYTES = 1 << 28  # of the outputs of experts; more are gathered in several rounds


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """Weight [N, K] of which this rank has some columns, in one part or several."""

    parts: tuple[Any, ...]  # packed; None: a part without columns
    widths: tuple[int, ...]  # columns of each part
    bias: Tensor | None  # [N] fp32, added once to the sum over all ranks


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """LM head or embedding table [V, D] of which this rank has some rows; all ranks have as many."""

    vocab_size: int
    num_rows: int  # of each rank; those behind the last id repeat it
    head: Any = None  # packed, [num_rows, D]
    table: Tensor | QuantizedTable | None = None  # [num_rows, D]


@dataclass(frozen=True, slots=True)
class HeadParallelNorm:
    """Norm over all heads of a row, of which this rank has some.

    The q and k columns of all ranks are gathered, and the whole row is normed on every rank.
    """

    weight: Tensor  # [D]: of the whole row
    width: int  # q and k columns that a rank sends, with padding
    places: Tensor  # [D] int64: columns of the whole row among those of all ranks, side by side
    own: Tensor  # [d] int64: columns of this rank in the whole row


def pairwise_sum(terms: Sequence[Tensor | None]) -> Tensor:
    """Add fp32 tensors as a balanced tree, neighbours first; None: a term that does not exist."""
    level = list(terms)
    while len(level) > 1:
        if len(level) % 2:
            level.append(None)
        level = [_add(left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
    assert level[0] is not None
    return level[0]


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    return left + right


class ParallelForward(ForwardOps):
    """Mixin in front of the forward ops of a backend; see `use_communicator`."""

    communicator: Communicator

    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(packed, RowParallelLinear):
            return self._row_parallel(x, packed, out_dtype or x.dtype)
        if isinstance(packed, VocabParallel):
            local = super().linear(x, packed.head, out_dtype)  # type: ignore[safe-super]
            every = self.communicator.all_gather(local)  # [ranks, R, num_rows]
            return every.transpose(0, 1).reshape(len(x), -1)[:, : packed.vocab_size].contiguous()
        return super().linear(x, packed, out_dtype)  # type: ignore[safe-super]

    def linear_sums(self, x: Tensor, packed: Any) -> Tensor:
        if self.norms_round_sums and isinstance(packed, RowParallelLinear):
            return self._row_parallel(x, packed, torch.float32)
        return self.linear(x, packed)

    def _row_parallel(self, x: Tensor, packed: RowParallelLinear, dtype: torch.dtype) -> Tensor:
        pieces = x.split(packed.widths, 1) if len(packed.parts) > 1 else (x,)
        sums = [
            None
            if part is None
            else super(ParallelForward, self).linear(piece.contiguous(), part, torch.float32)  # type: ignore[safe-super]
            for piece, part in zip(pieces, packed.parts, strict=True)
        ]
        total = pairwise_sum(self.communicator.all_gather(pairwise_sum(sums)).unbind())
        return (total if packed.bias is None else total + packed.bias).to(dtype)

    def expert_outputs(self, x: Tensor, moe: Moe) -> ExpertOutputs:
        found = super().expert_outputs(x, moe)  # type: ignore[safe-super]
        if moe.part is None:
            return found
        values = found.values if found.places is None else found.values[found.places.flatten()]
        experts = found.experts.flatten().long().clamp(0, len(moe.part.owners) - 1)
        owners = moe.part.owners[experts]  # [R * top_k]
        out = torch.empty_like(values)
        step = max(1, MAX_GATHERED_BYTES // (values[:1].nbytes * self.communicator.size))
        for begin in range(0, len(values), step):
            every = self.communicator.all_gather(values[begin : begin + step])  # [ranks, pairs, hidden]
            pairs = torch.arange(every.shape[1], device=values.device)
            out[begin : begin + step] = every[owners[begin : begin + step], pairs]
        return replace(found, values=out, places=None)

    def row_norms(self, qkv: Tensor, attention: Attention, eps: float) -> Tensor:
        norms = attention.q_row_norm, attention.k_row_norm
        if not isinstance(norms[0], HeadParallelNorm):
            return super().row_norms(qkv, attention, eps)
        num_values = attention.heads.num_kv * attention.heads.dim
        own, values = qkv[:, :-num_values], qkv[:, -num_values:]
        padded = torch.nn.functional.pad(own, (0, norms[0].width - own.shape[1]))
        every = self.communicator.all_gather(padded).transpose(0, 1).flatten(1)  # [R, ranks * width]
        normed = [self.rms_norm(every[:, norm.places], norm.weight, eps)[:, norm.own] for norm in norms]
        return torch.cat([*normed, values], 1)

    def embed(self, tokens: Tensor, table: Tensor | QuantizedTable) -> Tensor:
        if not isinstance(table, QuantizedTable) or not isinstance(table.packed, VocabParallel):
            return super().embed(tokens, table)  # type: ignore[safe-super]
        packed = table.packed
        assert packed.table is not None
        own, places = self.vocab_places(
            tokens, packed.num_rows, self.communicator.rank, self.communicator.size
        )
        part = packed.table
        if isinstance(part, QuantizedTable):
            part = replace(part, dtype=table.dtype)
        every = self.communicator.all_gather(super().embed(own, part))  # type: ignore[safe-super]
        return super().embed(places, every.flatten(0, 1))  # type: ignore[safe-super]

    @property
    def fused_layers(self) -> FusedLayers | None:
        """Return the backend's kernel, which takes layers that are not cut, as those of draft models."""
        return self._fused_uncut if super().fused_layers is not None else None

    def _fused_uncut(
        self, residual: Tensor, layers: Sequence[Layer], rows: Rows, ropes: Sequence[Tensor],
        caches: Sequence[Tensor], eps: float, taps: Sequence[int], embedding: Tensor | QuantizedTable | None,
    ) -> tuple[Tensor, ...] | None:  # fmt: skip
        run = super().fused_layers
        if run is None or isinstance(layers[0].attention.out, RowParallelLinear):
            return None
        return run(residual, layers, rows, ropes, caches, eps, taps, embedding)


# formats of weights that are cut
VOCAB_PARALLEL, ROW_PARALLEL, HEAD_PARALLEL = "vocab_parallel", "row_parallel", "head_parallel"


def use_communicator(ops: Ops, communicator: Communicator) -> None:
    """Let the forward ops of a backend take weights that are cut between the ranks."""
    base = type(ops.forward)
    formats: dict[str, Any] = {
        "table_formats": base.table_formats | {VOCAB_PARALLEL},
        "weight_formats": base.weight_formats | {VOCAB_PARALLEL, ROW_PARALLEL, HEAD_PARALLEL},
    }
    ops.forward.__class__ = type(f"Parallel{base.__name__}", (ParallelForward, base), formats)
    assert isinstance(ops.forward, ParallelForward)
    ops.forward.communicator = ops.communicator = communicator
