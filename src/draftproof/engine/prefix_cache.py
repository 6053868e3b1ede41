"""Prefix cache: requests with a common prefix share its full KV pages."""

from __future__ import annotations

from collections.abc import Sequence as Many

from draftproof.engine.page_pool import Pages, digests
from draftproof.engine.sequence import Sequence


class PrefixCache:
    """Publishes and finds the full pages of requests."""

    def __init__(self, pages: Pages, page_size: int, enabled: bool) -> None:
        self.pages = pages
        self.page_size = page_size
        self.enabled = enabled

    def find(self, sequence: Sequence) -> list[int]:
        """Return the published pages of the longest prefix of the request."""
        if not self.enabled:
            return []
        self.read(sequence)
        return self.pages.find(sequence.digests[: sequence.cacheable // self.page_size])

    def publish_pages(self, sequence: Sequence, computed: int) -> list[int]:
        """Publish the full pages of a request up to `computed` tokens; return the newly published ones.

        They are found by the next plan at the earliest: no step reads a page that the same step fills.
        """
        if not self.enabled:
            return []
        first, full = sequence.num_published_pages, min(computed // self.page_size, len(sequence.digests))
        for i in range(first, full):
            self.pages.publish(sequence.pages[i], sequence.digests[i])
        sequence.num_published_pages = max(first, full)
        return sequence.pages[first:full]

    def remember(self, sequence: Sequence, ids: Many[int], computed: int) -> None:
        """Set the committed tokens of a request and publish its full pages."""
        sequence.ids = ids
        if self.enabled:
            self.read(sequence)
            self.publish_pages(sequence, computed)

    def read(self, sequence: Sequence) -> None:
        """Compute the digests of the full pages that have none yet."""
        if self.enabled and len(sequence.digests) < len(sequence.ids) // self.page_size:
            salt = sequence.request.params.cache_salt or ""
            known = sequence.digests
            sequence.digests = [*known, *digests(sequence.ids, self.page_size, salt, known)]
