"""End of an unconstrained section of an output: a token, or a text that may span several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.text.stop_strings import prefix_function


class ReasoningEnd:
    """Matcher of the section's end over the bytes of the output."""

    def __init__(self, end: int | str, token_bytes: Sequence[bytes]) -> None:
        """Take the end and the bytes that each token adds to the text."""
        self._token = end if isinstance(end, int) else -1
        self._text = end.encode() if isinstance(end, str) else b""
        self._token_bytes = token_bytes
        self._fallback = prefix_function(self._text)
        self._overshooting: dict[int, list[tuple[int, bytes]]] = {}

    def advance(self, matched: int, token: int) -> tuple[int, bytes | None]:
        """Return the bytes of the end matched after a token, and the bytes after the end (None: not yet)."""
        if not self._text:
            return 0, b"" if token == self._token else None
        data = self._token_bytes[token]
        for at, byte in enumerate(data):
            while matched and self._text[matched] != byte:
                matched = self._fallback[matched - 1]
            matched += self._text[matched] == byte
            if matched == len(self._text):
                return 0, data[at + 1 :]
        return matched, None

    def overshooting(self, matched: int) -> list[tuple[int, bytes]]:
        """Return the tokens that complete the end and continue, with the bytes that follow it."""
        if matched not in self._overshooting:
            found = []
            last = self._text[-1:]
            for token, data in enumerate(self._token_bytes):
                if last and last in data[:-1]:
                    _, rest = self.advance(matched, token)
                    if rest:
                        found.append((token, rest))
            self._overshooting[matched] = found
        return self._overshooting[matched]
