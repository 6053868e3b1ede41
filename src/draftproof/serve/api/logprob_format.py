"""Tokens and their logprobs as clients read them, in both of OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from draftproof.outputs import DraftRecord, Logprob
from draftproof.serve.api.response_schema import (
    ChatLogprob,
    DraftInfo,
    PromptLogprobs,
    TextLogprobs,
    TokenInfo,
    TopLogprob,
)
from draftproof.text.detokenizer import Detokenizer
from draftproof.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no infinity: OpenAI's way to say "impossible"
Row = Mapping[int, Logprob]  # the token itself first, then the others by rank


class TokenNames(dict[int, tuple[str, list[int]]]):
    """Name and bytes of each token by itself, made when first needed; half a character is its bytes."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        super().__init__()
        self.tokenizer, self._as_ids = tokenizer, as_ids

    def __missing__(self, token_id: int) -> tuple[str, list[int]]:
        data = self.tokenizer.token_bytes(token_id)
        if self._as_ids:
            name = f"token_id:{token_id}"
        else:
            try:
                name = data.decode("utf-8")
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        made = self[token_id] = name, list(data)
        return made


class Teller:
    """Logprobs as one request asked for them: the `top` best, or those of `named` tokens."""

    def __init__(self, names: TokenNames, top: int, named: Sequence[int] | None) -> None:
        self._names, self._top, self._named = names, top, named

    def name(self, token_id: int) -> str:
        return self._names[token_id][0]

    # --- completions ------------------------------------------------------------------------------

    def text_row(self, token_id: int, row: Row) -> tuple[str, float, dict[str, float]]:
        """The token's name, its logprob, and by name: itself, then the best."""
        names = self._names
        several: dict[str, float] = {}
        for other, value in row.items():
            name = names[other][0]
            if name not in several:  # two tokens of one name: the better one is told
                several[name] = value[0] if value[0] > LEAST else LEAST
        own = row[token_id][0]
        return names[token_id][0], own if own > LEAST else LEAST, several

    def text(self, ids: Sequence[int], rows: Iterable[Row], offsets: Sequence[int]) -> TextLogprobs:
        told = [self.text_row(*each) for each in zip(ids, rows, strict=True)]
        return TextLogprobs(
            tokens=[each[0] for each in told],
            token_logprobs=[each[1] for each in told],
            top_logprobs=[each[2] for each in told],
            text_offset=list(offsets),
        )

    def text_prompt(self, ids: Sequence[int], rows: Sequence[Row | None], text: str) -> TextLogprobs:
        """Of a prompt echoed as `text`: nothing is known before its first token."""
        told = self.text(ids[1:], [row for row in rows[1:] if row is not None], [])
        return TextLogprobs(
            tokens=[self.name(ids[0]), *told.tokens],
            token_logprobs=[None, *told.token_logprobs],
            top_logprobs=[None, *told.top_logprobs],
            text_offset=self._offsets(ids, text),
        )

    def _offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Where each begins in `text`, which may show special tokens, all but those in front, or none."""
        for skip in (False, True):
            speller = Detokenizer(self._names.tokenizer, skip_special_tokens=skip)
            spelt = "".join(speller.push(ids)) + speller.finish()
            if spelt.endswith(text):
                break
        hidden = max(0, len(spelt) - len(text))
        return [min(max(0, begin - hidden), len(text)) for begin in speller.offsets]

    # --- chat ---------------------------------------------------------------------------------------

    def chat_row(self, token_id: int, row: Row) -> ChatLogprob:
        names, own = self._names, row[token_id]
        if self._named is not None:
            best = [(named, row[named]) for named in self._named]
        else:
            best = list(row.items())[1:]
            if own[1] <= self._top:  # its rank
                best.insert(own[1] - 1, (token_id, own))
            del best[self._top :]
        name, data = names[token_id]
        tops = []
        for other, value in best:
            its_name, its_data = names[other]
            tops.append(TopLogprob(its_name, value[0] if value[0] > LEAST else LEAST, its_data))
        return ChatLogprob(name, own[0] if own[0] > LEAST else LEAST, data, tops)

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
