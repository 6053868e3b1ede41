"""KV pages: which are free, who has which, and which hold a text that may come again.

Integers only; the storage belongs to the runners. A page is shared by counting its users. A full page is
known by its content: a digest of everything from the first token to its last, and of the tenant's salt, so
that nobody finds what another has said. Pages nobody uses keep their content until their room is needed,
the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np


def digests(
    tokens: Sequence[int], page_size: int, salt: str = "", known: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """One for each full page of `tokens` behind those that are `known`, every one from the one before it."""
    last = known[-1] if known else _first(salt)
    array = np.asarray(tokens[len(known) * page_size :], np.int64)
    for start in range(0, len(array) - page_size + 1, page_size):
        page = array[start : start + page_size].tobytes()
        last = blake2b(last + page, digest_size=16).digest()
        yield last


def _first(salt: str) -> bytes:
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()


class Pages:
    """Page 0 is never given out: rows that must write somewhere harmless may use it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._empty = list(range(num_pages - 1, 0, -1))
        self._users: dict[int, int] = {}
        self._content: dict[int, bytes] = {}
        self._place: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # with content and no user, oldest first

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def num_idle(self) -> int:
        """Free, and still with content that may be found."""
        return len(self._idle)

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    def is_used(self, page: int) -> bool:
        return page in self._users

    def take(self, count: int) -> list[int]:
        """Pages of one's own; content that nobody uses gives way."""
        if count > self.num_free:
            raise MemoryError(f"{count} pages asked for, {self.num_free} are free")
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
        """The pages that hold the longest known beginning of `prefix`, used by one more from now on."""
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
        """The page is full and will not change. If another holds the same, that one stays the known one."""
        assert page in self._users, f"page {page} has no user"
        if page not in self._content and digest not in self._place:
            self._content[page] = digest
            self._place[digest] = page

    def unpublish(self, pages: Sequence[int]) -> None:
        """Their content is not to be found again, whoever uses them."""
        for page in pages:
            if page in self._content:
                del self._place[self._content.pop(page)]
            if page in self._idle:
                del self._idle[page]
                self._empty.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """One user less of each; the last pages of a text are the first to give way."""
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
                raise AssertionError(f"page {page} was given back twice, or never taken")

    def forget(self) -> None:
        """Drop all content that nobody uses."""
        for page in self._idle:
            del self._place[self._content.pop(page)]
            self._empty.append(page)
        self._idle.clear()

    def check(self) -> None:
        """Every page is empty, idle or used, never two of these; content is known in one place."""
        empty, idle, used = set(self._empty), set(self._idle), set(self._users)
        assert len(empty) == len(self._empty), "a page is on the free list twice"
        assert not (empty & idle or empty & used or idle & used), "a page is free and taken"
        assert len(empty) + len(idle) + len(used) == self.capacity, "a page was lost"
        assert idle <= set(self._content), "an idle page has no content"
        assert {self._place[d] for d in self._content.values()} == set(self._content), "content is misplaced"
        assert not empty & set(self._content), "an empty page has content"
        assert all(count > 0 for count in self._users.values()), "a user was forgotten"
