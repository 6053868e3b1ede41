"""One HTTP request to the engine, from its body to its last byte: /v1/completions and /v1/chat/completions.

The status line goes out with the first token, so a request that the engine refuses gets its right status. If
something breaks later, a stream is told by an event of its own. A client that leaves ends its request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from draftproof import __version__
from draftproof.errors import RequestError
from draftproof.outputs import RequestOutput, TokenEvent
from draftproof.serve.api.logprob_format import TokenNames
from draftproof.serve.api.metrics import Meters
from draftproof.serve.api.request_parser import Wish, Wishes
from draftproof.serve.api.request_schema import Asked, ChatAsked, CompletionAsked
from draftproof.serve.api.response_builder import ChatForm, TextForm, failure
from draftproof.serve.http.errors import Problem, problem_of
from draftproof.serve.http.io import Reply, apart, read_json, send_body, send_problem
from draftproof.serve.http.request_guard import Caller, ClientGone, Desk
from draftproof.serve.http.request_log import LOGGER, Ticket
from draftproof.serve.http.sse import Chunks, Unfinished, error_event
from draftproof.serve.settings import Settings

MANY = 20_000  # logprobs that an event loop should not put into words itself
SEEDS = (1 << 53) - 128  # for those who give none: what JavaScript can repeat
Batch = tuple[int, list[TokenEvent]]  # of which prompt, and what came


class Answers:
    """Serves what an engine can say."""

    def __init__(
        self, llm: Any, settings: Settings, desk: Desk, meters: Meters, names: Sequence[str]
    ) -> None:
        self._llm, self._settings, self._desk, self._meters = llm, settings, desk, meters
        self._models = names
        self.wishes = Wishes(llm, settings)
        self.token_names = TokenNames(self.wishes.tokenizer)
        self._token_ids = TokenNames(self.wishes.tokenizer, as_ids=True)
        seed = llm.config.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def check_model(self, name: str | None) -> str:
        if name is None or name in self._models:
            return name or self._models[0]
        known = ", ".join(self._models)
        raise Problem(
            404, f"the model {name[:100]!r} is not here; this server has {known}", "model", "model_not_found"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send, chat: bool) -> None:
        """As an ASGI application."""
        ticket: Ticket = scope["state"]["ticket"]
        reply = Reply(send)
        try:
            kind: type[Asked] = ChatAsked if chat else CompletionAsked
            asked = await read_json(scope, receive, self._settings, kind)
            model = self.check_model(asked.model)
            if asked.request_id is not None:
                ticket.id = asked.request_id
            with self._desk.seat(ticket):
                self._meters.open += 1
                try:
                    async with Caller(receive, self._desk) as caller:
                        await self._answer(asked, model, ticket, caller, reply)
                finally:
                    self._meters.open -= 1
        except ClientGone as left:
            self._meters.disconnects += 1
            ticket.status, ticket.facts["ended"] = 499, f"client {left}"
        except Exception as error:
            await self._refuse(error, ticket, reply)

    async def _refuse(self, error: Exception, ticket: Ticket, reply: Reply) -> None:
        problem = problem_of(error)
        if problem.status == 500:
            LOGGER.error("request failed", exc_info=error, extra={"facts": {"request_id": ticket.id}})
        ticket.status, ticket.facts["error"] = problem.status, problem.code or problem.param
        if reply.started:
            await reply.last(error_event(problem))
        else:
            await send_problem(reply.send, problem)

    async def _answer(self, asked: Asked, model: str, ticket: Ticket, caller: Caller, reply: Reply) -> None:
        seed = self._seeds.randrange(SEEDS) if asked.seed is None else asked.seed
        if isinstance(asked, ChatAsked):
            wish, kind = await self.wishes.chat(asked, seed), "chatcmpl"
        else:
            assert isinstance(asked, CompletionAsked)
            wish, kind = await self.wishes.completion(asked, seed), "cmpl"
        head = {
            "id": f"{kind}-{ticket.id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"draftproof-{__version__}",
        }
        make = ChatForm if wish.chat else TextForm
        names = self._token_ids if wish.as_ids else self.token_names
        form = make(wish, names, head, self._llm.limits.speculative_tokens)
        self._note(asked, wish, ticket)
        try:
            if wish.stream:
                outputs = await self._stream(form, ticket, caller, reply)
            else:
                outputs = await self._whole(form, ticket, caller, reply)
        except RequestError as error:
            if error.param == "structured_outputs":
                error.param = wish.structure
            raise
        self._count(wish, outputs, ticket)

    # --- whole --------------------------------------------------------------------------------------

    async def _whole(
        self, form: TextForm | ChatForm, ticket: Ticket, caller: Caller, reply: Reply
    ) -> list[RequestOutput]:
        wish = form.wish
        asks = [
            self._llm.generate({"prompt_token_ids": prompt.ids}, wish.params, request_id=f"{ticket.id}/{p}")
            for p, prompt in enumerate(wish.prompts)
        ]
        outputs = [await asks[0]] if len(asks) == 1 else await _all(asks)
        for output in outputs:
            for answer in output.outputs:
                if answer.finish_reason in ("error", "abort"):
                    raise self._problem(answer.finish_reason, answer.error)
        body = await apart(lambda: msgspec.json.encode(form.whole(outputs)), form.num_entries > MANY)
        caller.done = True
        ticket.status = 200
        await send_body(reply.send, body)
        return outputs

    def _problem(self, reason: str | None, error: str | None) -> Problem:
        """An answer was ended from outside."""
        worker = self._llm.worker_status()
        lost = self._llm.dead or (worker is not None and worker.state != "ready")
        return failure(reason, error, lost)

    # --- streams ------------------------------------------------------------------------------------

    async def _stream(
        self, form: TextForm | ChatForm, ticket: Ticket, caller: Caller, reply: Reply
    ) -> list[RequestOutput]:
        wish, chunks, meters = form.wish, Chunks(form), self._meters
        streams = [
            self._llm.stream({"prompt_token_ids": prompt.ids}, wish.params, request_id=f"{ticket.id}/{p}")
            for p, prompt in enumerate(wish.prompts)
        ]
        openings = [_Opening(stream, wish, p) for p, stream in enumerate(streams)]
        before = ticket.started
        try:
            async with aclosing(_batches(streams)) as batches:
                async for p, events in batches:
                    now = time.perf_counter()
                    if reply.started:
                        meters.between_tokens.observe((now - before) / len(events), len(events))
                    else:
                        meters.first_token.observe(now - before)
                        ticket.facts["first_token"] = round(now - before, 6)
                    before = now
                    out, unfinished = bytearray(), None
                    if not openings[p].done:
                        opening = partial(openings[p].pass_on, events, chunks, out)
                        events = await apart(opening, form.num_entries > MANY)
                    try:
                        chunks.add(out, p, events)
                    except Unfinished as ended:
                        unfinished = ended
                    if out:
                        caller.sending_since = time.monotonic()
                        await reply.more(bytes(out))
                        caller.sending_since = None
                    if unfinished is not None:
                        raise self._problem(unfinished.reason, unfinished.error)
        finally:
            for stream in streams:
                await stream.aclose()
        outputs: list[RequestOutput] = [stream.output for stream in streams]
        out = bytearray()
        chunks.close(out, outputs)
        caller.done = True
        ticket.status = 200
        await reply.last(bytes(out))
        return outputs

    # --- notes --------------------------------------------------------------------------------------

    def _note(self, asked: Asked, wish: Wish, ticket: Ticket) -> None:
        prompt = sum(len(prompt.ids) for prompt in wish.prompts)
        ticket.facts.update(
            stream=wish.stream, prompts=len(wish.prompts), n=wish.params.n, prompt_tokens=prompt
        )
        if asked.user is not None:
            ticket.facts["user"] = asked.user
        if self._settings.log_prompts:
            decode_ids = self.wishes.tokenizer.decode
            ticket.facts["prompt"] = [decode_ids(prompt.ids, False) for prompt in wish.prompts]

    def _count(self, wish: Wish, outputs: Sequence[RequestOutput], ticket: Ticket) -> None:
        answers = [answer for output in outputs for answer in output.outputs]
        made = 0 if wish.silent else sum(len(answer.token_ids) for answer in answers)
        self._meters.prompt_tokens += sum(len(prompt.ids) for prompt in wish.prompts)
        self._meters.generated_tokens += made
        self._meters.whole_request.observe(time.perf_counter() - ticket.started)
        for output in outputs:
            if output.queue_seconds is not None:
                self._meters.queue.observe(output.queue_seconds)
        ticket.facts.update(
            completion_tokens=made, finish_reasons=[answer.finish_reason for answer in answers]
        )


class _Opening:
    """Holds a prompt's first tokens until what is told before them is here."""

    def __init__(self, stream: Any, wish: Wish, p: int) -> None:
        self._stream, self._p = stream, p
        self._rows = len(wish.prompts[p].ids) if wish.params.prompt_logprobs is not None else 0
        self._held: list[TokenEvent] = []
        self.done = False

    def pass_on(self, events: list[TokenEvent], chunks: Chunks, out: bytearray) -> list[TokenEvent]:
        self._held += events
        if events[-1].finish_reason in ("error", "abort"):
            return events
        rows = self._stream.prompt_logprobs if self._rows else []
        if len(rows) < self._rows:
            return []
        self.done = True
        chunks.open(out, self._p, rows)
        return self._held


async def _all(asks: Sequence[Any]) -> list[RequestOutput]:
    """Of several prompts; if one is refused, all are."""
    tasks = [asyncio.ensure_future(ask) for ask in asks]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _batches(streams: Sequence[Any]) -> AsyncGenerator[Batch]:
    """What comes, as it comes, from whichever stream."""
    if len(streams) == 1:
        while events := await streams[0].read():
            yield 0, events
        return
    reads = {asyncio.ensure_future(stream.read()): p for p, stream in enumerate(streams)}
    try:
        while reads:
            for read in (await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED))[0]:
                p = reads.pop(read)
                if events := read.result():
                    reads[asyncio.ensure_future(streams[p].read())] = p
                    yield p, events
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
