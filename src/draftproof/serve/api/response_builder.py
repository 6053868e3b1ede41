"""The two shapes of an answer, OpenAI's text completion and chat completion, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET

from draftproof.errors import NO_TOKEN_LEFT
from draftproof.metrics import SpecStats
from draftproof.outputs import CompletionOutput, RequestOutput, TokenEvent
from draftproof.sampling_params import MAX_SEED
from draftproof.serve.api.logprob_format import Row, Teller, TokenNames
from draftproof.serve.api.request_parser import PromptIn, Wish
from draftproof.serve.api.response_schema import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    CompletionDetails,
    Delta,
    PromptDetails,
    PromptExtras,
    RequestMetrics,
    SpeculativeDecoding,
    TextChoice,
    TextLogprobs,
    TextReply,
    Usage,
)
from draftproof.serve.http.errors import Problem


class Form:
    """What both have in common; one for each HTTP request."""

    kind = ""

    def __init__(self, wish: Wish, names: TokenNames, head: dict[str, Any], most_drafts: int) -> None:
        self.wish, self.head, self.names = wish, head, names
        params = wish.params
        self.n = params.n
        self._most_drafts = most_drafts
        self._prompt_width = params.prompt_logprobs
        self.teller = Teller(names, params.logprobs or 0, params.logprob_token_ids)
        assert params.seed is not None
        self._seed = params.seed

    @property
    def num_entries(self) -> int:
        return self.wish.num_entries

    def seed_of(self, index: int) -> int:
        """Of one of all the answers: each prompt has the seeds seed, seed + 1, …"""
        return (self._seed + index % self.n) % (MAX_SEED + 1)

    # --- what follows the answers -------------------------------------------------------------------

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        made = 0 if self.wish.silent else sum(len(o.token_ids) for output in outputs for o in output.outputs)
        details: Any = UNSET
        if self.wish.params.prediction is not None:
            accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
            drafted = sum(output.metrics.num_draft_tokens for output in outputs)
            details = CompletionDetails(
                accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
            )
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=made,
            total_tokens=prompt + made,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(o.num_cached_tokens for o in outputs)),
            completion_tokens_details=details,
        )

    def metrics(self, outputs: Sequence[RequestOutput]) -> RequestMetrics:
        total = SpecStats()
        for output in outputs:
            total.add(output.metrics)
        return RequestMetrics(
            speculative_decoding=speculation(total, self._most_drafts) if self._most_drafts else None,
            strategy=outputs[0].strategy,
            lossless=all(output.lossless for output in outputs),
            queue_seconds=outputs[0].queue_seconds,
            first_token_seconds=outputs[0].first_token_seconds,
        )

    # --- of the prompt ------------------------------------------------------------------------------

    def prompt_extras(self, prompt: PromptIn, rows: Sequence[Row | None]) -> PromptExtras:
        asked = self.wish.prompt_logprobs
        return PromptExtras(
            prompt_token_ids=prompt.ids if self.wish.token_ids else UNSET,
            prompt_logprobs=UNSET
            if asked is None
            else self.teller.prompt(self._cut(prompt.ids, rows, asked)),
        )

    def _cut(self, ids: Sequence[int], rows: Iterable[Row | None], width: int) -> list[Row | None]:
        """Each row as if `width` had been asked for: what is best comes first, so it is a prefix."""
        if width == self._prompt_width:
            return list(rows)
        pairs = zip(ids, rows, strict=True)
        return [row and {i: v for i, v in row.items() if i == own or v.rank <= width} for own, row in pairs]


class TextForm(Form):
    kind = "text_completion"

    def echo(self, prompt: PromptIn, rows: Sequence[Row | None]) -> tuple[str, TextLogprobs | None]:
        if not self.wish.echo:
            return "", None
        text = prompt.text
        if text is None:
            text = self.names.tokenizer.decode(prompt.ids, self.wish.params.skip_special_tokens)
        width = self.wish.echo_logprobs
        if width is None:
            return text, None
        return text, self.teller.text_prompt(prompt.ids, self._cut(prompt.ids, rows, width), text)

    def whole(self, outputs: Sequence[RequestOutput]) -> TextReply:
        choices = []
        for p, (prompt, output) in enumerate(zip(self.wish.prompts, outputs, strict=True)):
            rows = output.prompt_logprobs or []
            echo, extras = self.echo(prompt, rows), self.prompt_extras(prompt, rows)
            choices += [self._choice(p, answer, *echo, extras) for answer in output.outputs]
        return TextReply(
            **self.head, choices=choices, usage=self.usage(outputs), metrics=self.metrics(outputs)
        )

    def _choice(
        self, p: int, answer: CompletionOutput, echo: str, echoed: TextLogprobs | None, extras: PromptExtras
    ) -> TextChoice:
        index = p * self.n + answer.index
        if self.wish.silent:
            answer = CompletionOutput(
                answer.index, answer.seed, finish_reason="length", logprobs=answer.logprobs and []
            )
        logprobs = echoed
        if answer.logprobs is not None:
            offsets = [len(echo) + begin for begin in answer.text_offsets]
            logprobs = joined(echoed, self.teller.text(answer.token_ids, answer.logprobs, offsets))
        return TextChoice(
            index=index,
            text=echo + answer.text,
            logprobs=logprobs,
            finish_reason=finish(answer.finish_reason),
            stop_reason=answer.stop_reason,
            seed=self.seed_of(index),
            token_ids=answer.token_ids if self.wish.token_ids else UNSET,
            provenance=answer.provenance if self.wish.provenance else UNSET,
            drafts=UNSET if answer.drafts is None else self.teller.drafts(answer.drafts),
            prompt_token_ids=extras.prompt_token_ids,
            prompt_logprobs=extras.prompt_logprobs,
        )

    def opening(self, index: int, prompt: PromptIn, rows: Sequence[Row | None]) -> TextChoice | None:
        """What comes before the first token of an answer."""
        extras = self.prompt_extras(prompt, rows)
        if not self.wish.echo and extras.prompt_token_ids is UNSET and extras.prompt_logprobs is UNSET:
            return None
        text, logprobs = self.echo(prompt, rows)
        return TextChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            prompt_token_ids=extras.prompt_token_ids,
            prompt_logprobs=extras.prompt_logprobs,
        )

    def piece(self, index: int, text: str, events: Sequence[TokenEvent], shift: int) -> TextChoice:
        """Some tokens of an answer; `shift` characters were echoed before it."""
        made = TextChoice(index=index, text=text)
        if self.wish.tells_logprobs and events[0].logprobs is not None:
            made.logprobs = self.teller.text(
                [event.token_id for event in events],  # type: ignore[misc]
                [event.logprobs for event in events],  # type: ignore[misc]
                [shift + event.text_offset for event in events],
            )
        return made


class ChatForm(Form):
    kind = "chat.completion.chunk"

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatReply:
        output = outputs[0]
        extras = self.prompt_extras(self.wish.prompts[0], output.prompt_logprobs or [])
        return ChatReply(
            **self.head,
            choices=[self._choice(answer) for answer in output.outputs],
            usage=self.usage(outputs),
            metrics=self.metrics(outputs),
            prompt_token_ids=extras.prompt_token_ids,
            prompt_logprobs=extras.prompt_logprobs,
        )

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        logprobs = None
        if answer.logprobs is not None:
            rows = zip(answer.token_ids, answer.logprobs, strict=True)
            logprobs = ChatLogprobs(content=[self.teller.chat_row(*row) for row in rows])
        return ChatChoice(
            index=answer.index,
            message=ChatMessage(content=answer.text),
            logprobs=logprobs,
            finish_reason=finish(answer.finish_reason),
            stop_reason=answer.stop_reason,
            seed=self.seed_of(answer.index),
            token_ids=answer.token_ids if self.wish.token_ids else UNSET,
            provenance=answer.provenance if self.wish.provenance else UNSET,
            drafts=UNSET if answer.drafts is None else self.teller.drafts(answer.drafts),
        )

    def opening(self, index: int, prompt: PromptIn, rows: Sequence[Row | None]) -> ChatChunkChoice | None:
        return ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))

    def piece(self, index: int, text: str, events: Sequence[TokenEvent], shift: int) -> ChatChunkChoice:
        made = ChatChunkChoice(index=index, delta=Delta(content=text))
        if self.wish.tells_logprobs and events[0].logprobs is not None:
            row = self.teller.chat_row
            made.logprobs = ChatLogprobs(content=[row(e.token_id, e.logprobs) for e in events])  # type: ignore[arg-type]
        return made


def joined(left: TextLogprobs | None, right: TextLogprobs) -> TextLogprobs:
    if left is None:
        return right
    return TextLogprobs(
        tokens=left.tokens + right.tokens,
        token_logprobs=left.token_logprobs + right.token_logprobs,
        top_logprobs=left.top_logprobs + right.top_logprobs,
        text_offset=left.text_offset + right.text_offset,
    )


def finish(reason: str | None) -> Any:
    """Answers that did not come to an end of their own never get here."""
    assert reason in ("stop", "length", None), reason
    return reason


def speculation(stats: SpecStats, most: int) -> SpeculativeDecoding:
    stood = [*stats.accepted_per_position, *[0] * most][:most]
    steps, accepted = stats.num_drafts, stats.num_accepted_tokens
    return SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / steps if steps else None,
        draft_acceptance_rate=stats.acceptance_rate if stats.num_draft_tokens else None,
        acceptance_histogram=[a - b for a, b in zip([steps, *stood], [*stood, 0], strict=True)],
        num_spec_steps=steps,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=stats.num_draft_tokens,
        num_spec_tokens=most,
    )


def failure(reason: str | None, error: str | None, worker_lost: bool) -> Problem:
    """Why an answer was ended from outside."""
    if reason == "abort":
        return Problem(503, "the request was ended by the server, which is shutting down", code="aborted")
    text = error or "the answer could not be finished"
    if worker_lost:
        return Problem(503, f"{text}; try again", code="engine_down")
    return Problem(400 if NO_TOKEN_LEFT in text else 500, text, code="generation_failed")
