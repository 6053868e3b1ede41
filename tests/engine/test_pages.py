"""Page accounting: every page is empty, idle or used, never two of these, never lost; content is found by
whoever said the same under the same salt, and the longest unused gives way first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from draftproof.engine.page_pool import Pages, digests
from page_configs import STEADY

SIZE = 4


CONTROL_EXAMPLES = 500  # a planted defect may need more tries; the first find ends the search


class Shared(RuleBasedStateMachine):
    """Texts over two letters, so that prefixes are shared all the time, against a plain model of users."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(10)
        self.held: list[tuple[list[int], list[bytes]]] = []  # pages of a text, and its digests

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "a"]))
    def come(self, tokens: list[int], salt: str) -> None:
        known = list(digests(tokens, SIZE, salt))
        found = self.pages.find(known)
        need = -(-len(tokens) // SIZE) - len(found)
        if need > self.pages.num_free:
            self.pages.release(found)
            with pytest.raises(MemoryError):
                self.pages.take(need + len(found) + self.pages.num_free)
            return
        own = self.pages.take(need)
        used = {page for pages, _ in self.held for page in pages}
        assert len(set(own)) == need and not set(own) & (used | set(found)), "a page has two owners"
        for page, digest in zip(found, known, strict=False):
            assert all(page not in p or d[p.index(page)] == digest for p, d in self.held), "another's text"
        for page, digest in zip(own, known[len(found) :], strict=False):
            self.pages.publish(page, digest)
        self.held.append((found + own, known))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        self.pages.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[0])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def doubt(self, data: st.DataObject) -> None:
        pages, known = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.pages.unpublish(pages)
        again = self.pages.find(known)
        assert not set(again) & set(pages), "what is doubted was found"
        self.pages.release(again)

    @rule()
    def forget(self) -> None:
        self.pages.forget()
        assert self.pages.num_idle == 0

    @invariant()
    def every_page_is_somewhere(self) -> None:
        self.pages.check()
        used = {page for pages, _ in self.held for page in pages}
        assert self.pages.num_free == self.pages.capacity - len(used), "a page was lost"
        for page in used:
            assert self.pages._users[page] == sum(p.count(page) for p, _ in self.held), "users miscounted"
        for pages, _ in self.held:
            assert 0 not in pages and len(set(pages)) == len(pages)


def lives(num_examples: int = STEADY.max_examples) -> None:
    run_state_machine_as_test(Shared, settings=settings(STEADY, max_examples=num_examples))


def test_any_order_of_coming_and_going():
    lives()


# --- controls: what the machine and the check would find ---


def test_control_a_double_free(monkeypatch):
    """A planted one: a page that two use is free when the first of them goes."""
    whole = Pages.release

    def broken(self, pages):
        for page in pages:
            self._users[page] = min(self._users.get(page, 0), 1)
        whole(self, pages)

    monkeypatch.setattr(Pages, "release", broken)
    with pytest.raises(AssertionError, match="released twice|lost|miscounted|two owners"):
        lives(CONTROL_EXAMPLES)


def test_control_a_lost_page(monkeypatch):
    whole = Pages.release
    monkeypatch.setattr(Pages, "release", lambda self, pages: whole(self, pages[:-1] if pages else pages))
    with pytest.raises(AssertionError, match="lost|miscounted"):
        lives(CONTROL_EXAMPLES)


def test_control_a_user_that_is_not_counted(monkeypatch):
    whole = Pages.find

    def broken(self, prefix):
        found = whole(self, prefix)
        for page in found[:1]:
            self._users[page] = 1
        return found

    monkeypatch.setattr(Pages, "find", broken)
    with pytest.raises(AssertionError, match="lost|miscounted|released twice"):
        lives(CONTROL_EXAMPLES)


def test_control_content_that_stays_after_its_page_was_given_away(monkeypatch):
    def broken(self):
        page = self._empty.pop() if self._empty else self._idle.popitem(last=False)[0]
        self._users[page] = 1
        return page

    monkeypatch.setattr(Pages, "_take", broken)
    with pytest.raises(AssertionError, match="two owners|another's text|misplaced"):
        lives(CONTROL_EXAMPLES)


def test_a_page_given_back_twice_is_caught():
    pages = Pages(5)
    mine = pages.take(2)
    pages.release(mine)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(mine)


def test_what_is_unlearned_is_not_found_whoever_has_it():
    pages = Pages(5)
    mine, yours = pages.take(2)
    pages.publish(mine, b"mine")
    pages.publish(yours, b"yours")
    pages.release([yours])
    assert pages.num_idle == 1
    pages.unpublish([mine, yours, 4])
    pages.check()
    assert pages.num_idle == 0 and pages.num_free == 3 and not pages.find([b"mine"]) + pages.find([b"yours"])
    pages.release([mine])
    pages.check()


def test_a_page_never_taken_is_caught():
    pages = Pages(5)
    for page in (3, 0):
        with pytest.raises(AssertionError, match="never allocated"):
            pages.release([page])
        with pytest.raises(AssertionError, match="no user"):
            pages.publish(page, b"")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pages: pages._empty.append(pages._empty[-1]), "twice"),
        (lambda pages: pages._empty.append(next(iter(pages._users))), "free and taken"),
        (lambda pages: pages._idle.update({pages._empty[-1]: None}), "free and taken"),
        (lambda pages: pages._empty.pop(), "lost"),
        (lambda pages: pages._idle.popitem(), "lost"),
        (lambda pages: pages._content.clear(), "no content"),
        (lambda pages: pages._place.update({b"x": pages._empty[0]}), "misplaced"),
        (lambda pages: pages._users.update({next(iter(pages._users)): 0}), "count of zero"),
    ],
)
def test_the_check_sees_what_is_wrong(spoil, message):
    pages = Pages(8)
    first = pages.take(3)
    pages.publish(first[0], b"x")
    pages.release(first)
    pages.take(2)
    pages.check()
    spoil(pages)
    with pytest.raises(AssertionError, match=message):
        pages.check()


# --- digests ---


def test_a_digest_is_of_all_that_comes_before():
    """The same page at another place, behind another page or under another salt is another page."""
    page, other = [1, 2, 3, 4], [5, 6, 7, 8]
    first = list(digests(page * 3, SIZE))
    assert len(set(first)) == 3
    assert list(digests(other + page, SIZE))[1] not in first
    assert not set(first) & set(digests(page * 3, SIZE, "tenant"))
    assert list(digests(page * 3 + [1, 2, 3], SIZE)) == first, "what does not fill a page has none"
    assert list(digests([1, 2, 3], SIZE)) == []
    assert len({*digests(page, SIZE, "a"), *digests(page, SIZE, "b"), *digests(page, SIZE, "\ud800")}) == 3


# --- who gives way ---


def hold(pages: Pages, tokens: list[int]) -> list[int]:
    mine = pages.take(len(tokens) // SIZE)
    for page, digest in zip(mine, digests(tokens, SIZE), strict=True):
        pages.publish(page, digest)
    return mine


def num_found(pages: Pages, tokens: list[int]) -> int:
    """Without a lasting effect, but for the order."""
    found = pages.find(list(digests(tokens, SIZE)))
    pages.release(found)
    return len(found)


def test_the_longest_unused_gives_way_and_of_a_text_its_end():
    pages = Pages(7)
    old, new = [1] * 3 * SIZE, [2] * 3 * SIZE
    first, second = hold(pages, old), hold(pages, new)
    pages.release(first)
    pages.release(second)
    assert [pages.take(1)[0] for _ in range(6)] == first[::-1] + second[::-1]


def test_what_was_found_lately_stays():
    pages = Pages(5)
    old, new = [1] * 2 * SIZE, [2] * 2 * SIZE
    for text in (old, new):
        pages.release(hold(pages, text))
    assert num_found(pages, old) == 2  # used again: now `new` is the older one
    pages.take(2)
    assert num_found(pages, old) == 2 and num_found(pages, new) == 0


def test_pages_in_use_never_give_way():
    pages = Pages(5)
    mine = hold(pages, [1] * 3 * SIZE)
    pages.take(1)
    with pytest.raises(MemoryError, match="1 pages requested, 0 are free"):
        pages.take(1)
    assert pages.find(list(digests([1] * 3 * SIZE, SIZE))) == mine


def test_the_same_text_computed_twice_is_known_once():
    pages = Pages(9)
    first, second = hold(pages, [1] * SIZE), hold(pages, [1] * SIZE)
    assert pages.find(list(digests([1] * SIZE, SIZE))) == first
    pages.release(second)
    pages.check()
    assert pages.num_idle == 0, "nobody would find it"
