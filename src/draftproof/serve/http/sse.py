"""Encoder of server-sent events: the tokens of a stream as bytes for the socket.

One event per token, or per step. Events of tokens that arrive together are sent in one write.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from draftproof.outputs import LogprobRow, RequestOutput, TokenEvent
from draftproof.serve.api.generation.response_builder import ChatBuilder, CompletionBuilder
from draftproof.serve.api.generation.response_schema import Usage
from draftproof.serve.http.errors import ApiError, ErrorResponse

DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


class GenerationFailed(Exception):
    """An output that failed or was aborted."""

    def __init__(self, event: TokenEvent) -> None:
        super().__init__(event.error)
        self.reason, self.error = event.finish_reason, event.error


class SseEncoder:
    """Encoder of the events of one HTTP request. `p` is the index of a prompt."""

    def __init__(self, builder: CompletionBuilder | ChatBuilder) -> None:
        self._builder, self._parsed = builder, builder.parsed
        head = msgspec.json.encode({**builder.head, "object": builder.kind})[:-1]
        self._head = b"data: " + head + b',"choices":['
        has_usage = self._parsed.final_usage or self._parsed.chunk_usage
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self._prompt_lengths = [len(prompt.ids) for prompt in self._parsed.prompts]
        self._num_tokens = [0] * (len(self._prompt_lengths) * builder.n)  # of each choice
        self._shift = [0] * len(self._prompt_lengths)  # echoed characters
        self._step_events: list[list[TokenEvent]] = [[] for _ in self._num_tokens]  # of an incomplete step

    def open(self, out: bytearray, p: int, rows: Sequence[LogprobRow | None]) -> None:
        """Write what comes before the first token: role, echo, options of the prompt."""
        builder, prompt = self._builder, self._parsed.prompts[p]
        tail = self._tail
        if self._parsed.is_chat:
            extras = _ENCODER.encode(builder.prompt_fields(prompt, rows))
            tail = b"]" + (b"," + extras[1:-1] if len(extras) > 2 else b"") + self._tail[1:]
        for index in range(p * builder.n, (p + 1) * builder.n):
            choice = builder.first_chunk(index, prompt, rows)
            if choice is not None:
                self._write(out, choice, tail)
                tail = self._tail
        if self._parsed.echo:
            assert isinstance(builder, CompletionBuilder)
            self._shift[p] = len(builder.echo(prompt, rows)[0])

    def add(self, out: bytearray, p: int, events: Sequence[TokenEvent]) -> None:
        """Write tokens of prompt `p`. GenerationFailed after the tokens before a failure."""
        n, parsed = self._builder.n, self._parsed
        per_step, prompt_only = parsed.chunk_per_step, parsed.prompt_only
        for event in events:
            index = p * n + event.index
            if event.finish_reason in ("error", "abort"):
                raise GenerationFailed(event)
            if prompt_only:
                self._write_prompt_only(out, index, event)
            elif not per_step:
                self._write_chunk(out, p, index, event.text, [event])
            else:
                step = self._step_events[index]
                step.append(event)
                if event.step_end:
                    self._write_chunk(out, p, index, "".join(e.text for e in step), step)
                    self._step_events[index] = []

    def _write_chunk(self, out: bytearray, p: int, index: int, text: str, events: list[TokenEvent]) -> None:
        parsed, last = self._parsed, events[-1]
        self._num_tokens[index] += len(events)
        choice = self._builder.chunk(index, text, events, self._shift[p])
        if last.finish_reason is not None:
            choice.finish_reason = self._builder.finish_reason(index, last.finish_reason)
            choice.stop_reason = last.stop_reason
            choice.seed = self._builder.seed_of(index)
        if parsed.token_ids:
            choice.token_ids = [event.token_id for event in events]  # type: ignore[misc]
        if parsed.provenance:
            choice.provenance = [event.provenance for event in events]
            choice.step_end = last.step_end
            if last.step_end:
                choice.num_draft = last.num_draft
        if last.drafts is not None:
            choice.drafts = self._builder.logprobs.drafts(last.drafts)
        self._write(out, choice, self._usage_tail() if parsed.chunk_usage else self._tail)

    def _write_prompt_only(self, out: bytearray, index: int, event: TokenEvent) -> None:
        """Write the end of a request with max_tokens 0."""
        choice = self._builder.chunk(index, "", [event], 0)
        choice.logprobs = None
        choice.finish_reason, choice.seed = "length", self._builder.seed_of(index)
        if self._parsed.token_ids:
            choice.token_ids = []
        self._write(out, choice, self._tail)

    def _write(self, out: bytearray, choice: msgspec.Struct, tail: bytes) -> None:
        out += self._head
        _ENCODER.encode_into(choice, out, -1)
        out += tail

    def _usage_tail(self) -> bytes:
        num_prompt, num_generated = sum(self._prompt_lengths), sum(self._num_tokens)
        total = num_prompt + num_generated
        usage = Usage(prompt_tokens=num_prompt, completion_tokens=num_generated, total_tokens=total)
        return b'],"usage":' + _ENCODER.encode(usage) + b"}\n\n"

    def close(self, out: bytearray, outputs: Sequence[RequestOutput]) -> None:
        """Write what comes after the last token: usage and metrics if requested, and the end mark."""
        if self._parsed.final_usage:
            out += self._head + b'],"usage":' + _ENCODER.encode(self._builder.usage(outputs))
            out += b',"metrics":' + _ENCODER.encode(self._builder.metrics(outputs)) + b"}\n\n"
        out += DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error after the status line was sent."""
        return b"data: " + msgspec.json.encode(ErrorResponse(error.detail)) + b"\n\n" + DONE
