"""Page accounting: every page is free or taken, never both, never lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.engine.pages import Pages


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_taking_and_giving_back_in_any_order(moves):
    pages, held = Pages(17), []
    for take, number in moves:
        if take and number <= pages.num_free:
            held.append(pages.take(number))
            assert len(held[-1]) == number and 0 not in held[-1]
        elif take:
            with pytest.raises(MemoryError):
                pages.take(number)
        elif held:
            pages.give_back(held.pop(number % len(held)))
        pages.check()
        flat = [page for part in held for page in part]
        assert len(flat) == len(set(flat)) == pages.capacity - pages.num_free


def test_a_page_given_back_twice_is_caught():
    pages = Pages(5)
    mine = pages.take(2)
    pages.give_back(mine)
    with pytest.raises(AssertionError, match="given back twice"):
        pages.give_back(mine)


def test_a_page_never_taken_is_caught():
    pages = Pages(5)
    with pytest.raises(AssertionError, match="never taken"):
        pages.give_back([3])
    with pytest.raises(AssertionError, match="never taken"):
        pages.give_back([0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pages: pages._free.append(pages._free[-1]), "twice"),
        (lambda pages: pages._free.append(next(iter(pages._taken))), "free and taken"),
        (lambda pages: pages._free.pop(), "lost"),
    ],
)
def test_the_check_sees_what_is_wrong(spoil, message):
    pages = Pages(6)
    pages.take(2)
    pages.check()
    spoil(pages)
    with pytest.raises(AssertionError, match=message):
        pages.check()
