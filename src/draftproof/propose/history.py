"""An index of n-grams that grows with its sequence: what followed the last n tokens, without a rescan."""

from __future__ import annotations

from collections.abc import Sequence


class History:
    """For each size, n-gram -> where its continuation begins. The latest occurrence wins."""

    def __init__(self, smallest: int, largest: int) -> None:
        self.sizes = range(largest, smallest - 1, -1)  # longest first
        self.tokens: list[int] = []
        self._next: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self.sizes}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append; n-grams become known once the token after them is there."""
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        for end in range(max(begin, 1), len(self.tokens)):  # the token at `end` follows tokens[:end]
            for n in self.sizes:
                if n <= end:
                    self._next[n][tuple(self.tokens[end - n : end])] = end

    def find(self, suffix: Sequence[int]) -> int | None:
        """Where the continuation of the longest known end of `suffix` begins in `tokens`."""
        for n in self.sizes:
            if n <= len(suffix):
                at = self._next[n].get(tuple(suffix[-n:]))
                if at is not None:
                    return at
        return None

    def continuation(self, at: int, count: int) -> list[int]:
        """`count` tokens from `at`; past the end it goes on with what it has just said, so that a
        repetition shorter than `count` is continued."""
        out = self.tokens[at : at + count]
        period = len(self.tokens) - at
        while len(out) < count:
            out.append(out[len(out) - period])
        return out
