"""Builders of response bodies: text completion and chat completion, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from draftproof.errors import GRAMMAR_TOO_SLOW, NO_TOKEN_LEFT
from draftproof.metrics import SpecStats
from draftproof.outputs import CompletionOutput, LogprobRow, RequestOutput, TokenEvent
from draftproof.sampling_params import MAX_SEED
from draftproof.serve.api.generation import response_schema as schema
from draftproof.serve.api.generation.logprob_format import (
    LogprobFormatter,
    PromptRows,
    TokenStrings,
    logprob_rows,
)
from draftproof.serve.api.generation.output_parser import ChoiceStream
from draftproof.serve.api.generation.prompt_parser import ParsedPrompt
from draftproof.serve.api.generation.request_parser import ParsedRequest
from draftproof.serve.api.generation.response_schema import (
    ChatChunkChoice,
    CompletionChoice,
    CompletionLogprobs,
)
from draftproof.serve.http.errors import ApiError

Events = Sequence[TokenEvent]
Fields = dict[str, Any]


class ResponseBuilder:
    """Parts common to both routes. One builder per HTTP request."""

    kind = ""

    def __init__(self, parsed: ParsedRequest, strings: TokenStrings, head: Fields, max_drafts: int) -> None:
        """Build for one parsed request. `head`: fields that every body and chunk begins with."""
        self.parsed, self.head, self.strings = parsed, head, strings
        params = parsed.params
        self.n = params.n
        self._max_drafts = max_drafts
        self._prompt_width = params.prompt_logprobs
        self.logprobs = LogprobFormatter(strings, params.logprobs or 0, params.logprob_token_ids)
        assert params.seed is not None
        self._seed = params.seed

    def whole(self, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """Return the body of a request without streaming."""
        raise NotImplementedError

    def seed_of(self, index: int) -> int:
        """Return the seed of a choice: each prompt has the seeds seed, seed + 1, ..."""
        return (self._seed + index % self.n) % (MAX_SEED + 1)

    def usage(self, outputs: Sequence[RequestOutput]) -> schema.Usage:
        """Return the token counts of all choices."""
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_generated = 0
        if not self.parsed.prompt_only:
            num_generated = sum(len(o.token_ids) for output in outputs for o in output.outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        details = schema.CompletionDetails()
        if self.parsed.params.prediction is not None:
            accepted = sum(output.metrics.num_accepted_predicted for output in outputs)
            drafted = sum(output.metrics.num_predicted_drafts for output in outputs)
            details.accepted_prediction_tokens = accepted
            details.rejected_prediction_tokens = drafted - accepted
        parsing = self.parsed.parsing
        if parsing is not None and parsing.reasoning is not None:
            ids = [each.token_ids for output in outputs for each in output.outputs]
            details.reasoning_tokens = parsing.count_reasoning(ids)
        return schema.Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=schema.PromptDetails(cached_tokens=num_cached),
            completion_tokens_details=UNSET if details == schema.CompletionDetails() else details,
        )

    def metrics(self, outputs: Sequence[RequestOutput]) -> schema.RequestMetrics:
        """Return speculation statistics, strategy and times of the request."""
        total = SpecStats()
        for output in outputs:
            total.add(output.metrics)
        return schema.RequestMetrics(
            speculative_decoding=speculation(total, self._max_drafts) if self._max_drafts else None,
            strategy=outputs[0].strategy,
            lossless=all(output.lossless for output in outputs),
            queue_seconds=outputs[0].queue_seconds,
            first_token_seconds=outputs[0].first_token_seconds,
            weights_version=max(output.weights_version for output in outputs),
            weights_versions=[
                [schema.WeightsVersion(version=v, first_token=first) for v, first in each.weights_versions]
                for output in outputs
                for each in output.outputs
            ],
        )

    def prompt_fields(self, prompt: ParsedPrompt, rows: PromptRows) -> Fields:
        """Return the requested ones of the optional fields of a prompt."""
        fields: Fields = {"prompt_token_ids": prompt.ids} if self.parsed.token_ids else {}
        width = self.parsed.prompt_logprobs
        if width is not None:
            fields["prompt_logprobs"] = self.logprobs.prompt(self._cut(rows, width))
        return fields

    def _cut(self, rows: Iterable[LogprobRow | None], width: int) -> list[LogprobRow | None]:
        """Return each row with the token itself and its `width` best, if more were computed."""
        if width == self._prompt_width:
            return list(rows)
        return [None if row is None else _cut_row(row, width) for row in rows]

    def finish_reason(self, index: int, reason: str | None) -> Any:
        """Return the finish reason of a streamed choice."""
        return checked_reason(reason)

    def _choice_fields(self, output: CompletionOutput) -> Fields:
        """Return the fields of a whole choice that do not depend on the route."""
        return {
            "finish_reason": checked_reason(output.finish_reason),
            "stop_reason": output.stop_reason,
            "seed": self.seed_of(output.index),
            "token_ids": output.token_ids if self.parsed.token_ids else UNSET,
            "provenance": output.provenance if self.parsed.provenance else UNSET,
            "drafts": UNSET if output.drafts is None else self.logprobs.drafts(output.drafts),
        }


class CompletionBuilder(ResponseBuilder):
    """Builder for /v1/completions."""

    kind = "text_completion"

    def echo(self, prompt: ParsedPrompt, rows: PromptRows) -> tuple[str, CompletionLogprobs | None]:
        """Return the echoed text of a prompt, and its logprobs if requested."""
        if not self.parsed.echo:
            return "", None
        text = prompt.text
        if text is None:
            text = self.strings.tokenizer.decode(prompt.ids, self.parsed.params.skip_special_tokens)
        width = self.parsed.echo_logprobs
        if width is None:
            return text, None
        return text, self.logprobs.echoed_prompt(prompt.ids, self._cut(rows, width), text)

    def whole(self, outputs: Sequence[RequestOutput]) -> schema.CompletionResponse:
        """Return the body of a request without streaming."""
        choices = []
        for p, (prompt, output) in enumerate(zip(self.parsed.prompts, outputs, strict=True)):
            rows = logprob_rows(output.prompt_logprobs)
            text, logprobs = self.echo(prompt, rows)
            fields = self.prompt_fields(prompt, rows)
            choices += [self._choice(p, each, text, logprobs, fields) for each in output.outputs]
        return schema.CompletionResponse(
            **self.head, choices=choices, usage=self.usage(outputs), metrics=self.metrics(outputs)
        )

    def _choice(
        self,
        p: int,
        output: CompletionOutput,
        echo: str,
        echo_logprobs: CompletionLogprobs | None,
        prompt_fields: Fields,
    ) -> CompletionChoice:
        index, rows = p * self.n + output.index, logprob_rows(output.logprobs)
        has_logprobs = output.logprobs is not None
        if self.parsed.prompt_only:
            output, rows = CompletionOutput(output.index, output.seed, finish_reason="length"), []
        logprobs = echo_logprobs
        if has_logprobs:
            offsets = [len(echo) + begin for begin in output.text_offsets]
            logprobs = joined(echo_logprobs, self.logprobs.completion(rows, offsets))
        fields = {**self._choice_fields(output), **prompt_fields}
        return CompletionChoice(index=index, text=echo + output.text, logprobs=logprobs, **fields)

    def first_chunk(self, index: int, prompt: ParsedPrompt, rows: PromptRows) -> CompletionChoice | None:
        """Return the chunk before the first token of a choice, if there is anything to send."""
        fields = self.prompt_fields(prompt, rows)
        if not self.parsed.echo and not fields:
            return None
        text, logprobs = self.echo(prompt, rows)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, **fields)

    def chunk(self, index: int, text: str, events: Events, shift: int) -> CompletionChoice:
        """Return the chunk of some tokens; `shift`: number of echoed characters."""
        made = CompletionChoice(index=index, text=text)
        if self.parsed.params.needs_logprobs and events[0].logprob_row is not None:
            rows = [event.logprob_row for event in events if event.logprob_row is not None]
            made.logprobs = self.logprobs.completion(rows, [shift + event.text_offset for event in events])
        return made


class ChatBuilder(ResponseBuilder):
    """Builder for /v1/chat/completions."""

    kind = "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._streams: dict[int, ChoiceStream] = {}  # with tools or reasoning: by choice

    def whole(self, outputs: Sequence[RequestOutput]) -> schema.ChatCompletionResponse:
        """Return the body of a request without streaming."""
        output = outputs[0]
        fields = self.prompt_fields(self.parsed.prompts[0], logprob_rows(output.prompt_logprobs))
        return schema.ChatCompletionResponse(
            **self.head,
            choices=[self._choice(each) for each in output.outputs],
            usage=self.usage(outputs),
            metrics=self.metrics(outputs),
            **fields,
        )

    def _choice(self, output: CompletionOutput) -> schema.ChatChoice:
        logprobs = None
        if output.logprobs is not None:
            rows = logprob_rows(output.logprobs)
            logprobs = schema.ChatLogprobs(content=[self.logprobs.chat(row) for row in rows])
        parsing, fields = self.parsed.parsing, self._choice_fields(output)
        message = schema.ChatMessage(content=output.text) if parsing is None else parsing.message(output.text)
        if message.tool_calls and output.finish_reason == "stop":
            fields["finish_reason"] = "tool_calls"
        return schema.ChatChoice(index=output.index, message=message, logprobs=logprobs, **fields)

    def first_chunk(self, index: int, prompt: ParsedPrompt, rows: PromptRows) -> ChatChunkChoice | None:
        """Return the chunk with the role, before the first token."""
        return ChatChunkChoice(index=index, delta=schema.Delta(role="assistant", content=""))

    def chunk(self, index: int, text: str, events: Events, shift: int) -> ChatChunkChoice:
        """Return the chunk of some tokens."""
        made = ChatChunkChoice(index=index, delta=self._delta(index, text, events))
        if self.parsed.params.needs_logprobs and events[0].logprob_row is not None:
            chat = self.logprobs.chat
            rows = [event.logprob_row for event in events if event.logprob_row is not None]
            made.logprobs = schema.ChatLogprobs(content=[chat(row) for row in rows])
        return made

    def _delta(self, index: int, text: str, events: Events) -> schema.Delta:
        parsing = self.parsed.parsing
        if parsing is None:
            return schema.Delta(content=text)
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = parsing.stream()
        return stream.delta(text, events[-1].finish_reason is not None)

    def finish_reason(self, index: int, reason: str | None) -> Any:
        """Return the finish reason of a streamed choice: "tool_calls" if it stopped after calls."""
        stream = self._streams.get(index)
        if reason == "stop" and stream is not None and stream.has_calls:
            return "tool_calls"
        return checked_reason(reason)


def _cut_row(row: LogprobRow, width: int) -> LogprobRow:
    entries = zip(row.token_ids, row.logprobs, row.ranks, strict=True)
    own, *others = entries
    kept = [own, *(entry for entry in others if entry[2] <= width)]
    return LogprobRow([e[0] for e in kept], [e[1] for e in kept], [e[2] for e in kept])


def joined(left: CompletionLogprobs | None, right: CompletionLogprobs) -> CompletionLogprobs:
    """Return the logprobs of the echoed prompt followed by those of the output."""
    if left is None:
        return right
    names = CompletionLogprobs.__struct_fields__
    return CompletionLogprobs(**{name: getattr(left, name) + getattr(right, name) for name in names})


def checked_reason(reason: str | None) -> Any:
    """Return a finish reason; outputs that failed or were aborted never get here."""
    assert reason in ("stop", "length", None), reason
    return reason


def speculation(stats: SpecStats, max_drafts: int) -> schema.SpeculativeDecoding:
    """Return the speculation statistics under vLLM's names."""
    accepted_at = [*stats.accepted_per_position, *[0] * max_drafts][:max_drafts]
    steps, accepted = stats.num_drafts, stats.num_accepted_tokens
    histogram = zip([steps, *accepted_at], [*accepted_at, 0], strict=True)
    return schema.SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / steps if steps else None,
        draft_acceptance_rate=stats.acceptance_rate if stats.num_draft_tokens else None,
        acceptance_histogram=[reached - further for reached, further in histogram],
        num_spec_steps=steps,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=stats.num_draft_tokens,
        num_spec_tokens=max_drafts,
    )


def generation_error(reason: str | None, error: str | None, worker_lost: bool) -> ApiError:
    """Return the HTTP error of a request that failed or was aborted."""
    if reason == "abort":
        return ApiError(503, "the request was aborted: the server is shutting down", code="aborted")
    text = error or "the output could not be finished"
    if worker_lost:
        return ApiError(503, text if "try again" in text else f"{text}; try again", code="engine_down")
    is_clients = NO_TOKEN_LEFT in text or GRAMMAR_TOO_SLOW in text
    return ApiError(400 if is_clients else 500, text, code="generation_failed")
