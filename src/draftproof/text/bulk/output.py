"""An answer that nobody looks at before it is complete: what was taken out of the ledger for it so far."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.sampling_params import top_of
from draftproof.text.bulk.detokenizer import BulkDetokenizer, Pieces
from draftproof.text.bulk.logprob_rows import Rows
from draftproof.text.bulk.stop_strings import Watch
from draftproof.text.logprobs import LogprobMaps, LogprobTable
from draftproof.text.stop_strings import StopMatch
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import CompletionOutput, FinishReason, LogprobKind, LogprobRow, Request


class Answer:
    """Tokens, text and logprobs as far as they have left its line of the ledger."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, pieces: Pieces | None, vocab: int
    ) -> None:
        params = request.params
        self.wants = LogprobKind.NONE
        if params.wants_logprobs:
            self.wants = LogprobKind.RAW if params.logprobs_mode == "raw" else LogprobKind.PROCESSED
        self.top = top_of(params.logprobs, vocab)
        self.max_tokens = params.max_tokens
        self.line = -1
        self.tokenizer = tokenizer
        self.shows_end = params.include_stop_str_in_output
        self.output = CompletionOutput(index=index, seed=request.seed)
        self.text = BulkDetokenizer(pieces) if pieces else None
        self.watch = Watch(params, pieces) if pieces and params.stop else None
        self.parts: list[Rows] = []  # its logprobs
        self.total = 0.0  # of the tokens' own, added one after the other

    def hides_last(self, reason: FinishReason) -> bool:
        """Is the last token an end or stop token, which is counted and not shown?"""
        matched = self.watch is not None and self.watch.match is not None
        return reason == "stop" and not self.shows_end and not matched

    def finish(self, reason: FinishReason, stop: int | str | None, error: str | None) -> CompletionOutput:
        out = self.output
        out.finish_reason, out.stop_reason = reason, stop
        # behind a stop string nothing happened any more
        out.error = None if self.watch is not None and self.watch.match is not None else error
        if self.text is not None:
            out.text, out.text_offsets = self.text.finish(), self.text.offsets
        else:
            out.text_offsets = [0] * len(out.token_ids)
        if self.watch is not None and reason != "abort":
            self.watch.finish()
            self._cut(self.watch.match)
        if self.wants is not LogprobKind.NONE:
            rows: Sequence[LogprobRow] = LogprobTable(self.parts) if self.parts else []
            out.logprobs, out.cumulative_logprob = LogprobMaps(rows, self.tokenizer), self.total
        return out

    def _cut(self, match: StopMatch | None) -> None:
        """What a stop string leaves: tokens that begin behind it begin at the text's end."""
        if match is None:
            return
        out, end = self.output, match.text_length
        out.finish_reason, out.stop_reason = "stop", match.stop
        out.text, out.text_offsets = out.text[:end], [min(begin, end) for begin in out.text_offsets]
