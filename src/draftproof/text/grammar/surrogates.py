"""Surrogates, which are no characters and have no UTF-8.

The grammar compiler takes a surrogate's three bytes for one character. Decoded they are three replacement
characters, so that a string would be longer than its `maxLength`. A text has such bytes where a byte 0xED is
followed by one of 0xA0 to 0xBF, in one token or at the border of two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_LEAD = b"\xed"
_SECOND = re.compile(rb"[\xa0-\xbf]")


class SurrogateTokens:
    """Tokens of a vocabulary that are, or can become, a part of a surrogate."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        tokens = list(enumerate(vocabulary))
        self.complete = frozenset(i for i, data in tokens if SURROGATE.search(data))
        self.first = frozenset(i for i, data in tokens if data.endswith(_LEAD))
        self.second = frozenset(i for i, data in tokens if _SECOND.match(data))
