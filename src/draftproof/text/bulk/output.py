"""Output that is not streamed: its search for stop strings, and what has left the output table."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.outputs import CompletionOutput, FinishReason, LogprobRow
from draftproof.sampling_params import SamplingParams, top_of
from draftproof.text.bulk.detokenizer import BulkDetokenizer, TokenTexts
from draftproof.text.bulk.draft_list import DraftList, DraftPart
from draftproof.text.bulk.logprob_rows import Rows
from draftproof.text.detokenizer import Detokenizer
from draftproof.text.logprobs import LogprobMaps, LogprobTable
from draftproof.text.stop_strings import StopMatch, StopStrings
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import LogprobKind, Request


class StopScanner:
    """Stop-string search in one output: one cache lookup for most tokens, results as of `StopStrings`."""

    def __init__(self, params: SamplingParams, token_texts: TokenTexts) -> None:
        self._token_texts = token_texts
        self._detokenizer = Detokenizer(
            token_texts.tokenizer, token_texts.skip_special_tokens, continues=True
        )
        self._has_pending_bytes = False
        self._stops = StopStrings(
            params.stop, include_in_output=params.include_stop_str_in_output, min_tokens=params.min_tokens
        )

    @property
    def match(self) -> StopMatch | None:
        """Stop string that was found, if any."""
        return self._stops.match

    def push(self, tokens: list[int], hides_last: bool) -> int:
        """Return how many tokens count, up to a completed stop string; `hides_last`: the last has no text."""
        for i, token in enumerate(tokens):
            piece = "" if hides_last and i == len(tokens) - 1 else self._piece(token)
            if self._stops.scan(piece) is not None:
                return i + 1
        return len(tokens)

    def finish(self) -> None:
        """End the output for another reason; pending bytes may still complete a stop string."""
        if self.match is None:
            self._stops.scan(self._detokenizer.finish(), new_token=False)

    def _piece(self, token: int) -> str:
        if not self._has_pending_bytes and (text := self._token_texts.token_text(token)) is not None:
            return text
        piece = self._detokenizer.push([token])[0]
        self._has_pending_bytes = self._detokenizer.has_pending_bytes
        return piece


class BulkOutput:
    """Tokens, text and logprobs of one output, as far as they were flushed from its line of the table."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer | None,
        token_texts: TokenTexts | None,
        vocab: int,
        sources: Sequence[str] = (),
    ) -> None:
        params = request.params
        self.logprob_kind = LogprobKind.NONE
        if params.needs_logprobs:
            self.logprob_kind = LogprobKind.RAW if params.logprobs_mode == "raw" else LogprobKind.PROCESSED
        self.named_ids = params.logprob_token_ids or ()
        self.top = len(self.named_ids) or top_of(params.logprobs, vocab)  # logprobs besides the token's own
        self.reports_drafts = params.include_draft_logprobs
        self.draft_parts: list[DraftPart] = []
        self._sources = sources
        self.max_tokens = params.max_tokens
        self.line = -1  # of the table; -1: none
        self.tokenizer = tokenizer
        self.shows_stop = params.include_stop_str_in_output
        self.output = CompletionOutput(index=index, seed=request.seed)
        self.text = BulkDetokenizer(token_texts) if token_texts else None
        self.stop_scanner = StopScanner(params, token_texts) if token_texts and params.stop else None
        self.logprob_parts: list[Rows] = []
        self.cumulative_logprob = 0.0

    @property
    def has_stop_match(self) -> bool:
        """True once a stop string was found."""
        return self.stop_scanner is not None and self.stop_scanner.match is not None

    def hides_last(self, reason: FinishReason) -> bool:
        """Return whether the last token is an end or stop token, which is counted and not shown."""
        return reason == "stop" and not self.shows_stop and not self.has_stop_match

    def finish(self, reason: FinishReason, stop: int | str | None, error: str | None) -> CompletionOutput:
        """Complete and return the output."""
        out = self.output
        out.finish_reason, out.stop_reason = reason, stop
        # an error after a stop string concerns tokens that are not part of the output
        out.error = None if self.has_stop_match else error
        if self.text is not None:
            out.text, out.text_offsets = self.text.finish(), self.text.offsets
        else:
            out.text_offsets = [0] * len(out.token_ids)
        if self.stop_scanner is not None and reason != "abort":
            self.stop_scanner.finish()
            self._truncate(self.stop_scanner.match)
        if self.logprob_kind is not LogprobKind.NONE:
            rows: Sequence[LogprobRow] = []
            if self.logprob_parts:
                rows = LogprobTable(self.logprob_parts, self.named_ids)
            out.logprobs = LogprobMaps(rows, self.tokenizer)
            out.cumulative_logprob = self.cumulative_logprob
        if self.reports_drafts:
            out.drafts = DraftList(self.draft_parts, self._sources)
        return out

    def _truncate(self, match: StopMatch | None) -> None:
        """Cut the text at a stop string; tokens that begin after the cut begin at the text's end."""
        if match is None:
            return
        out, end = self.output, match.text_length
        out.finish_reason, out.stop_reason = "stop", match.stop
        out.text, out.text_offsets = out.text[:end], [min(begin, end) for begin in out.text_offsets]
