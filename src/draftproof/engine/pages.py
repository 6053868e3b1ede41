"""KV pages: which are free and who has which. Integers only; the storage belongs to the runners."""

from __future__ import annotations


class Pages:
    """A free list. Page 0 is never given out: rows that must write somewhere harmless may use it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise MemoryError(f"{count} pages asked for, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            if page not in self._taken:
                raise AssertionError(f"page {page} was given back twice, or never taken")
            self._taken.remove(page)
            self._free.append(page)

    def check(self) -> None:
        """Every page is free or taken, none both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert not free & self._taken, "a page is free and taken"
        assert len(free) + len(self._taken) == self.capacity, "a page was lost"
