"""The native loops of draft budgets against whole columns: the same beliefs, the same drafts."""

from __future__ import annotations

import numpy as np
import pytest

from draftproof.engine.drafting import budget_kernels
from draftproof.engine.drafting.budget_kernels import (
    FIXED,
    HELD,
    LAST,
    LIMIT,
    MANY,
    NEW,
    RATES,
    TOLD,
    WINDOWS,
    WORTH,
)
from draftproof.engine.drafting.step_cost import RowCosts

SLOTS, K = 24, 6


def state(draw):
    """A table of prices, and what is known of 24 slots, some of which have fixed budgets; 17 of them."""
    columns = draw.integers(0, 4, (budget_kernels.COLUMNS, SLOTS))
    columns[FIXED] = draw.random(SLOTS) < 0.2
    columns[WINDOWS] = draw.integers(0, 2 * NEW, SLOTS)
    columns[TOLD + 1 : TOLD + 3] *= (columns[TOLD] > 0) * draw.integers(1, MANY, SLOTS)  # STOOD and FELL
    minds = draw.random((SLOTS + 1, LAST + 1)) ** 4
    minds[:, :LAST] /= minds[:, :LAST].sum(1, keepdims=True)
    minds[3] = minds[4]  # ties
    slots, sizes = draw.permutation(SLOTS)[:17], (8, 20, 24, 32, 48, 64, 96)
    costs = RowCosts({n: 1 + n / 40 + draw.random() / 4 for n in sizes}, between=bool(draw.integers(2)))
    return costs, columns, minds, slots, draw.integers(0, K + 1, len(slots))


def believed(columns, minds, slots, fades):
    """[B, rates] beliefs, [rates] what is expected of a newcomer."""
    told, stood, fell = columns[TOLD : TOLD + 3, slots]
    belief = minds[slots, :LAST]
    belief *= RATES ** np.minimum(stood, MANY)[:, None] * (1 - RATES) ** np.minimum(fell, MANY)[:, None]
    belief /= belief.sum(1, keepdims=True)
    new = np.where(columns[WINDOWS, slots] < NEW, told, 0)
    newcomer, keep = minds[-1, :LAST], (1 - budget_kernels.LEARN) ** new.sum()
    if new.any():
        newcomer = np.maximum(keep * newcomer + (1 - keep) * (new @ belief) / new.sum(), budget_kernels.LEAST)
        newcomer /= newcomer.sum()
    return belief + fades * (newcomer - belief), newcomer


def given(costs, survival, rows, tokens, still, least, asking):
    """[B] drafts: of every size of a step those that are likeliest; of ties the first."""
    order = np.argsort(-survival, axis=None, kind="stable")
    gains = survival.ravel()[order]
    gains = gains[gains > WORTH]
    top, best = 0.0, 0
    for count in sorted({min(int(size) - rows, len(gains)) for size in costs.table[0] if size >= rows}):
        price = max(costs.of(rows + count) + (asking if count else 0.0), least) + still
        top, best = max((top, best), ((tokens + gains[:count].sum()) / price, count), key=lambda x: x[0])
    return np.bincount(order[:best] // survival.shape[1], minlength=len(survival))


@pytest.mark.parametrize("seed", range(40))
def test_the_same_as_whole_columns(seed):
    draw = np.random.default_rng(seed)
    costs, columns, minds, slots, most = state(draw)
    fades, still, least, asking = 0.1, 0.3, *((0.0, 0.0), (1.5, 0.0), (0.0, 0.4))[seed % 3]
    belief, newcomer = believed(columns, minds, slots, fades)
    fixed, place = columns[FIXED, slots] > 0, np.arange(1, K + 1)
    want = belief @ (RATES[:, None] ** place)
    rows = len(slots) + int(most[fixed].sum())
    tokens = len(slots) + float(want[fixed][place <= most[fixed][:, None]].sum())
    want = np.where((place <= most[:, None]) & ~fixed[:, None], want, 0.0)
    budget_kernels.ready()
    survival, gains, *rest = budget_kernels.believe(columns, minds, slots, most, fades)
    assert minds[slots, :LAST] == pytest.approx(belief) and minds[-1, :LAST] == pytest.approx(newcomer)
    assert survival == pytest.approx(want[:, : survival.shape[1]]) and rest == pytest.approx([rows, tokens])
    assert np.sort(gains) == pytest.approx(np.sort(want[want > WORTH]))
    assert not columns[TOLD : TOLD + 3, slots].any()
    gains.sort()
    prices = *rest, still, least, asking
    taken = columns, minds, slots, most, survival, costs.table, gains, *prices, asking
    held, total, budget, probing, *_ = budget_kernels.decide(*taken, -1.0, 1)
    assert held.tolist() == np.where(fixed, most, given(costs, survival, *prices)).tolist()
    assert total == held.sum() and (columns[HELD, slots] == held).all()
    assert (budget == held).all() and not probing  # there is no money for it


def test_of_ties_in_one_line_as_many_go_as_there_is_no_room_for():
    """A probe's drafts are all thought to be as likely."""
    budget_kernels.ready()
    costs, survival = RowCosts({4: 1.0, 16: 9.0}), np.full((2, 3), 0.02)
    given = costs.table, survival.ravel(), 2, 2.0, 0.0, 0.0, 0.0
    assert budget_kernels.choose(survival, *given)[0].tolist() == [2, 0]


def test_nothing_is_compiled_in_a_step():
    """Whatever the layout of what is handed over: a column of a table, or a line of its own."""
    budget_kernels.ready()
    columns, table = np.zeros((budget_kernels.COLUMNS, 4), np.int64), np.ones((4, 7), np.int64)
    columns[LIMIT] = 1
    for drafts in (table[:, 3], table[:, 3].copy()):
        budget_kernels.hear(columns, np.arange(4), drafts, drafts, False)
    assert columns[TOLD].tolist() == [2] * 4 and len(budget_kernels.hear.signatures) == 1
    with pytest.raises(TypeError):
        budget_kernels.hear(columns, np.arange(4), drafts, drafts.astype(np.int32), False)
