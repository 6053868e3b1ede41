"""Handler of the routes that generate, from the body to the last byte of the response.

The status line is sent with the first token, so a request that the engine rejects gets an error status. A
later failure is sent as an event of the stream. A client that disconnects aborts its request.
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
from draftproof.sampling_params import FRESH_SEED
from draftproof.serve.api.generation.logprob_format import TokenStrings, logprob_rows
from draftproof.serve.api.generation.prompt_parser import PromptParser
from draftproof.serve.api.generation.request_parser import ParsedRequest, RequestParser
from draftproof.serve.api.generation.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    SamplingRequest,
)
from draftproof.serve.api.generation.response_builder import ResponseBuilder, generation_error
from draftproof.serve.api.generation.route_forms import EventEncoder, GenerationRoute
from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.http.errors import ApiError, to_api_error
from draftproof.serve.http.io import ResponseStream, gather, in_thread_if, read_json, send_error, send_last
from draftproof.serve.http.request_guard import ClientDisconnected, ClientMonitor, RequestGuard
from draftproof.serve.http.request_log import LOGGER, RequestRecord
from draftproof.serve.http.sse import GenerationFailed
from draftproof.serve.settings import Settings

MAX_INLINE_LOGPROBS = 20_000  # more of them are formatted in a thread, not on the event loop
MAX_DRAWN_SEED = (1 << 53) - 128  # of requests without a seed: an integer that JavaScript can represent
Batch = tuple[int, list[TokenEvent]]  # index of the prompt, its new events
Outputs = Sequence[RequestOutput]


class CompletionHandler:
    """Handler of the routes that generate."""

    def __init__(
        self, llm: Any, settings: Settings, guard: RequestGuard, metrics: ServerMetrics, models: Sequence[str]
    ) -> None:
        self._llm, self._settings, self._guard, self._metrics = llm, settings, guard, metrics
        self._models = models
        self.prompts = PromptParser(llm, settings)
        self._parser = RequestParser(llm, settings, self.prompts)
        self.token_strings = TokenStrings(self.prompts.tokenizer)
        self._id_strings = TokenStrings(self.prompts.tokenizer, as_ids=True)
        seed = llm.config.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def check_model(self, name: str | None) -> str:
        """Return the model's name; ApiError 404 if this server does not serve it."""
        if name is None or name in self._models:
            return name or self._models[0]
        known = ", ".join(self._models)
        message = f"unknown model {name[:100]!r}; this server has {known}"
        raise ApiError(404, message, "model", "model_not_found")

    async def __call__(self, scope: Scope, receive: Receive, send: Send, route: GenerationRoute) -> None:
        """Handle one request of a route, as an ASGI application."""
        record: RequestRecord = scope["state"]["record"]
        response = ResponseStream(send)
        try:
            body = await read_json(scope, receive, self._settings, route.schema)
            model = self.check_model(body.model)
            if body.request_id is not None:
                record.id = body.request_id
            with self._guard.admit(record) as admission, self._metrics.count_open():
                async with ClientMonitor(receive, self._guard, admission) as client:
                    await self._handle(route, body, model, record, client, response)
        except ClientDisconnected as error:
            self._metrics.disconnects += 1
            record.status, record.fields["ended"] = 499, f"client {error}".replace("_", " ")
        except Exception as error:
            await self._send_error(route, error, record, response)

    async def _send_error(
        self, route: GenerationRoute, error: Exception, record: RequestRecord, response: ResponseStream
    ) -> None:
        api_error = route.error(to_api_error(error))
        if api_error.status == 500:
            LOGGER.error("request failed", exc_info=error, extra={"fields": {"request_id": record.id}})
        record.status, record.fields["error"] = api_error.status, api_error.code or api_error.param
        if response.started:
            await response.finish(response.failure(api_error))
        else:
            await send_error(response.send, api_error)

    async def _handle(
        self,
        route: GenerationRoute,
        body: SamplingRequest,
        model: str,
        record: RequestRecord,
        client: ClientMonitor,
        response: ResponseStream,
    ) -> None:
        request = route.request(body, record)
        seed = request.seed
        if seed is None or seed == FRESH_SEED:
            seed = self._seeds.randrange(MAX_DRAWN_SEED)
        if isinstance(request, ChatCompletionRequest):
            parsed = await self._parser.chat(request, seed, record.key)
        else:
            assert isinstance(request, CompletionRequest)
            parsed = await self._parser.completion(request, seed, record.key)
        head = {
            "id": f"{route.id_prefix}{record.id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint(self._llm.weights_version),
        }
        if request.service_tier is not None:
            head["service_tier"] = "default"  # the only one
        strings = self._id_strings if parsed.as_ids else self.token_strings
        max_drafts = self._llm.limits.speculative_tokens
        builder = route.builder(body, record, parsed, strings, head, max_drafts)
        self._record_request(request, parsed, record)
        try:
            if parsed.stream:
                encoder = route.encoder(builder)
                outputs = await self._send_stream(builder, encoder, record, client, response)
                self._record_outputs(parsed, outputs, record)
            else:
                await self._send_whole(builder, record, client, response)
        except RequestError as error:
            if error.param == "structured_outputs":
                error.param = parsed.structure_option
            raise

    async def _send_whole(
        self, builder: ResponseBuilder, record: RequestRecord, client: ClientMonitor, response: ResponseStream
    ) -> None:
        parsed = builder.parsed
        calls = [
            self._llm.generate({"prompt_token_ids": prompt.ids}, parsed.params, request_id=f"{record.id}/{p}")
            for p, prompt in enumerate(parsed.prompts)
        ]
        outputs = [await calls[0]] if len(calls) == 1 else await gather(calls)
        for output in outputs:
            for each in output.outputs:
                if each.finish_reason in ("error", "abort"):
                    raise self.generation_error(each.finish_reason, each.error)
        version = max(output.weights_version for output in outputs)
        builder.head["system_fingerprint"] = fingerprint(version)
        is_large = builder.parsed.num_logprob_entries > MAX_INLINE_LOGPROBS
        data = await in_thread_if(is_large, lambda: msgspec.json.encode(builder.whole(outputs)))
        record.status = 200
        self._record_outputs(parsed, outputs, record)
        await send_last(response.send, data, client)

    def generation_error(self, reason: str | None, error: str | None) -> ApiError:
        """Return the HTTP error of a request that failed or was aborted."""
        worker = self._llm.worker_status()
        worker_lost = self._llm.dead or (worker is not None and worker.state != "ready")
        return generation_error(reason, error, worker_lost)

    async def _send_stream(
        self,
        builder: ResponseBuilder,
        encoder: EventEncoder,
        record: RequestRecord,
        client: ClientMonitor,
        response: ResponseStream,
    ) -> list[RequestOutput]:
        parsed, response.failure = builder.parsed, encoder.failure
        streams = [
            self._llm.stream({"prompt_token_ids": prompt.ids}, parsed.params, request_id=f"{record.id}/{p}")
            for p, prompt in enumerate(parsed.prompts)
        ]
        openings = [_StreamOpening(stream, parsed, p) for p, stream in enumerate(streams)]
        is_large = builder.parsed.num_logprob_entries > MAX_INLINE_LOGPROBS
        before = record.started
        try:
            seconds = self._settings.keep_alive_seconds
            async with response.kept_alive(seconds), aclosing(_batches(streams)) as batches:
                async for p, events in batches:
                    now = time.perf_counter()
                    self._observe_latency(now - before, len(events), before != record.started, record)
                    before = now
                    out, failure = bytearray(), None
                    if not openings[p].done:
                        opening = partial(openings[p].release, events, encoder, out)
                        events = await in_thread_if(is_large, opening)
                    try:
                        encoder.add(out, p, events)
                    except GenerationFailed as error:
                        failure = error
                    if out:
                        await client.limit_send(response.write(bytes(out)))
                    if failure is not None:
                        raise self.generation_error(failure.reason, failure.error)
        finally:
            for stream in streams:
                await stream.aclose()
        outputs: list[RequestOutput] = [stream.output for stream in streams]
        out = bytearray()
        encoder.close(out, outputs)
        if response.started:
            await client.complete_when_read(response.send)
        else:
            client.complete()
        record.status = 200
        await response.finish(bytes(out))
        return outputs

    def _observe_latency(
        self, seconds: float, num_tokens: int, has_tokens: bool, record: RequestRecord
    ) -> None:
        if has_tokens:
            self._metrics.between_tokens.observe(seconds / num_tokens, num_tokens)
        else:
            self._metrics.first_token.observe(seconds)
            record.fields["first_token"] = round(seconds, 6)

    def _record_request(self, body: GenerationRequest, parsed: ParsedRequest, record: RequestRecord) -> None:
        record.fields.update(
            stream=parsed.stream,
            prompts=len(parsed.prompts),
            n=parsed.params.n,
            prompt_tokens=sum(len(prompt.ids) for prompt in parsed.prompts),
        )
        for name in ("user", "safety_identifier"):
            if getattr(body, name) is not None:
                record.fields[name] = getattr(body, name)
        if self._settings.log_prompts:
            decode = self.prompts.tokenizer.decode
            record.fields["prompt"] = [decode(prompt.ids, False) for prompt in parsed.prompts]

    def _record_outputs(self, parsed: ParsedRequest, outputs: Outputs, record: RequestRecord) -> None:
        choices = [choice for output in outputs for choice in output.outputs]
        num_generated = 0 if parsed.prompt_only else sum(len(choice.token_ids) for choice in choices)
        self._metrics.prompt_tokens += sum(len(prompt.ids) for prompt in parsed.prompts)
        self._metrics.generated_tokens += num_generated
        self._metrics.whole_request.observe(time.perf_counter() - record.started)
        if not all(output.lossless for output in outputs):
            self._metrics.lossy_requests += 1
        for output in outputs:
            if output.queue_seconds is not None:
                self._metrics.queue.observe(output.queue_seconds)
        reasons = [choice.finish_reason for choice in choices]
        record.fields.update(completion_tokens=num_generated, finish_reasons=reasons)


def fingerprint(weights_version: int) -> str:
    """Return the identity of program and weights; of a stream, as of its beginning."""
    return f"draftproof-{__version__}" + (f"-w{weights_version}" if weights_version else "")


class _StreamOpening:
    """Buffer of a prompt's first events until its prompt logprobs have arrived."""

    def __init__(self, stream: Any, parsed: ParsedRequest, p: int) -> None:
        self._stream, self._p = stream, p
        self._num_rows = len(parsed.prompts[p].ids) if parsed.params.prompt_logprobs is not None else 0
        self._buffered: list[TokenEvent] = []
        self.done = False

    def release(self, events: list[TokenEvent], encoder: EventEncoder, out: bytearray) -> list[TokenEvent]:
        """Write the first chunks if they are complete, and return the events to encode now."""
        self._buffered += events
        if events[-1].finish_reason in ("error", "abort"):
            return events
        rows = logprob_rows(self._stream.prompt_logprobs) if self._num_rows else []
        if len(rows) < self._num_rows:
            return []
        self.done = True
        encoder.open(out, self._p, rows)
        return self._buffered


async def _batches(streams: Sequence[Any]) -> AsyncGenerator[Batch]:
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
