"""Covering arrays of the exactness matrix."""

from covering import all_pairs, each_level, pairs_of, pairwise

FACTORS = {"a": range(5), "b": range(4), "c": "xyz", "d": [True, False], "e": [None]}


def indices(case):
    return {name: list(FACTORS[name]).index(level) for name, level in case.items()}


def test_every_pair_of_levels_occurs():
    covered = set().union(*(pairs_of(indices(case)) for case in pairwise(FACTORS)))
    assert covered == all_pairs(FACTORS)


def test_only_pairs_of_unrelated_factors_are_left_out():
    cases = pairwise(FACTORS, unrelated=[("b", "a")])
    covered = set().union(*(pairs_of(indices(case)) for case in cases))
    assert covered >= all_pairs(FACTORS, unrelated=[("a", "b")]) and covered != all_pairs(FACTORS)
    assert len(cases) < len(pairwise(FACTORS))


def test_covering_array_is_small_and_deterministic():
    cases = pairwise(FACTORS)
    assert 20 <= len(cases) <= 26  # 5 x 4 is the least
    assert cases == pairwise(FACTORS)


def test_control_missing_case_is_detected():
    covered = set().union(*(pairs_of(indices(case)) for case in pairwise(FACTORS)[1:]))
    assert covered != all_pairs(FACTORS)


def test_few_cases_have_each_level():
    cases = pairwise(FACTORS)
    few = each_level(cases)
    for name, levels in FACTORS.items():
        assert {case[name] for case in few} == set(levels)
    assert len(few) < len(cases) / 2
    assert len(each_level(cases, factors=["d", "e"])) == 2


def test_expensive_levels_occur_less_but_in_every_pair():
    costs = {"b": {0: 1, 1: 1, 2: 1, 3: 20}}
    plain, cheap = pairwise({**FACTORS, "f": range(6)}), pairwise({**FACTORS, "f": range(6)}, costs=costs)
    uses = [sum(case["b"] == 3 for case in cases) for cases in (plain, cheap)]
    assert uses[1] < uses[0]
    assert all({case["f"] for case in cheap if case["b"] == level} == {*range(6)} for level in range(4))
