"""Tokens and their logprobs as clients read them, in both of OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from draftproof.serve.replies import (
    ChatLogprob,
    DraftInfo,
    PromptLogprobs,
    TextLogprobs,
    TokenInfo,
    TopLogprob,
)
from draftproof.text.detokenize import Detokenizer
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import DraftRecord, Logprob

LEAST = -9999.0  # JSON has no infinity: OpenAI's way to say "impossible"
Row = Mapping[int, Logprob]  # the token itself first, then the others by rank


class TokenNames:
    """The text of each token by itself, made when first needed. Half a character is told as its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        """Its name and its bytes."""
        known = self._known.get(token_id)
        if known is None:
            data = self.tokenizer.token_bytes(token_id)
            try:
                name = data.decode("utf-8")
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            known = self._known[token_id] = name, list(data)
        return known


class Teller:
    """Logprobs as one request asked for them."""

    def __init__(self, names: TokenNames, top: int, named: Sequence[int] | None, as_ids: bool) -> None:
        self._names, self._top, self._named, self._as_ids = names, top, named, as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._names(token_id)[0]

    # --- completions ------------------------------------------------------------------------------

    def text_row(self, token_id: int, row: Row) -> tuple[str, float, dict[str, float]]:
        """The token's name, its logprob, and by name: itself, then the best."""
        name = self.name
        several: dict[str, float] = {}
        for other, value in row.items():
            several.setdefault(name(other), value[0] if value[0] > LEAST else LEAST)
        own = row[token_id][0]
        return name(token_id), own if own > LEAST else LEAST, several

    def text(self, ids: Sequence[int], rows: Iterable[Row], offsets: Sequence[int]) -> TextLogprobs:
        told = [self.text_row(*each) for each in zip(ids, rows, strict=True)]
        return TextLogprobs(
            tokens=[each[0] for each in told],
            token_logprobs=[each[1] for each in told],
            top_logprobs=[each[2] for each in told],
            text_offset=list(offsets),
        )

    def text_prompt(self, ids: Sequence[int], rows: Sequence[Row | None], length: int) -> TextLogprobs:
        """Of an echoed prompt of `length` characters: nothing is known before its first token."""
        told = self.text(ids[1:], [row for row in rows[1:] if row is not None], [])
        speller = Detokenizer(self._names.tokenizer)
        speller.push(ids)
        return TextLogprobs(
            tokens=[self.name(ids[0]), *told.tokens],
            token_logprobs=[None, *told.token_logprobs],
            top_logprobs=[None, *told.top_logprobs],
            text_offset=[min(begin, length) for begin in speller.offsets],
        )

    # --- chat ---------------------------------------------------------------------------------------

    def chat_row(self, token_id: int, row: Row) -> ChatLogprob:
        own = row[token_id]
        name, data = self._names(token_id)
        return ChatLogprob(
            token=f"token_id:{token_id}" if self._as_ids else name,
            logprob=own[0] if own[0] > LEAST else LEAST,
            bytes=data,
            top_logprobs=[self._entry(*each) for each in self._best(token_id, own, row)],
        )

    def _best(self, token_id: int, own: Logprob, row: Row) -> list[tuple[int, Logprob]]:
        if self._named is not None:
            return [(named, row[named]) for named in self._named]
        others = list(row.items())[1:]
        if own.rank <= self._top:
            others.insert(own.rank - 1, (token_id, own))
        return others[: self._top]

    def _entry(self, token_id: int, value: Logprob) -> TopLogprob:
        name, data = self._names(token_id)
        return TopLogprob(
            token=f"token_id:{token_id}" if self._as_ids else name,
            logprob=value[0] if value[0] > LEAST else LEAST,
            bytes=data,
        )

    # --- on request ---------------------------------------------------------------------------------

    def prompt(self, rows: Sequence[Row | None]) -> PromptLogprobs:
        return [
            None if row is None else {str(i): self._info(i, value) for i, value in row.items()}
            for row in rows
        ]

    def _info(self, token_id: int, value: Logprob) -> TokenInfo:
        return TokenInfo(
            logprob=max(value.logprob, LEAST), rank=value.rank, decoded_token=self.name(token_id)
        )

    def drafts(self, records: Iterable[DraftRecord]) -> list[DraftInfo]:
        return [
            DraftInfo(
                token=self.name(record.token_id),
                token_id=record.token_id,
                position=record.position,
                source=record.source,
                accepted=record.accepted,
                draft_logprob=_clamped(record.draft_logprob),
                target_logprob=_clamped(record.target_logprob),
            )
            for record in records
        ]


def _clamped(value: float | None) -> float | None:
    return None if value is None else max(value, LEAST)
