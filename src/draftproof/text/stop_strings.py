"""Stop strings: search in the text of an output, and the text that may be shown before a match.

Tokens are searched one by one in order, so the result does not depend on how many of them a step committed.
The first token that completes a stop string ends the output. If it completes several, the one that begins
earliest counts, and among those that begin together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from draftproof.errors import RequestError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Stop string that was found; the text after `text_length` characters is cut."""

    stop: str
    text_length: int  # of the output text that remains


class StopStrings:
    """Search for stop strings in one output.

    `push` returns the text that can be shown. Text that may begin a stop string is held back until it is
    known not to. A stop string that is completed within the first `min_tokens` tokens does not count, and its
    text is shown.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False, min_tokens: int = 0) -> None:
        if not all(stops):
            raise RequestError("a stop string must not be empty", "stop")
        self._stops = tuple(sorted(dict.fromkeys(stops), key=len, reverse=True))
        self._include = include_in_output
        self._min_tokens = min_tokens
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1
        self._prefix_length = [0] * len(self._stops)  # of each stop: of its prefix at the text's end
        self._tail = ""  # last characters of the text, as many as an unfinished stop may need
        self._length = 0  # characters of the whole text so far, shown or held
        self._shown = 0
        self._tokens = 0
        self.match: StopMatch | None = None

    def push(self, pieces: Sequence[str]) -> str:
        """Take one piece per token and return the text to show; `match` is set if the output ended."""
        return "".join(self._push_one(piece, new_token=True) for piece in pieces)

    def finish(self, piece: str = "") -> str:
        """End the output for another reason and return the held text; `piece`: rest of its last token."""
        text = self._push_one(piece, new_token=False)
        if self.match is None:
            text += self._show(self._length)
        return text

    def scan(self, piece: str, new_token: bool = True) -> StopMatch | None:
        """Take the piece of one token and return the match, for a text that is not shown before its end."""
        self._append(piece, new_token)
        if self.match is None:
            self._trim_tail()
        return self.match

    def _push_one(self, piece: str, new_token: bool) -> str:
        if self.match is not None:
            return ""
        self._append(piece, new_token)
        if not piece:
            return ""
        if self.match is not None:
            return self._show(self.match.text_length)
        text = self._show(self._length - (0 if self._include else self._held(piece)))
        self._trim_tail()
        return text

    def _append(self, piece: str, new_token: bool) -> None:
        self._tokens += new_token
        if not piece:
            return
        self._length += len(piece)
        self._tail += piece
        if self._tokens > self._min_tokens:
            self.match = self._find(len(piece))

    def _trim_tail(self) -> None:
        # Text that is not shown yet stays: an unfinished stop is shorter than a stop.
        self._tail = self._tail[-self._reach :] if self._reach else ""

    def _find(self, fresh: int) -> StopMatch | None:
        """Return the match that ends within the last `fresh` characters, if any."""
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
        return StopMatch(best[1], start + len(best[1]) if self._include else start)

    def _held(self, piece: str) -> int:
        """Return the length of the longest suffix of the text that begins a stop string.

        `piece` was appended to the text. Each stop is matched character by character (Knuth, Morris, Pratt),
        so a long stop string costs no more than a short one.
        """
        for number, stop in enumerate(self._stops):
            fallback, size = prefix_function(stop), self._prefix_length[number]
            for character in piece:
                while size and stop[size] != character:
                    size = fallback[size - 1]
                size += stop[size] == character
                if size == len(stop):  # complete, but within min_tokens
                    size = fallback[size - 1]
            self._prefix_length[number] = size
        return max(self._prefix_length, default=0)

    def _show(self, upto: int) -> str:
        """Return the text between what was shown and `upto`."""
        base = self._length - len(self._tail)
        text = self._tail[self._shown - base : upto - base]
        self._shown = max(self._shown, upto)
        return text


@lru_cache(maxsize=1024)
def prefix_function(text: str | bytes) -> tuple[int, ...]:
    """Return, for each prefix of `text`, the length of the longest shorter prefix that ends it."""
    sizes, size = [0], 0
    for element in text[1:]:
        while size and text[size] != element:
            size = sizes[size - 1]
        size += text[size] == element
        sizes.append(size)
    return tuple(sizes)
