"""Where a free section of an answer ends: at a token, or at a text that may be spread over several."""

from __future__ import annotations

from collections.abc import Sequence


class ReasoningEnd:
    """Follows the output's bytes until the end has been said."""

    def __init__(self, end: int | str, said: Sequence[bytes]) -> None:
        """`said`: what each token adds to the text."""
        self._token = end if isinstance(end, int) else -1
        self._text = end.encode() if isinstance(end, str) else b""
        self._said = said
        self._fallback = _prefix_function(self._text)
        self._overshooting: dict[int, list[tuple[int, bytes]]] = {}

    def advance(self, matched: int, token: int) -> tuple[int, bytes | None]:
        """After `matched` bytes of the end, and this token: how many then, and what follows the end if it
        came (None: it did not)."""
        if not self._text:
            return 0, b"" if token == self._token else None
        data = self._said[token]
        for at, byte in enumerate(data):
            while matched and self._text[matched] != byte:
                matched = self._fallback[matched - 1]
            matched += self._text[matched] == byte
            if matched == len(self._text):
                return 0, data[at + 1 :]
        return matched, None

    def overshooting(self, matched: int) -> list[tuple[int, bytes]]:
        """Tokens that hold the end and more, `matched` bytes into it, and what is more."""
        if matched not in self._overshooting:
            found = []
            last = self._text[-1:]
            for token, data in enumerate(self._said):
                if last and last in data[:-1]:
                    _, rest = self.advance(matched, token)
                    if rest:
                        found.append((token, rest))
            self._overshooting[matched] = found
        return self._overshooting[matched]


def _prefix_function(text: bytes) -> list[int]:
    """For every prefix, the length of its longest proper beginning that is also its end."""
    out = [0] * len(text)
    for at in range(1, len(text)):
        size = out[at - 1]
        while size and text[at] != text[size]:
            size = out[size - 1]
        out[at] = size + (text[at] == text[size])
    return out
