"""Incremental detokenizer: token ids in, whole characters out as soon as they are certain."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from draftproof.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one output, token by token.

    The pieces that `push` and `finish` return, joined, equal `tokenizer.decode` of all ids. A character whose
    bytes are spread over tokens is returned with the token that completes it. With `continues` the output
    follows a prompt, and a vocabulary that drops the leading space of a text keeps it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strip = 0 if continues else tokenizer.strip_left
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.length = 0  # characters returned so far
        self.offsets: list[int] = []  # per token: the character of the text where it begins

    @property
    def has_pending_bytes(self) -> bool:
        """True while bytes of an incomplete character are held."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """Return one piece of text per token; "" for a token that completes no character."""
        return [self._push_one(token_id) for token_id in token_ids]

    def finish(self) -> str:
        """Return the text of held bytes: U+FFFD for those that never became a character."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _push_one(self, token_id: int) -> str:
        data = b"" if token_id in self._skip else self._tokenizer.token_bytes(token_id)
        # The first byte alone decides whether held bytes belong to this token's character or end before it.
        held = self.has_pending_bytes
        head = self._decoder.decode(data[:1])
        abandoned = held and (len(head) == 2 or (len(head) == 1 and self.has_pending_bytes))
        self.offsets.append(self.length + abandoned)
        return self._emit(head + self._decoder.decode(data[1:]))

    def _emit(self, text: str) -> str:
        """Drop leading spaces of the text where the vocabulary does, and count its characters."""
        if self._strip and text:
            spaces = len(text) - len(text.lstrip(" "))
            cut = min(self._strip, spaces)
            # After any other character no space is dropped.
            self._strip = self._strip - cut if spaces == len(text) else 0
            text = text[cut:]
        self.length += len(text)
        return text
