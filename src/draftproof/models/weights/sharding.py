"""Tensor parallelism of a model: which heads, columns and rows of its weights a rank has.

Attention is cut by heads, the MLP by its intermediate columns, embedding and LM head by vocabulary ids. The
output projection and `down_proj` are cut along K, and their products are added over all ranks.

A cut at the fraction j / n, in lowest terms, has the same place for every number of ranks. So the cuts at
eighths, which `tp_invariant` sums by, contain those of 1, 2, 4 and 8 ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import torch

from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig
from draftproof.models.weight_formats import FloatWeight, WeightTensor
from draftproof.models.weights.sharded import RowParallelWeight, VocabParallelWeight

INVARIANT_PARTS = 8  # parts of K that are summed apart with `tp_invariant`
INVARIANT_SIZES = (1, 2, 4, 8)  # numbers of ranks with the same bits
UNSUPPORTED = {  # field of `ModelConfig` -> what
    "moe": "the experts",
    "latent": "the latent attention",
    "qk_row_norm": "the QK norms over all heads",
    "has_sinks": "the attention sinks",
}
MAX_RANKS = 16  # more are not tried when possible sizes are listed
_Q, _KV, _INNER = (r"\.self_attn\.q_proj\.", r"\.self_attn\.[kv]_proj\.", r"\.mlp\.(gate|up)_proj\.")
_WHOLE = re.compile(r"norm\.weight$|(o|down)_proj\.bias$")
Prepare = Callable[[str, WeightTensor], WeightTensor]  # of the weight of a name
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _bounds(count: int, place: Callable[[Fraction], int]) -> list[int]:
    """Return the places of `count` + 1 cuts, ascending; those of coarser fractions come first."""
    found: dict[Fraction, int] = {}
    fractions = [Fraction(j, count) for j in range(count + 1)]
    for at in sorted(fractions, key=lambda fraction: fraction.denominator):
        low = max((value for other, value in found.items() if other < at), default=0)
        high = min((value for other, value in found.items() if other > at), default=place(Fraction(1)))
        found[at] = min(max(place(at), low), high)
    return [found[at] for at in fractions]


@cache
def head_bounds(num_heads: int, num_kv_heads: int, count: int) -> list[int]:
    """Return the query heads at which attention is cut into `count` parts.

    Where there are enough KV heads a cut is at one of them, otherwise the ranks beside it have copies of it.
    """
    group = num_heads // num_kv_heads

    def place(at: Fraction) -> int:
        if at.denominator <= num_kv_heads:
            return at.numerator * num_kv_heads // at.denominator * group
        return at.numerator * num_heads // at.denominator

    return _bounds(count, place)


def possible_sizes(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks at which every rank has a head."""
    sizes = range(1, min(config.num_heads, MAX_RANKS) + 1)
    heads = config.num_heads, config.num_kv_heads
    return [size for size in sizes if _all_filled(head_bounds(*heads, size))]


def _all_filled(bounds: list[int]) -> bool:
    return all(low < high for low, high in zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Sharding:
    """Part of a model that one rank has."""

    model: ModelConfig
    rank: int
    size: int
    invariant: bool  # sum over fixed parts of K, so that 1, 2, 4 and 8 ranks give the same bits

    def __post_init__(self) -> None:
        """Refuse numbers of ranks at which the model cannot be cut."""
        for name, what in UNSUPPORTED.items():
            if getattr(self.model, name):
                raise ConfigError(
                    f"tensor parallelism does not support {what} of {self.model.architecture} yet: start one "
                    "engine for each device"
                )
        if self.invariant and self.size not in INVARIANT_SIZES:
            raise ConfigError(
                "tp_invariant gives the same bits with 1, 2, 4 and 8 ranks, and "
                f"tensor_parallel_size={self.size} is none of them"
            )
        if self.size > self.model.num_heads or not _all_filled(self._head_bounds(self.size)):
            sizes = ", ".join(map(str, possible_sizes(self.model)))
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {self.model.num_heads} attention heads with "
                f"{self.model.num_kv_heads} KV heads cannot be cut so; possible sizes: {sizes}"
            )

    def _head_bounds(self, count: int) -> list[int]:
        return head_bounds(self.model.num_heads, self.model.num_kv_heads, count)

    @property
    def heads(self) -> range:
        """Return the query heads of this rank."""
        bounds = self._head_bounds(self.size)
        return range(bounds[self.rank], bounds[self.rank + 1])

    @property
    def kv_heads(self) -> list[int]:
        """Return the KV heads of this rank; one occurs twice where query heads do not share it evenly."""
        group = self.model.num_heads // self.model.num_kv_heads
        owners = [head // group for head in self.heads]
        shared = math.gcd(*(owners.count(kv_head) for kv_head in set(owners)))
        return owners[::shared]

    def local_config(self, inner: int) -> ModelConfig:
        """Return the configuration of this rank's layers, with `inner` intermediate columns."""
        return replace(
            self.model,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=inner,
        )

    def cut(
        self,
        weights: dict[str, WeightTensor],
        dtype: torch.dtype,
        prepare: Prepare = lambda _, weight: weight,
    ) -> ModelConfig:
        """Replace every weight by this rank's part, in place; return the configuration of the part.

        `prepare` quantises a whole weight, so that its scales do not depend on the number of ranks. Of
        weights that are mapped from a file and need no preparation only the part is read.
        """
        inner = self._inner_bounds(weights, dtype, prepare)
        for name in list(weights):
            part = self._part(name, prepare(name, _in_dtype(weights[name], dtype)), inner, dtype)
            weights[name] = part
        return self.local_config(inner[self._parts(self.rank + 1)] - inner[self._parts(self.rank)])

    def _parts(self, rank: int) -> int:
        """Return the index of the first part of K of a rank."""
        return rank * INVARIANT_PARTS // self.size if self.invariant else rank

    @property
    def _num_parts(self) -> int:
        return INVARIANT_PARTS if self.invariant else self.size

    def _inner_bounds(
        self, weights: dict[str, WeightTensor], dtype: torch.dtype, prepare: Prepare
    ) -> list[int]:
        """Return the intermediate columns at which the MLP is cut, at whole blocks of every `down_proj`."""
        downs = {name: weight for name, weight in weights.items() if name.endswith("down_proj.weight")}
        kinds = {type(weight): name for name, weight in downs.items()}  # floats are all prepared alike
        prepared = [prepare(name, _in_dtype(downs[name], dtype)) for name in kinds.values()]
        unit = math.lcm(*(weight.column_unit for weight in (*downs.values(), *prepared)))
        total = self.model.intermediate_size
        places = _bounds(self._num_parts, lambda at: int(at * -(-total // unit)) * unit)
        bounds = [min(place, total) for place in places]
        if not _all_filled(bounds[:: self._num_parts // self.size]):
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {total} intermediate columns in blocks of {unit} cannot "
                "be cut so: use fewer ranks, or weights in another format"
            )
        return bounds

    def _part(self, name: str, weight: WeightTensor, inner: list[int], dtype: torch.dtype) -> WeightTensor:
        dim, first, last = self.model.head_dim, self._parts(self.rank), self._parts(self.rank + 1)
        if _WHOLE.search(name):
            if name.endswith(("q_norm.weight", "k_norm.weight")) and weight.shape != (dim,):
                raise ConfigError(f"tensor parallelism cannot cut {name}, a norm over all heads")
            return weight
        if name in (EMBEDDING, LM_HEAD):
            return self._vocab_part(name, weight, dtype)
        if re.search(_Q, name):
            return weight.rows(_head_rows(self.heads, dim))
        if re.search(_KV, name):
            return weight.rows(_head_rows(self.kv_heads, dim))
        if re.search(_INNER, name):
            return weight.rows(torch.arange(inner[first], inner[last]))
        if name.endswith(".mlp.down_proj.weight"):
            return _columns(name, weight, inner[first : last + 1])
        if name.endswith(".self_attn.o_proj.weight"):
            bounds = self._head_bounds(self._num_parts)[first : last + 1]
            return _columns(name, weight, [head * dim for head in bounds])
        raise ConfigError(f"tensor parallelism does not support {name} of {self.model.architecture} yet")

    def _vocab_part(self, name: str, weight: WeightTensor, dtype: torch.dtype) -> WeightTensor:
        vocab_size = self.model.vocab_size
        count = -(-vocab_size // self.size)
        rows = torch.arange(self.rank * count, (self.rank + 1) * count).clamp(max=vocab_size - 1)
        part = _in_dtype(weight.rows(rows), dtype)
        is_head = name == LM_HEAD or self.model.tie_embeddings
        return VocabParallelWeight(
            part.data,
            parts=(part,),
            vocab_size=vocab_size,
            dtype=dtype,
            is_table=name == EMBEDDING,
            is_head=is_head,
        )


def _head_rows(heads: range | list[int], dim: int) -> torch.Tensor:
    return (torch.tensor(list(heads))[:, None] * dim + torch.arange(dim)).flatten()


def _columns(name: str, weight: WeightTensor, bounds: list[int]) -> WeightTensor:
    """Return the parts of a weight between the columns `bounds`."""
    unit, total = weight.column_unit, weight.shape[1]
    if wrong := [place for place in bounds if place % unit and place != total]:
        raise ConfigError(
            f"tensor parallelism cannot cut {name} at column {wrong[0]}: it has blocks of {unit} columns in "
            f"the format {weight.format}; use fewer ranks, or weights in another format"
        )
    pairs = zip(bounds, bounds[1:], strict=False)
    return RowParallelWeight.join([weight.columns(a, b) if a < b else None for a, b in pairs])


def _in_dtype(weight: WeightTensor, dtype: torch.dtype) -> WeightTensor:
    """Return floats in the dtype of the model; other weights as they are."""
    if isinstance(weight, FloatWeight):
        return FloatWeight(weight.dequantize(dtype))
    if isinstance(weight, RowParallelWeight):
        parts = [None if part is None else _in_dtype(part, dtype) for part in weight.parts]
        return RowParallelWeight.join(parts)
    return weight
