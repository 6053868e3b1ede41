"""Bulk detokenizer: the text and offsets of `Detokenizer` for many tokens at once, at a fraction of the cost.

Most tokens are whole characters; their texts are joined without decoding. Tokens that hold part of a
character go through `Detokenizer` one by one until no byte is left over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftproof.text.detokenizer import Detokenizer
from draftproof.text.tokenizer import Tokenizer

Ints = NDArray[np.int64]

# values of `TokenTexts.num_chars` that are not a number of characters
NOT_LOADED = -2
PARTIAL = -1  # the token's bytes are not whole characters


class TokenTexts:
    """Cache of the text of each token of a vocabulary, shared by the outputs of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, vocab: int) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.texts = np.full(vocab, "", object)
        self.num_chars = np.full(vocab, NOT_LOADED, np.int64)
        self._single: dict[int, str | None] = {}  # the same texts for lookups of one token

    def lookup(self, ids: Ints) -> tuple[Ints, bool]:
        """Return the characters of each token (PARTIAL for partial ones) and whether any is partial."""
        chars = self.num_chars[ids]
        lowest = chars.min(initial=0)
        if lowest == NOT_LOADED:
            for token_id in set(ids[chars == NOT_LOADED].tolist()):
                self._load(token_id)
            chars = self.num_chars[ids]
            lowest = chars.min()
        return chars, bool(lowest < 0)

    def token_text(self, token_id: int) -> str | None:
        """Return the text of one token; None if it holds part of a character."""
        if token_id not in self._single:
            self._load(token_id)
            self._single[token_id] = self.texts[token_id] if self.num_chars[token_id] >= 0 else None
        return self._single[token_id]

    def _load(self, token_id: int) -> None:
        skip = self.skip_special_tokens and token_id in self.tokenizer.special_ids
        try:
            text = "" if skip else self.tokenizer.token_bytes(token_id).decode("utf-8")
        except UnicodeDecodeError:
            self.num_chars[token_id] = PARTIAL
        else:
            self.texts[token_id], self.num_chars[token_id] = text, len(text)


class BulkDetokenizer:
    """Text and offsets of one output that continues a prompt, equal to those of `Detokenizer`."""

    def __init__(self, token_texts: TokenTexts) -> None:
        self.token_texts = token_texts
        self._incremental: Detokenizer | None = None  # for runs of tokens with partial characters
        self._parts: list[str] = []
        self.length = 0
        self.offsets: list[int] = []

    def push(self, ids: Ints) -> None:
        """Append tokens."""
        chars, has_partial = self.token_texts.lookup(ids)
        texts = self.token_texts.texts[ids].tolist()
        shift = self._decode_partial(ids, chars, texts) if has_partial or self.has_pending_bytes else None
        ends = chars.cumsum()
        begins = ends - chars + self.length
        self.offsets.extend((begins if shift is None else begins + shift).tolist())
        self.length += int(ends[-1]) if len(ends) else 0
        self._parts.append("".join(texts))

    @property
    def has_pending_bytes(self) -> bool:
        """True while bytes of an incomplete character are held."""
        return self._incremental is not None and self._incremental.has_pending_bytes

    def add_texts(self, texts: list[str], offsets: list[int]) -> None:
        """Append tokens that are whole characters, given their texts and offsets."""
        self.offsets += offsets
        self.length = offsets[-1] + len(texts[-1])
        self._parts.append("".join(texts))

    def push_hidden(self) -> None:
        """Append a token that is counted and adds no text."""
        self.offsets.append(self.length)

    def finish(self) -> str:
        """Return the text, with U+FFFD for bytes that never became a character."""
        if self._incremental is not None:
            self._parts.append(self._incremental.finish())
        return "".join(self._parts)

    def _decode_partial(self, ids: Ints, chars: Ints, texts: list[str]) -> Ints:
        """Decode tokens around partial characters in place; return how much later than summed each begins."""
        if self._incremental is None:
            table = self.token_texts
            self._incremental = Detokenizer(table.tokenizer, table.skip_special_tokens, continues=True)
        incremental, shift = self._incremental, np.zeros_like(chars)
        partial = (chars < 0).nonzero()[0].tolist()
        at = 0
        while at < len(texts):
            if not incremental.has_pending_bytes:
                following = bisect_left(partial, at)
                if following == len(partial):
                    break
                at = partial[following]
            before = incremental.length
            texts[at] = incremental.push([int(ids[at])])[0]
            chars[at], shift[at] = len(texts[at]), incremental.offsets[-1] - before
            at += 1
        return shift


def push_many(
    outputs: Sequence[BulkDetokenizer | None], ids: Ints, ends: Ints, hides_last: list[bool]
) -> None:
    """Push the tokens of many outputs with one lookup.

    ids [n]: the tokens of one output after the other, each output's until `ends`, at least one each.
    `hides_last`: the output's last token adds no text. An output of None has no text.
    """
    first = outputs[0]
    if first is None or any(one is None or one.token_texts is not first.token_texts for one in outputs):
        for one, begin, end, hidden in zip(outputs, [0, *ends[:-1]], ends, hides_last, strict=True):
            if one is not None:
                _push(one, ids[begin:end], hidden)
        return
    chars, has_partial = first.token_texts.lookup(ids)
    one_by_one = {i for i, one in enumerate(outputs) if one is not None and one.has_pending_bytes}
    if has_partial:
        one_by_one.update(np.searchsorted(ends, (chars < 0).nonzero()[0], "right").tolist())
    begins = np.concatenate(([0], ends[:-1]))
    until = chars.cumsum()
    shift = np.array([one.length for one in outputs if one is not None]) - until[begins] + chars[begins]
    offsets = (until - chars + np.repeat(shift, ends - begins)).tolist()
    texts = first.token_texts.texts[ids].tolist()
    for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        one, visible_end = outputs[i], end - hides_last[i]
        assert one is not None
        if i in one_by_one:
            _push(one, ids[begin:end], hides_last[i])
            continue
        if visible_end > begin:
            one.add_texts(texts[begin:visible_end], offsets[begin:visible_end])
        if hides_last[i]:
            one.push_hidden()


def _push(one: BulkDetokenizer, ids: Ints, hides_last: bool) -> None:
    one.push(ids[:-1] if hides_last else ids)
    if hides_last:
        one.push_hidden()
