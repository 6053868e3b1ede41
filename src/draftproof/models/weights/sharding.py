"""Tensor parallelism of a model: which heads, experts and intermediate columns a rank has.

A cut at the fraction j / n, in lowest terms, has the same place for every number of ranks. So the cuts at
eighths, which `tp_invariant` sums by, contain those of 1, 2, 4 and 8 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig

INVARIANT_PARTS = 8  # parts of K that are summed apart with `tp_invariant`
INVARIANT_SIZES = (1, 2, 4, 8)  # numbers of ranks with the same bits
MAX_RANKS = 16  # more are not tried when possible sizes are listed


def cut_places(count: int, place: Callable[[Fraction], int]) -> list[int]:
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

    return cut_places(count, place)


def possible_sizes(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks at which every rank has a head."""
    sizes = range(1, min(config.num_heads, MAX_RANKS) + 1)
    heads = config.num_heads, config.num_kv_heads
    return [size for size in sizes if all_filled(head_bounds(*heads, size))]


def all_filled(places: list[int]) -> bool:
    """Return whether there is something between every two neighbouring places."""
    return all(low < high for low, high in zip(places, places[1:], strict=False))


@cache
def expert_owners(num_experts: int, size: int) -> tuple[int, ...]:
    """Return the rank of each expert: a range of whole experts for each of `size` ranks."""
    places = cut_places(size, lambda at: int(at * num_experts))
    return tuple(rank for rank in range(size) for _ in range(places[rank + 1] - places[rank]))


@dataclass(frozen=True, slots=True)
class Sharding:
    """Part of a model that one rank has."""

    model: ModelConfig
    rank: int
    size: int
    invariant: bool  # sum over fixed parts of K, so that 1, 2, 4 and 8 ranks give the same bits

    def __post_init__(self) -> None:
        """Refuse numbers of ranks at which the model cannot be cut."""
        if self.invariant and self.size not in INVARIANT_SIZES:
            raise ConfigError(
                "tp_invariant gives the same bits with 1, 2, 4 and 8 ranks, and "
                f"tensor_parallel_size={self.size} is none of them"
            )
        if self.size > self.model.num_heads or not all_filled(self.head_bounds(self.size)):
            sizes = ", ".join(map(str, possible_sizes(self.model)))
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {self.model.num_heads} attention heads with "
                f"{self.model.num_kv_heads} KV heads cannot be cut so; possible sizes: {sizes}"
            )
        if self.model.moe is not None and self.size > self.model.moe.routing.num_experts:
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {self.model.moe.routing.num_experts} experts are fewer "
                "than the ranks, and a rank has whole experts: use fewer ranks"
            )

    def head_bounds(self, count: int) -> list[int]:
        """Return the query heads at which attention is cut into `count` parts."""
        return head_bounds(self.model.num_heads, self.model.num_kv_heads, count)

    @property
    def heads(self) -> range:
        """Return the query heads of this rank."""
        bounds = self.head_bounds(self.size)
        return range(bounds[self.rank], bounds[self.rank + 1])

    @property
    def kv_heads(self) -> list[int]:
        """Return the KV heads of this rank; one occurs twice where query heads do not share it evenly."""
        group = self.model.num_heads // self.model.num_kv_heads
        owners = [head // group for head in self.heads]
        shared = math.gcd(*(owners.count(kv_head) for kv_head in set(owners)))
        return owners[::shared]

    @property
    def expert_owners(self) -> tuple[int, ...]:
        """Return the rank of each expert; () without experts or without other ranks."""
        if self.model.moe is None or self.size == 1:
            return ()
        return expert_owners(self.model.moe.routing.num_experts, self.size)

    @property
    def parts(self) -> range:
        """Return the parts of K of this rank, among `num_parts`."""
        each = self.num_parts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    @property
    def num_parts(self) -> int:
        """Return the number of parts that a sum over K has on all ranks together."""
        return INVARIANT_PARTS if self.invariant else self.size
