"""KV page pool: allocation, reference counts, and content digests for prefix caching.

Page numbers only; the storage belongs to the runners. A full page is published under a digest of all tokens
up to its last one and of the request's cache salt, so requests with different salts never share pages. A page
without users keeps its content until the page is needed, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np


def digests(
    tokens: Sequence[int], page_size: int, salt: str = "", known: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """Yield a digest for each full page of `tokens` after the `known` ones, chained from page to page."""
    last = known[-1] if known else _first(salt)
    array = np.asarray(tokens[len(known) * page_size :], np.int64)
    for start in range(0, len(array) - page_size + 1, page_size):
        page = array[start : start + page_size].tobytes()
        last = blake2b(last + page, digest_size=16).digest()
        yield last


def _first(salt: str) -> bytes:
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()


class Pages:
    """Page allocator. Page 0 is never allocated: padding rows write to it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._empty = list(range(num_pages - 1, 0, -1))
        self._users: dict[int, int] = {}
        self._content: dict[int, bytes] = {}
        self._place: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without users, oldest first

    @property
    def capacity(self) -> int:
        """Return the number of pages that can be allocated."""
        return self.num_pages - 1

    @property
    def num_idle(self) -> int:
        """Return the number of free pages that still hold published content."""
        return len(self._idle)

    @property
    def num_free(self) -> int:
        """Return the number of pages without users."""
        return len(self._empty) + len(self._idle)

    def is_used(self, page: int) -> bool:
        """Return whether the page has a user."""
        return page in self._users

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages, evicting unused content where needed."""
        if count > self.num_free:
            raise MemoryError(f"{count} pages requested, {self.num_free} are free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._place[self._content.pop(page)]
        self._users[page] = 1
        return page

    def find(self, prefix: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest published beginning of `prefix`, with one more user each."""
        found = []
        for digest in prefix:
            page = self._place.get(digest)
            if page is None:
                break
            self._idle.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
            found.append(page)
        return found

    def publish(self, page: int, digest: bytes) -> None:
        """Publish a full page that will not change, unless its content is published already."""
        assert page in self._users, f"page {page} has no user"
        if page not in self._content and digest not in self._place:
            self._content[page] = digest
            self._place[digest] = page

    def unpublish(self, pages: Sequence[int]) -> None:
        """Withdraw the content of `pages` from the prefix cache, whether they have users or not."""
        for page in pages:
            if page in self._content:
                del self._place[self._content.pop(page)]
            if page in self._idle:
                del self._idle[page]
                self._empty.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user of each page. The last pages of a sequence are evicted first."""
        users, content, empty = self._users, self._content, self._empty
        for page in reversed(pages):
            count = users.pop(page, 0)
            if count == 1:
                if page in content:
                    self._idle[page] = None
                else:
                    empty.append(page)
            elif count:
                users[page] = count - 1
            else:
                raise AssertionError(f"page {page} was released twice, or never allocated")

    def forget(self) -> None:
        """Drop all content without users."""
        for page in self._idle:
            del self._place[self._content.pop(page)]
            self._empty.append(page)
        self._idle.clear()

    def check(self) -> None:
        """Assert that every page is empty, idle or used, and that content is published once."""
        empty, idle, used = set(self._empty), set(self._idle), set(self._users)
        assert len(empty) == len(self._empty), "a page is on the free list twice"
        assert not (empty & idle or empty & used or idle & used), "a page is free and taken"
        assert len(empty) + len(idle) + len(used) == self.capacity, "a page was lost"
        assert idle <= set(self._content), "an idle page has no content"
        assert {self._place[d] for d in self._content.values()} == set(self._content), "content is misplaced"
        assert not empty & set(self._content), "an empty page has content"
        assert all(count > 0 for count in self._users.values()), "a page has a user count of zero"
