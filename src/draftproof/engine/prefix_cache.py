"""Texts that begin alike use the same pages: which pages of a request hold what, and who can find them."""

from __future__ import annotations

from collections.abc import Sequence as Many

from draftproof.engine.page_pool import Pages, digests
from draftproof.engine.sequence import Sequence


class PrefixCache:
    """Requests and their full pages."""

    def __init__(self, pages: Pages, page_size: int, enabled: bool) -> None:
        self.pages = pages
        self.page_size = page_size
        self.enabled = enabled

    def find(self, sequence: Sequence) -> list[int]:
        """Pages of its tokens that are there already."""
        if not self.enabled:
            return []
        self.read(sequence)
        return self.pages.find(sequence.digests[: sequence.cacheable // self.page_size])

    def publish_pages(self, sequence: Sequence, computed: int) -> list[int]:
        """Its full pages, as far as they are computed, can be found from now on: by the next plan, so that
        no step reads a page that another slot fills in the same step."""
        if not self.enabled:
            return []
        first, full = sequence.num_published_pages, min(computed // self.page_size, len(sequence.digests))
        for i in range(first, full):
            self.pages.publish(sequence.pages[i], sequence.digests[i])
        sequence.num_published_pages = max(first, full)
        return sequence.pages[first:full]

    def remember(self, sequence: Sequence, ids: Many[int], computed: int) -> None:
        """What it has said so far; its pages can be found by whoever says the same."""
        sequence.ids = ids
        if self.enabled:
            self.read(sequence)
            self.publish_pages(sequence, computed)

    def read(self, sequence: Sequence) -> None:
        """What its full pages hold, of which it may have been read what came first: that stays as it is."""
        if self.enabled and len(sequence.digests) < len(sequence.ids) // self.page_size:
            salt = sequence.request.params.cache_salt or ""
            known = sequence.digests
            sequence.digests = [*known, *digests(sequence.ids, self.page_size, salt, known)]
