"""Streaming output: one output built token by token, with an event for each token.

Stop strings are found here. Tokens that a step committed after a stop string are dropped from token ids,
logprobs, text, provenance and statistics alike. `text/bulk` builds the same outputs without events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from draftproof.outputs import CompletionOutput, DraftRecord, FinishReason, LogprobRow, TokenEvent, no_text
from draftproof.text.detokenizer import Detokenizer
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.stop_strings import StopStrings
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Request, StepOutput

Finish = tuple[FinishReason | None, int | str | None, str | None]  # reason, stop, error
Drafted = tuple[int, list[DraftRecord] | None]  # number of drafts verified; the drafts, on request


@dataclass(slots=True, eq=False)
class StepEvents(Sequence[TokenEvent]):
    """Events of one step of one output, each created when it is read, so that unread ones are small."""

    output_index: int
    tokens: list[int]
    texts: list[str]
    provenance: list[str]
    logprobs: LogprobMaps | None  # of the whole output
    offsets: list[int] | None  # of the whole output
    first: int  # index of the step's first token in both
    finish: Finish
    drafted: Drafted
    weights_version: int

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[TokenEvent]:
        return map(self.__getitem__, range(len(self.texts)))

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # slices are lists
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        last = i == len(self) - 1
        reason, stop, error = self.finish if last else (None, None, None)
        num_draft, drafts = self.drafted if last else (0, None)
        return TokenEvent(
            index=self.output_index,
            token_id=self.tokens[i],
            text=self.texts[i],
            provenance=self.provenance[i],
            logprob_row=None if self.logprobs is None else self.logprobs.rows[self.first + i],
            step_end=last,
            finish_reason=reason,
            stop_reason=stop,
            error=error,
            text_offset=0 if self.offsets is None else self.offsets[self.first + i],
            num_draft=num_draft,
            drafts=drafts,
            token_text=no_text if self.logprobs is None else self.logprobs.token_text,
            weights_version=self.weights_version,
        )


class StreamingOutput:
    """One CompletionOutput under construction; without a tokenizer it has ids and no text."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.tokenizer = tokenizer
        self.output = CompletionOutput(index=index, seed=request.seed)
        self._rows: list[LogprobRow] = []
        self._logprobs = LogprobMaps(self._rows, tokenizer)
        if params.needs_logprobs:
            self.output.logprobs, self.output.cumulative_logprob = self._logprobs, 0.0
        self._drafts: list[DraftRecord] = []
        if params.include_draft_logprobs:
            self.output.drafts = self._drafts
        self._detokenizer = None
        if tokenizer is not None:  # the output continues the prompt and keeps its leading space
            self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, continues=True)
        self._stops = StopStrings(
            params.stop, include_in_output=params.include_stop_str_in_output, min_tokens=params.min_tokens
        )

    @property
    def finished(self) -> bool:
        """True once the output has a finish reason."""
        return self.output.finish_reason is not None

    def feed(self, step: StepOutput, returns_events: bool = True) -> Sequence[TokenEvent]:
        """Append the tokens of a step; return an event for each one, or for an end without a token."""
        texts = self._visible_texts(step)
        kept = len(texts)
        drafts = self._count(step, kept)
        origins = provenance(step)[:kept]
        self._add(step, kept, origins)
        out, length_before = self.output, len(self.output.text)
        self._update_text(step, texts)
        if not returns_events:
            return []
        if self.finished and not texts:
            return [self._end_event(out.text[length_before:])]
        return StepEvents(
            output_index=out.index,
            tokens=step.token_ids,
            texts=texts,
            provenance=origins,
            logprobs=self._logprobs if step.logprobs is not None else None,
            offsets=self._detokenizer.offsets if self._detokenizer else None,
            first=len(out.token_ids) - len(texts),
            finish=(out.finish_reason, out.stop_reason, out.error),
            drafted=(step.num_draft, drafts),
            weights_version=out.weights_version,
        )

    def _end_event(self, text: str) -> TokenEvent:
        out = self.output
        return TokenEvent(
            index=out.index,
            token_id=None,
            text=text,
            provenance="",
            logprob_row=None,
            step_end=True,
            finish_reason=out.finish_reason,
            stop_reason=out.stop_reason,
            error=out.error,
            weights_version=out.weights_version,
        )

    def abort(self, reason: FinishReason = "abort", error: str | None = None) -> Sequence[TokenEvent]:
        """End the output from outside and return the event of the end; delivered tokens stay."""
        if self.finished:
            return []
        rest = self._held_text()
        self.output.text += rest
        self.output.finish_reason, self.output.error = reason, error
        return [self._end_event(rest)]

    # --- parts ------------------------------------------------------------------------------------

    def _visible_texts(self, step: StepOutput) -> list[str]:
        """Return the text that becomes visible with each token, up to one that completes a stop string."""
        texts = []
        for i, token in enumerate(step.token_ids):
            texts.append(self._stops.push([self._piece(step, i, token)]))
            if self._stops.match is not None:
                break
        return texts

    def _piece(self, step: StepOutput, i: int, token: int) -> str:
        if self._detokenizer is None:
            return ""
        ends = step.finish_reason == "stop" and i == len(step.token_ids) - 1
        if ends and not self.request.params.include_stop_str_in_output:
            self._detokenizer.offsets.append(self._detokenizer.length)
            return ""  # a stop token is counted, not shown
        return self._detokenizer.push([token])[0]

    def _count(self, step: StepOutput, kept: int) -> list[DraftRecord] | None:
        """Count a step and return its drafts if the request reports them."""
        if not kept:
            return None
        accepted = min(step.num_accepted, kept)
        self.output.metrics.record(step.num_draft, accepted, kept, step.is_predicted)
        if step.drafts is None or self.output.drafts is None:
            return None
        end = len(self.output.token_ids) + kept
        # drafts after a stop string are not accepted, as after an end token
        drafts = [replace(d, accepted=d.accepted and d.position < end) for d in step.drafts]
        self._drafts.extend(drafts)
        return drafts

    def _add(self, step: StepOutput, kept: int, origins: list[str]) -> None:
        out = self.output
        out.token_ids.extend(step.token_ids[:kept])
        out.provenance.extend(origins)
        if out.cumulative_logprob is not None:
            for row in (step.logprobs or [])[:kept]:
                self._rows.append(row)
                out.cumulative_logprob += row.logprobs[0]

    def _update_text(self, step: StepOutput, texts: list[str]) -> None:
        """Append the text and offsets; at the end add held text to the last token's piece."""
        out = self.output
        if self._stops.match is not None:
            out.finish_reason, out.stop_reason = "stop", self._stops.match.stop
        elif step.finish_reason is not None:
            out.finish_reason, out.stop_reason = step.finish_reason, step.stop_reason
            out.error = step.error
            rest = self._held_text()
            if texts:
                texts[-1] += rest
            else:
                out.text += rest
            if self._stops.match is not None:  # the held text completed a stop string
                out.finish_reason, out.stop_reason = "stop", self._stops.match.stop
        out.text += "".join(texts)
        first, count = len(out.text_offsets), len(out.token_ids)
        offsets = self._detokenizer.offsets[first:count] if self._detokenizer else [0] * (count - first)
        out.text_offsets.extend(offsets)
        if self.finished:  # tokens of a removed stop string begin at the text's end
            out.text_offsets = [min(begin, len(out.text)) for begin in out.text_offsets]

    def _held_text(self) -> str:
        """Return the text that was held back for stop strings and incomplete characters."""
        return self._stops.finish(self._detokenizer.finish() if self._detokenizer else "")


def provenance(step: StepOutput) -> list[str]:
    """Return the provenance of each token of a step."""
    origins = [f"accepted:{source}" for source in step.sources]
    if len(step.token_ids) > len(origins):
        if step.num_draft == 0:
            origins.append("plain")
        else:
            origins.append("bonus" if step.num_accepted == step.num_draft else "recovered")
    return origins
