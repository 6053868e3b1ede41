"""Handler of /v1/embeddings, and what routes without output text share.

A client that disconnects aborts its requests. The inputs of one body enter the engine in portions, so that a
long list leaves room in the queue for others.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from draftproof.errors import RequestFailedError
from draftproof.frontend.pooler import PoolingParams
from draftproof.outputs import EmbeddingRequestOutput, RequestOutput
from draftproof.sampling_params import SamplingParams
from draftproof.serve.api.generation.handler import CompletionHandler
from draftproof.serve.api.generation.prompt_parser import ParsedPrompt, prompt_list
from draftproof.serve.api.generation.request_parser import cache_salt, check_priority
from draftproof.serve.api.generation.request_schema import EngineRequest
from draftproof.serve.api.generation.response_schema import PromptDetails
from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.api.pooling import schema
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.io import gather, in_thread_if, read_json, send_last
from draftproof.serve.http.request_guard import ClientMonitor, RequestGuard
from draftproof.serve.http.request_log import RequestRecord
from draftproof.serve.settings import Settings

MAX_IN_FLIGHT = 64  # inputs of one body that are in the engine at a time
MAX_INLINE_NUMBERS = 20_000  # more of them are encoded in a thread, not on the event loop
T = TypeVar("T")
Body = TypeVar("Body", bound=schema.PoolingRequest)
Answer = Callable[[Any, dict[str, Any], RequestRecord], Awaitable[bytes]]


class PoolingRoutes:
    """Handler of embeddings; reads bodies and runs prompts for other routes without output text."""

    def __init__(
        self,
        llm: Any,
        settings: Settings,
        guard: RequestGuard,
        metrics: ServerMetrics,
        completions: CompletionHandler,
    ) -> None:
        self.llm, self.settings, self._guard, self._metrics = llm, settings, guard, metrics
        self._completions, self.prompts = completions, completions.prompts

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return the embeddings of texts or token ids."""
        await self.serve(scope, receive, send, schema.EmbeddingRequest, "embd", self._embed)

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, kind: type[Body], prefix: str, answer: Answer
    ) -> None:
        """Read a body of this kind, and send what `answer` returns."""
        record: RequestRecord = scope["state"]["record"]
        body = await read_json(scope, receive, self.settings, kind)
        model = self._completions.check_model(body.model)
        if body.request_id is not None:
            record.id = body.request_id
        with self._guard.admit(record) as admission, self._metrics.count_open():
            async with ClientMonitor(receive, self._guard, admission) as client:
                check_priority(body, self.settings, record.key)
                if body.user is not None:
                    record.fields["user"] = body.user
                head = {"id": f"{prefix}-{record.id}", "created": int(time.time()), "model": model}
                try:
                    data = await answer(body, head, record)
                except RequestFailedError as error:
                    raise self._completions.generation_error(error.reason, error.error) from error
                await send_last(send, data, client)
        self._metrics.whole_request.observe(time.perf_counter() - record.started)

    async def _embed(
        self, body: schema.EmbeddingRequest, head: dict[str, Any], record: RequestRecord
    ) -> bytes:
        params = PoolingParams(
            dimensions=body.dimensions,
            normalize=body.normalize,
            priority=body.priority or 0,
            cache_salt=self.salt(body, record),
        )
        self.llm.check_embedding(params)
        prompts = await self.inputs(body.input, body.add_special_tokens, "input", body.truncate_prompt_tokens)
        outputs: list[EmbeddingRequestOutput] = await self.run(self.llm.embed, prompts, params, record)

        def encode() -> bytes:
            data = [
                schema.Embedding(index=i, embedding=_encoded(output, body.encoding_format == "base64"))
                for i, output in enumerate(outputs)
            ]
            usage = prompt_usage(prompts, outputs)
            return msgspec.json.encode(schema.EmbeddingResponse(**head, data=data, usage=usage))

        count = sum(output.outputs.hidden_size for output in outputs)
        return await in_thread_if(count > MAX_INLINE_NUMBERS, encode)

    async def inputs(
        self, given: Any, add_special_tokens: bool | None, name: str, truncate: int | None = None
    ) -> list[ParsedPrompt]:
        """Return the prompts of an option; each has at least one token."""
        length = self.llm.limits.max_model_len
        limit = max(schema.MAX_INPUTS, length)
        if not isinstance(given, str) and len(given) > limit:
            raise ApiError(400, f"{name}: {len(given)} items, and the maximum is {limit}", name)
        inputs = prompt_list(given, name)
        if len(inputs) > schema.MAX_INPUTS:
            text = f"{len(inputs)} inputs, and the maximum is {schema.MAX_INPUTS}"
            raise ApiError(400, f"{name}: {text}", name)
        if truncate == 0:
            text = "truncate_prompt_tokens must be positive or -1"
            raise ApiError(400, text, "truncate_prompt_tokens")
        keep_last = min(self.settings.max_prompt_tokens or length, length - 1) if truncate == -1 else truncate
        prompts = await self.prompts.tokenized(inputs, add_special_tokens is not False, name, keep_last)
        if not all(prompt.ids for prompt in prompts):
            raise ApiError(400, f"{name}: a text or list without tokens", name)
        return prompts

    async def run(
        self,
        call: Callable[..., Awaitable[T]],
        prompts: Sequence[ParsedPrompt],
        params: PoolingParams | SamplingParams,
        record: RequestRecord,
    ) -> list[T]:
        """Return the results of `call` for all prompts, at most MAX_IN_FLIGHT at a time."""
        num_tokens = sum(len(prompt.ids) for prompt in prompts)
        record.fields.update(prompts=len(prompts), prompt_tokens=num_tokens)
        if self.settings.log_prompts:
            decode = self.prompts.tokenizer.decode
            record.fields["prompt"] = [decode(prompt.ids, False) for prompt in prompts]
        gate = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def run(p: int, prompt: ParsedPrompt) -> T:
            async with gate:
                return await call({"prompt_token_ids": prompt.ids}, params, request_id=f"{record.id}/{p}")

        outputs = await gather([run(p, prompt) for p, prompt in enumerate(prompts)])
        self._metrics.prompt_tokens += num_tokens
        return outputs

    def salt(self, body: EngineRequest, record: RequestRecord) -> str | None:
        """Return the cache salt of a body."""
        return cache_salt(body.cache_salt, None if self.settings.share_prefix_cache else record.key)


def _encoded(output: EmbeddingRequestOutput, as_base64: bool) -> list[float] | str:
    numbers = output.outputs.embedding
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode() if as_base64 else numbers


def prompt_usage(
    prompts: Sequence[ParsedPrompt], outputs: Sequence[EmbeddingRequestOutput] | Sequence[RequestOutput]
) -> schema.PromptUsage:
    """Return the token counts of prompts."""
    total = sum(len(prompt.ids) for prompt in prompts)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = PromptDetails(cached_tokens=cached)
    return schema.PromptUsage(
        prompt_tokens=total,
        total_tokens=total,
        prompt_tokens_details=details,
        weights_version=max(output.weights_version for output in outputs),
    )
