"""An answer that nobody looks at before it is complete: what was taken out of the ledger for it so far."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.sampling_params import top_of
from draftproof.text.bulk import BulkDetokenizer, Pieces
from draftproof.text.logprobs import LogprobMaps, LogprobTable
from draftproof.text.stop import StopMatch
from draftproof.text.tokenizer import Tokenizer
from draftproof.text.watch import Watch
from draftproof.types import CompletionOutput, FinishReason, Request, Wants

Ints = NDArray[np.int64]


class Answer:
    """Tokens, text and logprobs as far as they have left its line of the ledger."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, pieces: Pieces | None, vocab: int
    ) -> None:
        params = request.params
        self.wants = Wants.NONE
        if params.wants_logprobs:
            self.wants = Wants.RAW if params.logprobs_mode == "raw" else Wants.PROCESSED
        self.top = top_of(params.logprobs, vocab)
        self.line = -1
        self.tokenizer = tokenizer
        self.shows_end = params.include_stop_str_in_output
        self.output = CompletionOutput(index=index, seed=request.seed)
        self.text = BulkDetokenizer(pieces) if pieces else None
        self.watch = Watch(params, pieces) if pieces and params.stop else None
        self.parts: list[tuple[NDArray[Any], ...]] = []  # tokens and columns of logprobs

    def hides_last(self, reason: FinishReason) -> bool:
        """Is the last token an end or stop token, which is counted and not shown?"""
        matched = self.watch is not None and self.watch.match is not None
        return reason == "stop" and not self.shows_end and not matched

    def take(self, tokens: Ints, origins: NDArray[np.object_], unseen: bool) -> None:
        """More of its tokens. `unseen`: the last one is not shown."""
        out = self.output
        out.token_ids.extend(tokens.tolist())
        out.provenance.extend(origins.tolist())
        if self.text is None:
            return
        self.text.push(tokens[:-1] if unseen else tokens)
        if unseen:
            self.text.push_unseen()

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
        if self.wants is not Wants.NONE:
            self._finish_logprobs()
        return out

    def _cut(self, match: StopMatch | None) -> None:
        """What a stop string leaves: tokens that begin behind it begin at the text's end."""
        if match is None:
            return
        out, end = self.output, match.text_length
        out.finish_reason, out.stop_reason = "stop", match.stop
        out.text, out.text_offsets = out.text[:end], [min(begin, end) for begin in out.text_offsets]

    def _finish_logprobs(self) -> None:
        out = self.output
        if not self.parts:
            out.logprobs, out.cumulative_logprob = LogprobMaps([], self.tokenizer), 0.0
            return
        out.logprobs = LogprobMaps(LogprobTable.of(self.parts), self.tokenizer)
        # one after the other, as they would have been added step by step
        own = np.concatenate([values[:, 0] for _, values, *_ in self.parts], dtype=np.float64)
        out.cumulative_logprob = 0.0 + float(np.add.accumulate(own)[-1])
