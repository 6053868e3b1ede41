"""Stop strings: where an output ends because of what it says, and what may be shown until then.

Tokens are looked at one by one in their order, so the outcome does not depend on how many of them a
step committed. The first token that completes a stop string ends the output; if it completes several,
the one that begins earliest counts, and of those that begin together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from draftproof.errors import RequestError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found; everything after `text_length` characters is cut."""

    stop: str
    token_index: int  # in the output, from 0: this token completed it and is the last one
    start: int  # character of the output text at which the stop string begins
    text_length: int  # of the output text that remains


class StopStrings:
    """Watches the text of one output.

    `push` gives back what can be shown: text that may be the beginning of a stop string is held
    back until it is known not to be. A stop string that completes within the first `min_tokens`
    tokens does not count, and its text is shown.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False, min_tokens: int = 0) -> None:
        if not all(stops):
            raise RequestError("a stop string must not be empty", "stop")
        self._stops = tuple(sorted(dict.fromkeys(stops), key=len, reverse=True))
        self._include = include_in_output
        self._min_tokens = min_tokens
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1
        self._begun = [0] * len(self._stops)  # of each, how much the end of the text has of its beginning
        self._tail = ""  # the last characters of the text: as many as an unfinished stop may need
        self._length = 0  # characters of the whole text so far, shown or held
        self._shown = 0
        self._tokens = 0
        self.match: StopMatch | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the output that count: none after the one that completed a stop string."""
        return self._tokens

    def push(self, pieces: Sequence[str]) -> str:
        """One piece per token. The text to show; afterwards `match` says whether it ended."""
        return "".join(self._push_one(piece, new_token=True) for piece in pieces)

    def finish(self, piece: str = "") -> str:
        """The output ended otherwise: `piece` is what its last token still had; the rest is shown."""
        text = self._push_one(piece, new_token=False)
        if self.match is None:
            text += self._show(self._length)
        return text

    def look(self, piece: str, new_token: bool = True) -> StopMatch | None:
        """As `push` of one token, for a text that is shown when it has ended and not before."""
        self._take(piece, new_token)
        if self.match is None:
            self._forget()
        return self.match

    def _push_one(self, piece: str, new_token: bool) -> str:
        if self.match is not None:
            return ""
        self._take(piece, new_token)
        if not piece:
            return ""
        if self.match is not None:
            return self._show(self.match.text_length)
        text = self._show(self._length - (0 if self._include else self._held(piece)))
        self._forget()
        return text

    def _take(self, piece: str, new_token: bool) -> None:
        self._tokens += new_token
        if not piece:
            return
        self._length += len(piece)
        self._tail += piece
        if self._tokens > self._min_tokens:
            self.match = self._find(len(piece))

    def _forget(self) -> None:
        # Everything not shown yet is within reach, since an unfinished stop is shorter than a stop.
        self._tail = self._tail[-self._reach :] if self._reach else ""

    def _find(self, fresh: int) -> StopMatch | None:
        """The match that ends within the last `fresh` characters, if there is one."""
        base = self._length - len(self._tail)  # position of the tail's first character
        best: tuple[int, str] | None = None
        for stop in self._stops:  # longest first, so an equal start keeps the longer
            first = max(0, len(self._tail) - fresh - len(stop) + 1)
            at = self._tail.find(stop, first)
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return None
        start = base + best[0]
        length = start + len(best[1]) if self._include else start
        return StopMatch(best[1], self._tokens - 1, start, length)

    def _held(self, piece: str) -> int:
        """Length of the longest end of the text, now longer by `piece`, that begins a stop string.

        Each stop is followed character by character (Knuth, Morris, Pratt): a long one costs no more than
        a short one, so no request can make this slow.
        """
        for number, stop in enumerate(self._stops):
            shorter, size = _shorter(stop), self._begun[number]
            for character in piece:
                while size and stop[size] != character:
                    size = shorter[size - 1]
                size += stop[size] == character
                if size == len(stop):  # it is all there, and did not count
                    size = shorter[size - 1]
            self._begun[number] = size
        return max(self._begun, default=0)

    def _show(self, upto: int) -> str:
        base = self._length - len(self._tail)
        text = self._tail[self._shown - base : upto - base]
        self._shown = max(self._shown, upto)
        return text


@lru_cache(maxsize=1024)
def _shorter(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the longest shorter one that it ends with."""
    sizes, size = [0], 0
    for character in stop[1:]:
        while size and stop[size] != character:
            size = sizes[size - 1]
        size += stop[size] == character
        sizes.append(size)
    return tuple(sizes)
