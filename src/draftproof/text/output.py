"""From step outputs to an answer: text, logprobs with decoded tokens, provenance, counts that agree.

Stop strings are found here. What a step committed beyond one is dropped from every list alike: token ids,
logprobs, text, provenance and statistics.
"""

from __future__ import annotations

from dataclasses import replace

from draftproof.text.detokenize import Detokenizer
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.stop import StopStrings
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import (
    CompletionOutput,
    LogprobRow,
    Request,
    StepOutput,
    TokenEvent,
)


class OutputBuilder:
    """Builds one CompletionOutput; without a tokenizer it has ids and no text."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.tokenizer = tokenizer
        self.output = CompletionOutput(index=index, seed=request.seed)
        self._rows: list[LogprobRow] = []
        self._lines = LogprobMaps(self._rows, tokenizer)
        if params.wants_logprobs:
            self.output.logprobs, self.output.cumulative_logprob = self._lines, 0.0
        if params.include_draft_logprobs:
            self.output.drafts = []
        self._detokenizer = None
        if tokenizer is not None:  # prompt + text must read on: an answer keeps its leading space
            self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, continues=True)
        self._stops = StopStrings(
            params.stop,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def feed(self, step: StepOutput, tell: bool = True) -> list[TokenEvent]:
        """Take a step's tokens; one event for each that counts, and one for an end that has none.

        Unless somebody listens (`tell`) there are no events.
        """
        shown = self._show(step)
        kept = len(shown)
        self._count(step, kept)
        origins = provenance(step)[:kept]
        self._add(step, kept, origins)
        before = len(self.output.text)
        self._end(step, shown)
        return self._events(step, shown, origins, before) if tell else []

    def _events(
        self, step: StepOutput, shown: list[str], origins: list[str], before: int
    ) -> list[TokenEvent]:
        out, kept = self.output, len(shown)
        if self.finished and not shown:
            text, reason = out.text[before:], out.finish_reason
            return [TokenEvent(out.index, None, text, "", None, True, reason, out.stop_reason, out.error)]
        first = len(out.token_ids) - kept
        return [
            TokenEvent(
                index=out.index,
                token_id=step.token_ids[i],
                text=text,
                provenance=origins[i],
                logprobs=self._lines[first + i] if step.logprobs is not None else None,
                step_end=i == kept - 1,
                finish_reason=out.finish_reason if i == kept - 1 else None,
                stop_reason=out.stop_reason if i == kept - 1 else None,
                error=out.error if i == kept - 1 else None,
            )
            for i, text in enumerate(shown)
        ]

    def abort(self) -> None:
        """The request was ended from outside; what was delivered stays."""
        if not self.finished:
            self.output.text += self._rest()
            self.output.finish_reason = "abort"

    # --- parts ------------------------------------------------------------------------------------

    def _show(self, step: StepOutput) -> list[str]:
        """The text that becomes visible with each token, up to the one that completes a stop string."""
        shown = []
        for i, token in enumerate(step.token_ids):
            shown.append(self._stops.push([self._piece(step, i, token)]))
            if self._stops.match is not None:
                break
        return shown

    def _piece(self, step: StepOutput, i: int, token: int) -> str:
        if self._detokenizer is None:
            return ""
        ends = step.finish_reason == "stop" and i == len(step.token_ids) - 1
        if ends and not self.request.params.include_stop_str_in_output:
            self._detokenizer.offsets.append(self._detokenizer.length)
            return ""  # a stop token is counted, not shown
        return self._detokenizer.push([token])[0]

    def _count(self, step: StepOutput, kept: int) -> None:
        if not kept:
            return
        self.output.metrics.record(step.num_draft, min(step.num_accepted, kept), kept)
        if step.drafts is not None and self.output.drafts is not None:
            end = len(self.output.token_ids) + kept
            # behind a stop string no draft stood, as behind an end token
            self.output.drafts.extend(
                replace(d, accepted=d.accepted and d.position < end) for d in step.drafts
            )

    def _add(self, step: StepOutput, kept: int, origins: list[str]) -> None:
        out = self.output
        out.token_ids.extend(step.token_ids[:kept])
        out.provenance.extend(origins)
        if out.cumulative_logprob is not None:
            for row in (step.logprobs or [])[:kept]:
                self._rows.append(row)
                out.cumulative_logprob += row.logprobs[0]

    def _end(self, step: StepOutput, shown: list[str]) -> None:
        """Settle the text; on an ending flush what was held back into the last token's piece."""
        out = self.output
        if self._stops.match is not None:
            out.finish_reason, out.stop_reason = "stop", self._stops.match.stop
        elif step.finish_reason is not None:
            out.finish_reason, out.stop_reason = step.finish_reason, step.stop_reason
            out.error = step.error
            rest = self._rest()
            if shown:
                shown[-1] += rest
            else:
                out.text += rest
            if self._stops.match is not None:  # the flushed text completed a stop string
                out.finish_reason, out.stop_reason = "stop", self._stops.match.stop
        out.text += "".join(shown)
        known, count = len(out.text_offsets), len(out.token_ids)
        begins = self._detokenizer.offsets[known:count] if self._detokenizer else [0] * (count - known)
        out.text_offsets.extend(begins)
        if self.finished:  # a stop string that was cut off leaves tokens that begin behind the text's end
            out.text_offsets = [min(begin, len(out.text)) for begin in out.text_offsets]

    def _rest(self) -> str:
        return self._stops.finish(self._detokenizer.finish() if self._detokenizer else "")


def provenance(step: StepOutput) -> list[str]:
    """Where each token of a step came from."""
    origins = [f"accepted:{source}" for source in step.sources]
    if len(step.token_ids) > len(origins):
        if step.num_draft == 0:
            origins.append("plain")
        else:
            origins.append("bonus" if step.num_accepted == step.num_draft else "recovered")
    return origins
