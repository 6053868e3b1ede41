"""A small covering-array generator: every pair of levels of every two factors occurs in some case."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[str, int, str, int]


def all_pairs(factors: Mapping[str, Sequence[Any]], unrelated: Collection[tuple[str, str]] = ()) -> set[Pair]:
    return {
        (a, i, b, j)
        for a, b in combinations(factors, 2)
        if (a, b) not in unrelated and (b, a) not in unrelated
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }


def pairs_of(case: Mapping[str, int]) -> set[Pair]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    unrelated: Collection[tuple[str, str]] = (),
    costs: Mapping[str, Mapping[Any, float]] | None = None,
) -> list[dict[str, Any]]:
    """Return cases: greedily, each from an uncovered pair and the levels that cover most pairs.

    `unrelated`: two factors that no code reads together, whose pairs need not occur. `costs`: relative
    costs of the levels of a factor; of levels that cover as many pairs, the cheaper ones are used more.
    """
    names = list(factors)
    open_pairs = all_pairs(factors, unrelated)
    cases = []
    uses = {(name, i): 0 for name in names for i in range(len(factors[name]))}
    prices = {name: [levels[level] for level in factors[name]] for name, levels in (costs or {}).items()}
    while open_pairs:
        a, i, b, j = min(open_pairs, key=lambda p: (-len(factors[p[0]]) * len(factors[p[2]]), p))
        case = {a: i, b: j}
        for name in sorted(set(names) - {a, b}, key=lambda n: (-len(factors[n]), n)):
            gains = []
            for level in range(len(factors[name])):
                new = sum(_pair(names, name, level, other, at) in open_pairs for other, at in case.items())
                price = prices[name][level] if name in prices else 1
                gains.append((-new, (1 + uses[name, level]) * price, level))
            case[name] = min(gains)[2]
        for name, level in case.items():
            uses[name, level] += 1
        case = {name: case[name] for name in names}
        open_pairs -= pairs_of(case)
        cases.append({name: factors[name][level] for name, level in case.items()})
    return cases


def _pair(names: list[str], a: str, i: int, b: str, j: int) -> Pair:
    return (a, i, b, j) if names.index(a) < names.index(b) else (b, j, a, i)


def each_level(
    cases: Sequence[Mapping[str, Any]],
    cost: Callable[[Mapping[str, Any]], float] = lambda case: 1.0,
    factors: Collection[str] = (),
) -> list[Mapping[str, Any]]:
    """Return a few of `cases` that still have every level of every factor: greedily, most levels by cost.

    `factors`: those to cover, or all.
    """
    levels = [
        {(name, str(level)) for name, level in case.items() if not factors or name in factors}
        for case in cases
    ]
    missing, chosen = set().union(*levels), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(levels[i] & missing) / cost(cases[i]))
        missing -= levels[best]
        chosen.append(cases[best])
    return chosen
