"""Control tokens written out in messages, such as "<|im_end|>": they are encoded as text.

A tokenizer encodes the text of a special token as the token, wherever it is. In a rendered conversation the
special tokens of the template must be tokens, and those that a message has are text of a user. Before the
template renders the messages, each such text is replaced by a placeholder; afterwards the placeholders are
replaced by the texts again, and their places are known. Messages without such a text are not changed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from draftproof.errors import RequestError

FIXED_FIELDS = ("role", "type")  # names that a template compares, not text
Spans = list[tuple[int, int]]  # first character and the one after the last, ascending


class ControlTexts:
    """Texts of a tokenizer's special tokens."""

    def __init__(self, texts: Collection[str]) -> None:
        longest_first = sorted((text for text in texts if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # two strings that a template joins may form a special token: the end of the first one is marked
        self._beginnings = frozenset(text[:n] for text in longest_first for n in range(1, len(text)))
        self._max_beginning = max(map(len, self._beginnings), default=0)

    def replace(self, value: Any) -> tuple[Any, Placeholders | None]:
        """Return messages or tools with placeholders, and these; None if there are no control texts."""
        placeholders = Placeholders()
        changed = self._walk(value, placeholders)
        return (changed, placeholders) if placeholders.texts else (value, None)

    def _walk(self, value: Any, placeholders: Placeholders) -> Any:
        if isinstance(value, str):
            at = len(value) - self._beginning_at_end(value)
            head = self._pattern.sub(lambda found: placeholders.add(found[0]), value[:at])
            return head + placeholders.add(value[at:]) if at < len(value) else head
        if isinstance(value, Mapping):
            return {
                key: item if key in FIXED_FIELDS else self._walk(item, placeholders)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._walk(item, placeholders) for item in value]
        return value

    def _beginning_at_end(self, text: str) -> int:
        """Return the length of the longest end of a text that a special token begins with."""
        for size in range(min(self._max_beginning, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0


class Placeholders:
    """Placeholders of one conversation. No message can have one: their prefix is random."""

    def __init__(self) -> None:
        self._prefix = f"ct{secrets.token_hex(8)}n"
        self.texts: list[str] = []

    def add(self, text: str) -> str:
        """Return the placeholder of a text."""
        self.texts.append(text)
        return f"{self._prefix}{len(self.texts) - 1}e"

    def restore(self, rendered: str) -> tuple[str, Spans]:
        """Return a rendered conversation with the texts in place, and their spans.

        RequestError if the template has changed a placeholder, for example to upper case.
        """
        out, spans, size, last = [], [], 0, 0
        for found in re.finditer(f"{self._prefix}(\\d+)e", rendered):
            text = self.texts[int(found[1])]
            before = rendered[last : found.start()]
            size += len(before)
            spans.append((size, size + len(text)))
            out += [before, text]
            size, last = size + len(text), found.end()
        out.append(rendered[last:])
        restored = "".join(out)
        if self._prefix in restored.lower():
            raise RequestError(
                "the chat template changes the text of messages, so control tokens in them cannot be encoded "
                "as text: remove them from the messages",
                "messages",
            )
        return restored, spans
