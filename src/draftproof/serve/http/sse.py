"""Server-sent events: the tokens of a stream as bytes for the socket.

One event for each token, or for each step; those that are here at the same time go out in one write.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from draftproof.outputs import RequestOutput, TokenEvent
from draftproof.serve.api.logprob_format import Row
from draftproof.serve.api.response_builder import ChatForm, TextForm, finish
from draftproof.serve.api.response_schema import Usage
from draftproof.serve.http.errors import ErrorReply, Problem

DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


class Unfinished(Exception):
    """An answer was ended from outside."""

    def __init__(self, event: TokenEvent) -> None:
        super().__init__(event.error)
        self.reason, self.error = event.finish_reason, event.error


class Chunks:
    """Builds the events of one HTTP request. `p` is one of its prompts."""

    def __init__(self, form: TextForm | ChatForm) -> None:
        self._form, self._wish = form, form.wish
        head = msgspec.json.encode({**form.head, "object": form.kind})[:-1]
        self._head = b"data: " + head + b',"choices":['
        usage = self._wish.usage or self._wish.usage_each
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._lengths = [len(prompt.ids) for prompt in self._wish.prompts]
        self._made = [0] * (len(self._lengths) * form.n)  # tokens of each answer
        self._shift = [0] * len(self._lengths)  # echoed characters
        self._parts: list[list[TokenEvent]] = [[] for _ in self._made]  # of a step that is not whole yet

    @property
    def num_made(self) -> int:
        return sum(self._made)

    def open(self, out: bytearray, p: int, rows: Sequence[Row | None]) -> None:
        """Before the first token: the role, the echo, what was asked of the prompt."""
        form, prompt = self._form, self._wish.prompts[p]
        tail = self._tail
        if self._wish.chat:
            extras = _ENCODER.encode(form.prompt_extras(prompt, rows))
            tail = b"]" + (b"," + extras[1:-1] if len(extras) > 2 else b"") + self._tail[1:]
        for index in range(p * form.n, (p + 1) * form.n):
            choice = form.opening(index, prompt, rows)
            if choice is not None:
                self._write(out, choice, tail)
                tail = self._tail
        if self._wish.echo:
            assert isinstance(form, TextForm)
            self._shift[p] = len(form.echo(prompt, rows)[0])

    def add(self, out: bytearray, p: int, events: Sequence[TokenEvent]) -> None:
        """Tokens of the answers to prompt `p`, as they came; Unfinished after those that still count."""
        n, whole_steps, silent = self._form.n, self._wish.whole_steps, self._wish.silent
        for event in events:
            index = p * n + event.index
            if event.finish_reason in ("error", "abort"):
                raise Unfinished(event)
            if silent:
                self._end_silently(out, index, event)
            elif not whole_steps:
                self._piece(out, p, index, event.text, [event])
            else:
                part = self._parts[index]
                part.append(event)
                if event.step_end:
                    self._piece(out, p, index, "".join(e.text for e in part), part)
                    self._parts[index] = []

    def _piece(self, out: bytearray, p: int, index: int, text: str, events: list[TokenEvent]) -> None:
        wish, last = self._wish, events[-1]
        self._made[index] += len(events)
        choice = self._form.piece(index, text, events, self._shift[p])
        if last.finish_reason is not None:
            choice.finish_reason = finish(last.finish_reason)
            choice.stop_reason = last.stop_reason
            choice.seed = self._form.seed_of(index)
        if wish.token_ids:
            choice.token_ids = [event.token_id for event in events]  # type: ignore[misc]
        if wish.provenance:
            choice.provenance = [event.provenance for event in events]
            choice.step_end = last.step_end
            if last.step_end:
                choice.num_draft = last.num_draft
        if last.drafts is not None:
            choice.drafts = self._form.teller.drafts(last.drafts)
        self._write(out, choice, self._tail if not wish.usage_each else self._usage_tail())

    def _end_silently(self, out: bytearray, index: int, event: TokenEvent) -> None:
        choice = self._form.piece(index, "", [event], 0)
        choice.logprobs = None
        choice.finish_reason, choice.seed = "length", self._form.seed_of(index)
        if self._wish.token_ids:
            choice.token_ids = []
        self._write(out, choice, self._tail)

    def _write(self, out: bytearray, choice: msgspec.Struct, tail: bytes) -> None:
        out += self._head
        _ENCODER.encode_into(choice, out, -1)
        out += tail

    def _usage_tail(self) -> bytes:
        prompt, made = sum(self._lengths), self.num_made
        usage = Usage(prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made)
        return b'],"usage":' + _ENCODER.encode(usage) + b"}\n\n"

    def close(self, out: bytearray, outputs: Sequence[RequestOutput]) -> None:
        """After the last token: usage and metrics if they were asked for, and the end."""
        if self._wish.usage:
            out += self._head + b'],"usage":' + _ENCODER.encode(self._form.usage(outputs))
            out += b',"metrics":' + _ENCODER.encode(self._form.metrics(outputs)) + b"}\n\n"
        out += DONE


def error_event(problem: Problem) -> bytes:
    """In the middle of a stream, when the status line is gone."""
    return b"data: " + msgspec.json.encode(ErrorReply(problem.detail)) + b"\n\n" + DONE
