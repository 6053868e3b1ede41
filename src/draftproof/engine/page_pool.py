"""KV page pool and prefix cache: requests with a common prefix share its full KV pages.

A full page is published under a digest of all tokens up to its last one and of the request's cache salt, so
requests with different salts never share pages. A page without users keeps its content until the page is
needed, least recently used first. The storage belongs to the runners.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Many
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from draftproof.engine.sequence import Sequence

if TYPE_CHECKING:
    from draftproof.engine.kv_events.events import EventLog


def digests(tokens: Many[int], page_size: int, salt: str = "", known: Many[bytes] = ()) -> Iterator[bytes]:
    """Yield a digest for each full page of `tokens` after the `known` ones, chained from page to page."""
    first = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()
    last = known[-1] if known else first
    array = np.asarray(tokens[len(known) * page_size :], np.int64)
    for start in range(0, len(array) - page_size + 1, page_size):
        page = array[start : start + page_size].tobytes()
        last = blake2b(last + page, digest_size=16).digest()
        yield last


class Pages:
    """Page allocator. Page 0 is never allocated: padding rows write to it."""

    def __init__(self, num_pages: int, events: EventLog | None = None) -> None:
        """Start with empty pages; `events` records what is published and withdrawn."""
        self.events = events
        self.capacity = num_pages - 1  # pages that can be allocated
        self._empty = list(range(num_pages - 1, 0, -1))
        self._ref_counts: dict[int, int] = {}  # users by page
        self._digest_of_page: dict[int, bytes] = {}  # of the published content
        self._page_of_digest: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without users, oldest first

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
        return page in self._ref_counts

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages, evicting unused content where needed."""
        if count > self.num_free:
            raise MemoryError(f"{count} pages requested, {self.num_free} are free")
        num_left = max(0, len(self._empty) - count)
        pages = self._empty[num_left:][::-1]
        del self._empty[num_left:]
        while len(pages) < count:
            page, _ = self._idle.popitem(last=False)
            self._withdraw(page)
            pages.append(page)
        self._ref_counts.update(dict.fromkeys(pages, 1))
        return pages

    def _withdraw(self, page: int) -> None:
        digest = self._digest_of_page.pop(page)
        del self._page_of_digest[digest]
        if self.events is not None:
            self.events.removed(digest)

    def acquire_prefix(self, prefix: Many[bytes]) -> list[int]:
        """Return the pages of the longest published beginning of `prefix`, with one more user each.

        The caller releases them.
        """
        found = []
        for digest in prefix:
            page = self._page_of_digest.get(digest)
            if page is None:
                break
            self._idle.pop(page, None)
            self._ref_counts[page] = self._ref_counts.get(page, 0) + 1
            found.append(page)
        return found

    def has(self, digest: bytes) -> bool:
        """Return whether a page is published under the digest."""
        return digest in self._page_of_digest

    def publish(self, page: int, digest: bytes) -> bool:
        """Publish a full page that will not change; False if its content is published already."""
        assert page in self._ref_counts, f"page {page} has no user"
        is_new = page not in self._digest_of_page and digest not in self._page_of_digest
        if is_new:
            self._digest_of_page[page] = digest
            self._page_of_digest[digest] = page
        return is_new

    def unpublish(self, pages: Many[int]) -> None:
        """Withdraw the content of `pages` from the prefix cache, whether they have users or not."""
        for page in pages:
            if page in self._digest_of_page:
                self._withdraw(page)
            if page in self._idle:
                del self._idle[page]
                self._empty.append(page)

    def clear(self) -> None:
        """Withdraw all content from the prefix cache."""
        events, self.events = self.events, None  # one event instead of one a page
        self.unpublish(list(self._digest_of_page))
        self.events = events
        if events is not None:
            events.cleared()

    def release(self, pages: Many[int]) -> None:
        """Remove one user of each page. The last pages of a sequence are evicted first."""
        users, content, empty = self._ref_counts, self._digest_of_page, self._empty
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

    def check(self) -> None:
        """Assert that every page is empty, idle or used, and that content is published once."""
        empty, idle, used = set(self._empty), set(self._idle), set(self._ref_counts)
        assert len(empty) == len(self._empty), "a page is on the free list twice"
        assert not (empty & idle or empty & used or idle & used), "a page is free and taken"
        assert len(empty) + len(idle) + len(used) == self.capacity, "a page was lost"
        assert idle <= set(self._digest_of_page), "an idle page has no content"
        pages = {self._page_of_digest[digest] for digest in self._digest_of_page.values()}
        assert pages == set(self._digest_of_page), "content is misplaced"
        assert not empty & set(self._digest_of_page), "an empty page has content"
        assert all(count > 0 for count in self._ref_counts.values()), "a page has a user count of zero"


class PrefixCache:
    """Publishes the full pages of requests and finds them."""

    def __init__(self, pages: Pages, page_size: int, enabled: bool) -> None:
        self.pages = pages
        self.page_size = page_size
        self.enabled = enabled

    def acquire_prefix(self, sequence: Sequence) -> list[int]:
        """Return the published pages of the longest prefix of the request, with one more user each.

        The caller releases them.
        """
        if not self.enabled:
            return []
        self.compute_digests(sequence)
        return self.pages.acquire_prefix(sequence.digests[: sequence.max_cached_tokens // self.page_size])

    def publish_pages(self, sequence: Sequence, computed: int) -> list[int]:
        """Publish full pages up to `computed` tokens for later plans; return all pages of that range.

        Later plans only: attention kernels read the keys before the first row of a request without waiting
        for the kernels of the pass (`few_rows.py`), so no request may read keys that another stores in it.
        A page is not published once the page before it has been evicted: `acquire_prefix` would not reach it.
        That happens where two requests computed the same prefix: published pages belong to one of them.
        """
        if not self.enabled:
            return []
        first, full = sequence.num_published_pages, min(computed // self.page_size, len(sequence.digests))
        new = []
        for i in range(first, full):
            if i and not self.pages.has(sequence.digests[i - 1]):
                break
            if self.pages.publish(sequence.pages[i], sequence.digests[i]):
                new.append(i)
        if new and self.pages.events is not None:
            self._record(sequence, new, self.pages.events)
        sequence.num_published_pages = max(first, full)
        return sequence.pages[first:full]

    def _record(self, sequence: Sequence, new: Many[int], events: EventLog) -> None:
        """Record newly published pages, each run of consecutive ones as one event."""
        salt, first = sequence.request.params.cache_salt or "", new[0]
        for page, following in zip(new, [*new[1:], -1], strict=True):
            if following != page + 1:
                events.stored(sequence.digests, first, page + 1, sequence.ids, salt)
                first = following

    def set_tokens_and_publish(self, sequence: Sequence, ids: Many[int], computed: int) -> None:
        """Set the committed tokens of a request and publish its full pages."""
        sequence.ids = ids
        if self.enabled:
            self.compute_digests(sequence)
            self.publish_pages(sequence, computed)

    def compute_digests(self, sequence: Sequence) -> None:
        """Compute the digests of the full pages that have none yet."""
        if self.enabled and len(sequence.digests) < len(sequence.ids) // self.page_size:
            salt = sequence.request.params.cache_salt or ""
            known = sequence.digests
            sequence.digests = [*known, *digests(sequence.ids, self.page_size, salt, known)]
