"""Parts of the weights of a model that a rank has.

Attention is cut by heads, the MLP by its intermediate columns, embedding and LM head by vocabulary ids. The
output projection and `down_proj` are cut along K, and their products are added over all ranks. Routed experts
are whole: a rank has a range of them. Routers, norms and the projections of latent attention that all heads
share are whole on every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig
from draftproof.models.families.moe import keeps_stored_dtype
from draftproof.models.weight_formats import FloatWeight, WeightTensor
from draftproof.models.weights.sharded import HeadNormWeight, RowParallelWeight, VocabParallelWeight
from draftproof.models.weights.sharding import Sharding, all_filled, cut_places

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WHOLE = re.compile(r"norm\.weight$|(o|down)_proj\.bias$|\.(q_a_proj|kv_a_proj_with_mqa)\.")
_INNER = re.compile(r"\.(gate|up)_proj\.")
_DOWN = ".down_proj.weight"
Prepare = Callable[[str, WeightTensor], WeightTensor]  # of the weight of a name


def as_loaded(_: str, weight: WeightTensor) -> WeightTensor:
    """Return the weight itself."""
    return weight


@dataclass(frozen=True, slots=True)
class WeightCuts:
    """Places at which the weights of a model are cut, and the parts of one rank."""

    sharding: Sharding
    dtype: torch.dtype  # of the model
    inner: Mapping[int, Sequence[int]]  # intermediate columns of an MLP -> those at which it is cut

    @classmethod
    def of_weights(
        cls,
        sharding: Sharding,
        weights: Mapping[str, WeightTensor],
        dtype: torch.dtype,
        prepare: Prepare = as_loaded,
    ) -> Self:
        """Find the places for the formats of `weights`; `prepare` quantises a whole weight."""
        cuts = cls(sharding, dtype, {})
        downs: dict[int, list[str]] = {}
        for name, weight in weights.items():
            if name.endswith(_DOWN) and cuts._expert(name) is None:
                downs.setdefault(weight.shape[1], []).append(name)
        inner = {}
        for width, names in downs.items():
            kinds = {type(weights[name]): name for name in names}  # floats are all prepared alike
            prepared = [prepare(name, cuts._in_dtype(name, weights[name])) for name in kinds.values()]
            unit = math.lcm(*(each.column_unit for each in (*(weights[name] for name in names), *prepared)))
            inner[width] = _inner_bounds(sharding, width, unit)
        return replace(cuts, inner=inner)

    def of_rank(self, rank: int) -> WeightCuts:
        """Return the cuts with the parts of another rank."""
        return replace(self, sharding=replace(self.sharding, rank=rank))

    def local_config(self) -> ModelConfig:
        """Return the configuration of this rank's layers."""
        sharding, model = self.sharding, self.sharding.model
        moe, width = model.moe, model.intermediate_size
        if moe is not None:
            moe = replace(moe, owners=sharding.expert_owners, rank=sharding.rank)
        return replace(
            model,
            num_heads=len(sharding.heads),
            num_kv_heads=len(sharding.kv_heads),
            intermediate_size=len(self._inner_rows(width)) if width in self.inner else width,
            moe=moe,
        )

    def cut(self, weights: dict[str, WeightTensor], prepare: Prepare = as_loaded) -> None:
        """Replace every weight by this rank's part, in place, and remove those that it does not have.

        `prepare` quantises a whole weight, so that its scales do not depend on the number of ranks. Of
        weights that are mapped from a file and need no preparation only the part is read.
        """
        for name in list(weights):
            if not self.has(name):
                del weights[name]
                continue
            weights[name] = self.part(name, prepare(name, self._in_dtype(name, weights[name])))

    def has(self, name: str) -> bool:
        """Return whether this rank has a part of a weight: all but the experts of other ranks."""
        expert, owners = self._expert(name), self.sharding.expert_owners
        return expert is None or not owners or owners[expert] == self.sharding.rank

    def part(self, name: str, weight: WeightTensor) -> WeightTensor:
        """Return this rank's part of a whole weight, which is in the dtype of the model if it is floats."""
        sharding, model = self.sharding, self.sharding.model
        if name in (EMBEDDING, LM_HEAD):
            return self._vocab_part(name, weight)
        if self._expert(name) is not None or keeps_stored_dtype(name, model):
            return weight
        if re.search(r"\.[qk]_norm\.weight$", name) and model.qk_row_norm:
            return self._norm_part(name, weight)
        if _WHOLE.search(name):
            return weight
        if _INNER.search(name):
            return weight.rows(self._inner_rows(weight.shape[0]))
        if name.endswith(_DOWN):
            cuts = self.inner[weight.shape[1]]
            return _columns(name, weight, [cuts[part] for part in self._part_bounds])
        if name.endswith(".self_attn.sinks"):
            return weight.rows(torch.tensor(sharding.heads))
        if match := re.search(r"\.self_attn\.(q|k|v|q_b|kv_b)_proj\.", name):
            heads = sharding.kv_heads if match[1] in ("k", "v") else sharding.heads
            return weight.rows(_head_columns(heads, self._head_dim(match[1])))
        if name.endswith(".self_attn.o_proj.weight"):
            cuts = sharding.head_bounds(sharding.num_parts)
            dim = self._head_dim("o")
            return _columns(name, weight, [cuts[part] * dim for part in self._part_bounds])
        raise ConfigError(f"tensor parallelism does not support {name} of {model.architecture} yet")

    def _expert(self, name: str) -> int | None:
        """Return the routed expert that a weight belongs to, or None."""
        moe = self.sharding.model.moe
        match = moe and re.search(rf"\.{re.escape(moe.experts)}\.(\d+)\.", name)
        return int(match[1]) if match else None

    def _head_dim(self, projection: str) -> int:
        """Return the columns of a head of a projection, or its rows for "o"."""
        latent, dim = self.sharding.model.latent, self.sharding.model.head_dim
        if latent is None:
            return dim
        widths = {"o": latent.value_dim, "kv_b": latent.nope_dim + latent.value_dim}
        return widths.get(projection, latent.nope_dim + dim)

    @property
    def _part_bounds(self) -> range:
        parts = self.sharding.parts
        return range(parts.start, parts.stop + 1)

    def _inner_rows(self, width: int) -> Tensor:
        cuts, parts = self.inner[width], self.sharding.parts
        return torch.arange(cuts[parts.start], cuts[parts.stop])

    def _in_dtype(self, name: str, weight: WeightTensor) -> WeightTensor:
        """Return floats in the dtype of the model, unless they decide about experts; others as they are."""
        if isinstance(weight, FloatWeight) and not keeps_stored_dtype(name, self.sharding.model):
            return FloatWeight(weight.dequantize(self.dtype))
        return weight

    def _vocab_part(self, name: str, weight: WeightTensor) -> WeightTensor:
        sharding = self.sharding
        vocab_size = sharding.model.vocab_size
        count = -(-vocab_size // sharding.size)
        rows = torch.arange(sharding.rank * count, (sharding.rank + 1) * count).clamp(max=vocab_size - 1)
        part = self._in_dtype(name, weight.rows(rows))
        return VocabParallelWeight(
            part.data,
            parts=(part,),
            vocab_size=vocab_size,
            dtype=self.dtype,
            is_table=name == EMBEDDING,
            is_head=name == LM_HEAD or sharding.model.tie_embeddings,
        )

    def _norm_part(self, name: str, weight: WeightTensor) -> WeightTensor:
        """Return a norm over all heads with the columns that each rank sends: those of q, then those of k."""
        dim, size = self.sharding.model.head_dim, self.sharding.size
        ranks = [replace(self.sharding, rank=rank) for rank in range(size)]
        width = max(len(each.heads) + len(each.kv_heads) for each in ranks) * dim
        is_q, places = ".q_norm." in name, torch.empty(weight.shape, dtype=torch.int64)
        for each in ranks:
            heads = each.heads if is_q else each.kv_heads
            first = each.rank * width + (0 if is_q else len(each.heads) * dim)
            columns = _head_columns(heads, dim)
            places[columns] = torch.arange(first, first + len(columns))
        own = self.sharding.heads if is_q else self.sharding.kv_heads
        return HeadNormWeight(
            weight.data, parts=(weight,), width=width, places=places, own=_head_columns(own, dim)
        )


def _inner_bounds(sharding: Sharding, width: int, unit: int) -> list[int]:
    """Return the intermediate columns at which an MLP of `width` is cut, at multiples of `unit`."""
    places = cut_places(sharding.num_parts, lambda at: int(at * -(-width // unit)) * unit)
    found = [min(place, width) for place in places]
    if not all_filled(found[:: sharding.num_parts // sharding.size]):
        raise ConfigError(
            f"tensor_parallel_size={sharding.size}: {width} intermediate columns in blocks of {unit} cannot "
            "be cut so: use fewer ranks, or weights in another format"
        )
    return found


def _head_columns(heads: Sequence[int], dim: int) -> Tensor:
    return (torch.tensor(list(heads))[:, None] * dim + torch.arange(dim)).flatten()


def _columns(name: str, weight: WeightTensor, places: Sequence[int]) -> WeightTensor:
    """Return the parts of a weight between the columns `places`."""
    unit, total = weight.column_unit, weight.shape[1]
    if wrong := [place for place in places if place % unit and place != total]:
        raise ConfigError(
            f"tensor parallelism cannot cut {name} at column {wrong[0]}: it has blocks of {unit} columns in "
            f"the format {weight.format}; use fewer ranks, or weights in another format"
        )
    pairs = zip(places, places[1:], strict=False)
    return RowParallelWeight.join([weight.columns(a, b) if a < b else None for a, b in pairs])
