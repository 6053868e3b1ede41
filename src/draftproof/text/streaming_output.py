"""From step outputs to an answer: text, logprobs with decoded tokens, provenance, counts that agree.

Stop strings are found here. What a step committed beyond one is dropped from every list alike: token ids,
logprobs, text, provenance and statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from draftproof.text.detokenizer import Detokenizer
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.stop_strings import StopStrings
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import (
    CompletionOutput,
    DraftRecord,
    FinishReason,
    LogprobRow,
    Request,
    StepOutput,
    TokenEvent,
)

Finish = tuple[FinishReason | None, int | str | None, str | None]
Drafted = tuple[int, list[DraftRecord] | None]  # how many drafts a step verified; which, if somebody asked


class StepEvents(Sequence[TokenEvent]):
    """The events of one step of one answer, each made when it is read.

    Until then they hold hardly more than the answer does anyway, so a reader may be late at no great cost.
    """

    __slots__ = (
        *("_begins", "_drafted", "_ending", "_first", "_index", "_lines"),
        *("_origins", "_shown", "_tokens"),
    )

    def __init__(
        self,
        index: int,
        tokens: list[int],
        shown: list[str],
        origins: list[str],
        lines: LogprobMaps | None,  # the whole answer's
        begins: list[int] | None,  # the whole answer's offsets
        first: int,  # where these begin in both
        ending: Finish,
        drafted: Drafted,
    ) -> None:
        self._index, self._tokens, self._shown, self._origins = index, tokens, shown, origins
        self._lines, self._begins, self._first = lines, begins, first
        self._ending, self._drafted = ending, drafted

    def __len__(self) -> int:
        return len(self._shown)

    def __iter__(self) -> Iterator[TokenEvent]:
        return map(self.__getitem__, range(len(self._shown)))

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # slices are lists
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        last = i == len(self) - 1
        reason, stop, error = self._ending if last else (None, None, None)
        num_draft, drafts = self._drafted if last else (0, None)
        return TokenEvent(
            index=self._index,
            token_id=self._tokens[i],
            text=self._shown[i],
            provenance=self._origins[i],
            logprobs=None if self._lines is None else self._lines[self._first + i],
            step_end=last,
            finish_reason=reason,
            stop_reason=stop,
            error=error,
            text_offset=0 if self._begins is None else self._begins[self._first + i],
            num_draft=num_draft,
            drafts=drafts,
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

    def feed(self, step: StepOutput, tell: bool = True) -> Sequence[TokenEvent]:
        """Take a step's tokens; one event for each that counts, and one for an end that has none.

        Unless somebody listens (`tell`) there are no events.
        """
        shown = self._show(step)
        kept = len(shown)
        drafts = self._count(step, kept)
        origins = provenance(step)[:kept]
        self._add(step, kept, origins)
        before = len(self.output.text)
        self._end(step, shown)
        return self._events(step, shown, origins, before, drafts) if tell else []

    def _events(
        self,
        step: StepOutput,
        shown: list[str],
        origins: list[str],
        before: int,
        drafts: list[DraftRecord] | None,
    ) -> Sequence[TokenEvent]:
        out = self.output
        if self.finished and not shown:
            return [self._last_words(out.text[before:])]
        ending = out.finish_reason, out.stop_reason, out.error
        lines = self._lines if step.logprobs is not None else None
        first = len(out.token_ids) - len(shown)
        drafted = step.num_draft, drafts
        begins = self._detokenizer.offsets if self._detokenizer else None
        return StepEvents(out.index, step.token_ids, shown, origins, lines, begins, first, ending, drafted)

    def _last_words(self, text: str) -> TokenEvent:
        """An end that comes without a token."""
        out = self.output
        return TokenEvent(
            out.index, None, text, "", None, True, out.finish_reason, out.stop_reason, out.error
        )

    def abort(self, reason: FinishReason = "abort", error: str | None = None) -> Sequence[TokenEvent]:
        """The request was ended from outside; what was delivered stays. The event that says so."""
        if self.finished:
            return []
        rest = self._rest()
        self.output.text += rest
        self.output.finish_reason, self.output.error = reason, error
        return [self._last_words(rest)]

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

    def _count(self, step: StepOutput, kept: int) -> list[DraftRecord] | None:
        """The step's drafts, if somebody asked for them."""
        if not kept:
            return None
        self.output.metrics.record(step.num_draft, min(step.num_accepted, kept), kept)
        if step.drafts is None or self.output.drafts is None:
            return None
        end = len(self.output.token_ids) + kept
        # behind a stop string no draft stood, as behind an end token
        drafts = [replace(d, accepted=d.accepted and d.position < end) for d in step.drafts]
        self.output.drafts.extend(drafts)
        return drafts

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
