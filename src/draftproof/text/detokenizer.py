"""Incremental detokenising: token ids in, whole characters out, as they become certain."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from draftproof.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output, token by token.

    The pieces that `push` and `finish` give, joined, are `tokenizer.decode` of all the ids. A
    character whose bytes are spread over tokens comes with the token that completes it. With
    `continues` the output is read on from a prompt, and a vocabulary that drops the leading space
    of a text keeps it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strip = 0 if continues else tokenizer.strip_left
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0
        self.offsets: list[int] = []  # per token: the character of the text at which it begins

    @property
    def length(self) -> int:
        """Characters given out so far."""
        return self._length

    @property
    def holds(self) -> bool:
        """Are there bytes that wait for the rest of their character?"""
        return bool(self._decoder.getstate()[0])

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """One piece of text per token; "" for a token that shows nothing yet."""
        return [self._push_one(token_id) for token_id in token_ids]

    def finish(self) -> str:
        """What is still held: bytes that never became a character show as U+FFFD."""
        return self._give(self._decoder.decode(b"", final=True))

    def _push_one(self, token_id: int) -> str:
        data = b"" if token_id in self._skip else self._tokenizer.token_bytes(token_id)
        # The first byte alone tells whether held bytes end in this token's character or before it.
        held = self.holds
        head = self._decoder.decode(data[:1])
        given_up = held and (len(head) == 2 or (len(head) == 1 and self.holds))
        self.offsets.append(self._length + given_up)
        return self._give(head + self._decoder.decode(data[1:]))

    def _give(self, text: str) -> str:
        if self._strip and text:
            spaces = len(text) - len(text.lstrip(" "))
            cut = min(self._strip, spaces)
            # Once anything else than a space was seen, nothing more is dropped.
            self._strip = self._strip - cut if spaces == len(text) else 0
            text = text[cut:]
        self._length += len(text)
        return text
