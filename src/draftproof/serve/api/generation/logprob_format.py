"""Tokens and their logprobs in the two formats of the OpenAI API, built from logprob rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from draftproof.outputs import DraftRecord, LogprobRow
from draftproof.serve.api.generation.response_schema import (
    ChatLogprob,
    CompletionLogprobs,
    DraftInfo,
    DraftTopLogprob,
    PromptLogprobs,
    TokenInfo,
    TopLogprob,
)
from draftproof.text.detokenizer import Detokenizer
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.tokenizer import Tokenizer

PromptRows = Sequence[LogprobRow | None]  # the first token has none
MIN_LOGPROB = -9999.0  # in place of -infinity, which JSON lacks; the OpenAI API does the same


class TokenStrings(dict[int, tuple[str, list[int]]]):
    """String and bytes of each token, built when first used. Incomplete UTF-8 is shown as its bytes."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        super().__init__()
        self.tokenizer, self._as_ids = tokenizer, as_ids

    def __missing__(self, token_id: int) -> tuple[str, list[int]]:
        data = self.tokenizer.token_bytes(token_id)
        if self._as_ids:
            string = f"token_id:{token_id}"
        else:
            try:
                string = data.decode("utf-8")
            except UnicodeDecodeError:
                string = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        made = self[token_id] = string, list(data)
        return made


class LogprobFormatter:
    """Formatter of one request's logprobs: the `top` best tokens, or those of `listed` tokens."""

    def __init__(self, strings: TokenStrings, top: int, listed: Sequence[int] | None) -> None:
        self._strings, self._top, self._listed = strings, top, listed

    def string(self, token_id: int) -> str:
        """Return the string of a token."""
        return self._strings[token_id][0]

    def _completion_row(self, row: LogprobRow) -> tuple[str, float, dict[str, float]]:
        """Return the token's string, its logprob, and logprobs by string: its own, then the best ones."""
        strings = self._strings
        top: dict[str, float] = {}
        for token_id, value in zip(row.token_ids, row.logprobs, strict=True):
            string = strings[token_id][0]
            if string not in top:  # of two tokens with one string, the first has the higher logprob
                top[string] = value if value > MIN_LOGPROB else MIN_LOGPROB
        own = row.logprobs[0]
        return strings[row.token_ids[0]][0], own if own > MIN_LOGPROB else MIN_LOGPROB, top

    def completion(self, rows: Iterable[LogprobRow], offsets: Sequence[int]) -> CompletionLogprobs:
        """Return the logprobs of tokens at the character `offsets`."""
        formatted = [self._completion_row(row) for row in rows]
        return CompletionLogprobs(
            tokens=[each[0] for each in formatted],
            token_logprobs=[each[1] for each in formatted],
            top_logprobs=[each[2] for each in formatted],
            text_offset=list(offsets),
        )

    def echoed_prompt(self, ids: Sequence[int], rows: PromptRows, text: str) -> CompletionLogprobs:
        """Return the logprobs of a prompt echoed as `text`; its first token has none."""
        rest = self.completion([row for row in rows[1:] if row is not None], [])
        return CompletionLogprobs(
            tokens=[self.string(ids[0]), *rest.tokens],
            token_logprobs=[None, *rest.token_logprobs],
            top_logprobs=[None, *rest.top_logprobs],
            text_offset=self._offsets(ids, text),
        )

    def _offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Return where each token begins in `text`; special tokens may be hidden, all or leading ones."""
        for skip in (False, True):
            detokenizer = Detokenizer(self._strings.tokenizer, skip_special_tokens=skip)
            decoded = "".join(detokenizer.push(ids)) + detokenizer.finish()
            if decoded.endswith(text):
                break
        hidden = max(0, len(decoded) - len(text))
        return [min(max(0, begin - hidden), len(text)) for begin in detokenizer.offsets]

    def chat(self, row: LogprobRow) -> ChatLogprob:
        """Return the logprob of one token with its alternatives."""
        strings, own_id, own = self._strings, row.token_ids[0], row.logprobs[0]
        if self._listed is not None:
            values: dict[int, float] = {}
            for token_id, value in zip(row.token_ids, row.logprobs, strict=True):
                values.setdefault(token_id, value)
            top = [(token_id, values[token_id]) for token_id in self._listed]
        else:
            pairs = zip(row.token_ids, row.logprobs, strict=True)
            top = [pair for pair in pairs if pair[0] != own_id]
            rank = row.ranks[0]
            if rank <= self._top:
                top.insert(rank - 1, (own_id, own))
            del top[self._top :]
        tops = []
        for token_id, value in top:
            string, data = strings[token_id]
            tops.append(TopLogprob(string, value if value > MIN_LOGPROB else MIN_LOGPROB, data))
        string, data = strings[own_id]
        return ChatLogprob(string, own if own > MIN_LOGPROB else MIN_LOGPROB, data, tops)

    def prompt(self, rows: PromptRows) -> PromptLogprobs:
        """Return prompt_logprobs: by token id at each position."""
        return [None if row is None else self._prompt_row(row) for row in rows]

    def _prompt_row(self, row: LogprobRow) -> dict[str, TokenInfo]:
        entries: dict[str, TokenInfo] = {}
        for token_id, value, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True):
            if str(token_id) not in entries:
                entries[str(token_id)] = TokenInfo(
                    logprob=max(value, MIN_LOGPROB), rank=rank, decoded_token=self.string(token_id)
                )
        return entries

    def drafts(self, records: Iterable[DraftRecord]) -> list[DraftInfo]:
        """Return the drafts of a step, accepted or not."""
        return [
            DraftInfo(
                token=self.string(record.token_id),
                token_id=record.token_id,
                position=record.position,
                source=record.source,
                accepted=record.accepted,
                draft_logprob=_clamped(record.draft_logprob),
                target_logprob=_clamped(record.target_logprob),
                draft_rank=record.draft_rank,
                draft_top_logprobs=[
                    DraftTopLogprob(
                        token=self.string(token_id), token_id=token_id, logprob=max(value, MIN_LOGPROB)
                    )
                    for token_id, value in record.draft_top
                ],
            )
            for record in records
        ]


def logprob_rows(maps: Any) -> Sequence[Any]:
    """Return the rows behind `.logprobs` or `.prompt_logprobs`, without building the dicts."""
    if maps is None:
        return []
    assert isinstance(maps, LogprobMaps)
    return maps.rows


def _clamped(value: float | None) -> float | None:
    return None if value is None else max(value, MIN_LOGPROB)
