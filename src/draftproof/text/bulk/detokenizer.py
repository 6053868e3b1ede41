"""Detokenising many tokens at once: what `Detokenizer` gives, at a fraction of its cost.

Most tokens are whole characters by themselves; their texts are joined as they are. Where one is not, the
tokens are spelt out one by one until no byte is left over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftproof.text.detokenizer import Detokenizer
from draftproof.text.tokenizer import Tokenizer

Ints = NDArray[np.int64]

UNKNOWN, HALF = -2, -1  # characters of a token that nobody has asked for, or that has no text by itself


class Pieces:
    """The text of every token of a vocabulary, as far as it was needed; answers share it."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, vocab: int) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.text = np.full(vocab, "", object)
        self.chars = np.full(vocab, UNKNOWN, np.int64)
        self._texts: dict[int, str | None] = {}  # the same for those who come one by one

    def chars_of(self, ids: Ints) -> tuple[Ints, bool]:
        """Characters of each, HALF where a token has to be spelt out; are there such?"""
        chars = self.chars[ids]
        lowest = chars.min(initial=0)
        if lowest == UNKNOWN:
            for token_id in set(ids[chars == UNKNOWN].tolist()):
                self._learn(token_id)
            chars = self.chars[ids]
            lowest = chars.min()
        return chars, bool(lowest < 0)

    def text_of(self, token_id: int) -> str | None:
        """Of a token by itself; None if it has to be spelt out."""
        if token_id not in self._texts:
            self._learn(token_id)
            self._texts[token_id] = self.text[token_id] if self.chars[token_id] >= 0 else None
        return self._texts[token_id]

    def _learn(self, token_id: int) -> None:
        skip = self.skip_special_tokens and token_id in self.tokenizer.special_ids
        try:
            text = "" if skip else self.tokenizer.token_bytes(token_id).decode("utf-8")
        except UnicodeDecodeError:
            self.chars[token_id] = HALF
        else:
            self.text[token_id], self.chars[token_id] = text, len(text)


class BulkDetokenizer:
    """Text and offsets of one output that continues a prompt, as of `Detokenizer`."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self._speller: Detokenizer | None = None  # for stretches with halves in them
        self._parts: list[str] = []
        self.length = 0
        self.offsets: list[int] = []

    def push(self, ids: Ints) -> None:
        chars, halves = self.pieces.chars_of(ids)
        texts = self.pieces.text[ids].tolist()
        late = self._spell(ids, chars, texts) if halves or self.holds else None
        ends = chars.cumsum()
        begins = ends - chars + self.length
        self.offsets.extend((begins if late is None else begins + late).tolist())
        self.length += int(ends[-1]) if len(ends) else 0
        self._parts.append("".join(texts))

    @property
    def holds(self) -> bool:
        """Is half a character left over?"""
        return self._speller is not None and self._speller.holds

    def add(self, texts: list[str], offsets: list[int]) -> None:
        """Tokens that are whole characters: what they say and where that begins."""
        self.offsets += offsets
        self.length = offsets[-1] + len(texts[-1])
        self._parts.append("".join(texts))

    def push_unseen(self) -> None:
        """A token that is counted and not shown."""
        self.offsets.append(self.length)

    def finish(self) -> str:
        """The text, and U+FFFD for bytes that never became a character."""
        if self._speller is not None:
            self._parts.append(self._speller.finish())
        return "".join(self._parts)

    def _spell(self, ids: Ints, chars: Ints, texts: list[str]) -> Ints:
        """Put in what the tokens with halves in them give; how much later than expected each begins."""
        if self._speller is None:
            table = self.pieces
            self._speller = Detokenizer(table.tokenizer, table.skip_special_tokens, continues=True)
        speller, late = self._speller, np.zeros_like(chars)
        halves = (chars < 0).nonzero()[0].tolist()
        at = 0
        while at < len(texts):
            if not speller.holds:
                next_half = bisect_left(halves, at)
                if next_half == len(halves):
                    break
                at = halves[next_half]
            before = speller.length
            texts[at] = speller.push([int(ids[at])])[0]
            chars[at], late[at] = len(texts[at]), speller.offsets[-1] - before
            at += 1
        return late


def push_all(outputs: Sequence[BulkDetokenizer | None], ids: Ints, ends: Ints, unseen: list[bool]) -> None:
    """`push` for many, with one look at all: ids [n], one output's behind the other's, until `ends`, at least
    one each. `unseen`: the output's last one is not shown. None: it has no text."""
    first = outputs[0]
    if first is None or any(one is None or one.pieces is not first.pieces for one in outputs):
        for one, begin, end, hidden in zip(outputs, [0, *ends[:-1]], ends, unseen, strict=True):
            if one is not None:
                _push(one, ids[begin:end], hidden)
        return
    chars, halves = first.pieces.chars_of(ids)
    singly = {i for i, one in enumerate(outputs) if one is not None and one.holds}
    if halves:
        singly.update(np.searchsorted(ends, (chars < 0).nonzero()[0], "right").tolist())
    begins = np.concatenate(([0], ends[:-1]))
    until = chars.cumsum()
    late = np.array([one.length for one in outputs if one is not None]) - until[begins] + chars[begins]
    offsets = (until - chars + np.repeat(late, ends - begins)).tolist()
    texts = first.pieces.text[ids].tolist()
    for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        one, shown = outputs[i], end - unseen[i]
        assert one is not None
        if i in singly:
            _push(one, ids[begin:end], unseen[i])
            continue
        if shown > begin:
            one.add(texts[begin:shown], offsets[begin:shown])
        if unseen[i]:
            one.push_unseen()


def _push(one: BulkDetokenizer, ids: Ints, unseen: bool) -> None:
    one.push(ids[:-1] if unseen else ids)
    if unseen:
        one.push_unseen()
