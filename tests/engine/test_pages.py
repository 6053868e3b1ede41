"""Page accounting: every page is empty, idle or used; content is found by digest and evicted by age."""

from __future__ import annotations

from types import SimpleNamespace

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

from draftproof.engine.page_pool import Pages, PrefixCache, digests
from scheduler_fuzz import HYPOTHESIS

SIZE = 4
CONTROL_EXAMPLES = 500  # a planted defect may need more examples


class SharedPages(RuleBasedStateMachine):
    """Texts over two letters, so that prefixes are often shared, against a simple model of users."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(10)
        self.held: list[tuple[list[int], list[bytes]]] = []  # pages of a text, and its digests

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "a"]))
    def acquire(self, tokens: list[int], salt: str) -> None:
        known = list(digests(tokens, SIZE, salt))
        found = self.pages.acquire_prefix(known)
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
            held = [d[p.index(page) :][:1] for p, d in self.held if page in p]
            assert all(digests_there == [digest] for digests_there in held), "another's text"
        for page, digest in zip(own, known[len(found) :], strict=False):
            self.pages.publish(page, digest)
        self.held.append((found + own, known))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pages.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[0])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard_content(self, data: st.DataObject) -> None:
        pages, known = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.pages.unpublish(pages)
        again = self.pages.acquire_prefix(known)
        assert not set(again) & set(pages), "an unpublished page was found"
        self.pages.release(again)

    @invariant()
    def every_page_is_counted(self) -> None:
        self.pages.check()
        used = {page for pages, _ in self.held for page in pages}
        assert self.pages.num_free == self.pages.capacity - len(used), "a page was lost"
        for page in used:
            num_users = sum(p.count(page) for p, _ in self.held)
            assert self.pages._ref_counts[page] == num_users, "users miscounted"
        for pages, _ in self.held:
            assert 0 not in pages and len(set(pages)) == len(pages)


def run_machine(num_examples: int = HYPOTHESIS.max_examples) -> None:
    run_state_machine_as_test(SharedPages, settings=settings(HYPOTHESIS, max_examples=num_examples))


def test_pages_are_right_for_any_sequence_of_events():
    run_machine()


# --- controls ---


def free_a_shared_page(whole, self, pages):
    for page in pages:
        self._ref_counts[page] = min(self._ref_counts.get(page, 0), 1)
    whole(self, pages)


def lose_a_page(whole, self, pages):
    whole(self, pages[:-1] if pages else pages)


def miscount_a_user(whole, self, prefix):
    found = whole(self, prefix)
    for page in found[:1]:
        self._ref_counts[page] = 1
    return found


def keep_content_of_an_evicted_page(whole, self, count):
    content, place = dict(self._digest_of_page), dict(self._page_of_digest)
    pages = whole(self, count)
    self._digest_of_page, self._page_of_digest = content, place
    return pages


@pytest.mark.parametrize(
    ("name", "defect", "match"),
    [
        ("release", free_a_shared_page, "released twice|lost|miscounted|two owners"),
        ("release", lose_a_page, "lost|miscounted"),
        ("acquire_prefix", miscount_a_user, "lost|miscounted|released twice"),
        ("take", keep_content_of_an_evicted_page, "two owners|another's text|misplaced"),
    ],
)
def test_control_planted_defect_is_detected(monkeypatch, name, defect, match):
    whole = getattr(Pages, name)
    monkeypatch.setattr(Pages, name, lambda self, *given: defect(whole, self, *given))
    with pytest.raises(AssertionError, match=match):
        run_machine(CONTROL_EXAMPLES)


def test_page_released_twice_is_an_error():
    pages = Pages(5)
    mine = pages.take(2)
    pages.release(mine)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(mine)


def test_unpublished_pages_are_not_found():
    pages = Pages(5)
    mine, yours = pages.take(2)
    pages.publish(mine, b"mine")
    pages.publish(yours, b"yours")
    pages.release([yours])
    assert pages.num_idle == 1
    pages.unpublish([mine, yours, 4])
    pages.check()
    assert pages.num_idle == 0 and pages.num_free == 3
    assert not pages.acquire_prefix([b"mine"]) + pages.acquire_prefix([b"yours"])
    pages.release([mine])
    pages.check()


def test_page_never_allocated_is_an_error():
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
        (lambda pages: pages._empty.append(next(iter(pages._ref_counts))), "free and taken"),
        (lambda pages: pages._idle.update({pages._empty[-1]: None}), "free and taken"),
        (lambda pages: pages._empty.pop(), "lost"),
        (lambda pages: pages._idle.popitem(), "lost"),
        (lambda pages: pages._digest_of_page.clear(), "no content"),
        (lambda pages: pages._page_of_digest.update({b"x": pages._empty[0]}), "misplaced"),
        (lambda pages: pages._ref_counts.update({next(iter(pages._ref_counts)): 0}), "count of zero"),
    ],
)
def test_check_detects_inconsistent_state(spoil, message):
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


def test_digest_depends_on_salt_and_all_earlier_tokens():
    """Digests differ at another place, behind another page and under another salt."""
    page, other = [1, 2, 3, 4], [5, 6, 7, 8]
    first = list(digests(page * 3, SIZE))
    assert len(set(first)) == 3
    assert list(digests(other + page, SIZE))[1] not in first
    assert not set(first) & set(digests(page * 3, SIZE, "salt"))
    assert list(digests(page * 3 + [1, 2, 3], SIZE)) == first, "a partial page has no digest"
    assert list(digests([1, 2, 3], SIZE)) == []
    assert len({*digests(page, SIZE, "a"), *digests(page, SIZE, "b"), *digests(page, SIZE, "\ud800")}) == 3


# --- eviction ---


def publish_text(pages: Pages, tokens: list[int]) -> list[int]:
    mine = pages.take(len(tokens) // SIZE)
    for page, digest in zip(mine, digests(tokens, SIZE), strict=True):
        pages.publish(page, digest)
    return mine


def num_found(pages: Pages, tokens: list[int]) -> int:
    """Return the number of pages found, without a lasting effect but for the order."""
    found = pages.acquire_prefix(list(digests(tokens, SIZE)))
    pages.release(found)
    return len(found)


def test_least_recently_used_text_is_evicted_from_its_end():
    pages = Pages(7)
    old, new = [1] * 3 * SIZE, [2] * 3 * SIZE
    first, second = publish_text(pages, old), publish_text(pages, new)
    pages.release(first)
    pages.release(second)
    assert [pages.take(1)[0] for _ in range(6)] == first[::-1] + second[::-1]


def test_recently_found_pages_stay():
    pages = Pages(5)
    old, new = [1] * 2 * SIZE, [2] * 2 * SIZE
    for text in (old, new):
        pages.release(publish_text(pages, text))
    assert num_found(pages, old) == 2  # now `new` is the least recently used
    pages.take(2)
    assert num_found(pages, old) == 2 and num_found(pages, new) == 0


def test_pages_in_use_are_never_evicted():
    pages = Pages(5)
    mine = publish_text(pages, [1] * 3 * SIZE)
    pages.take(1)
    with pytest.raises(MemoryError, match="1 pages requested, 0 are free"):
        pages.take(1)
    assert pages.acquire_prefix(list(digests([1] * 3 * SIZE, SIZE))) == mine


def test_page_after_an_evicted_one_is_not_published():
    """Two requests compute the same text. After its published copy is evicted, no later page is found."""
    pages = Pages(7)
    cache = PrefixCache(pages, SIZE, enabled=True)
    tokens, params = list(range(3 * SIZE)), SimpleNamespace(cache_salt=None)
    first, second = (
        SimpleNamespace(digests=[], ids=[], num_published_pages=0, pages=pages.take(n),
                        request=SimpleNamespace(params=params)) for n in (2, 3)
    )  # fmt: skip
    for request in (first, second):
        cache.set_tokens_and_publish(request, tokens[: 2 * SIZE], 2 * SIZE)
    pages.release(first.pages)
    taken = pages.take(pages.num_free)
    cache.set_tokens_and_publish(second, tokens, len(tokens))
    assert not any(map(pages.has, second.digests))
    pages.release([*second.pages, *taken])
    assert pages.num_idle == 0
    pages.check()


def test_equal_text_is_published_once():
    pages = Pages(9)
    first, second = publish_text(pages, [1] * SIZE), publish_text(pages, [1] * SIZE)
    assert pages.acquire_prefix(list(digests([1] * SIZE, SIZE))) == first
    pages.release(second)
    pages.check()
    assert pages.num_idle == 0, "an unpublished page is idle"
