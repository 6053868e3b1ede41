"""AsyncLLM: one engine for many callers, from any event loop and any thread. The interface follows vLLM's.

    async with AsyncLLM("smollm2-135m") as llm:
        async for event in llm.stream("Once upon a time", SamplingParams(max_tokens=32)):
            ...

* Outputs equal those of `LLM` bit for bit, whatever other requests run and however they end.
* The engine never waits for a reader: a request runs to its end at full speed and frees its slot and pages.
  Unread events are kept, at most `max_tokens` of them, in little more memory than the output takes anyway.
* A reader that leaves (break, cancellation, `aclose`, its loop closed) aborts its request: no further event
  is delivered, and its slot and pages are free before the next step.
* Delivered events are final. If the engine breaks, unfinished requests end with finish_reason "error" and the
  cause; later calls raise EngineDeadError.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from draftproof.config import DEFAULT_MODEL, EngineConfig
from draftproof.engine.live.operations import Operation, OperationName, check_mode
from draftproof.engine.validation import Limits
from draftproof.errors import ConfigError, RequestError
from draftproof.frontend.continuation_scores import score_output
from draftproof.frontend.engine_thread import EngineThread
from draftproof.frontend.input_processor import InputProcessor, Messages, params_for
from draftproof.frontend.pooler import PoolingParams, pooling_params_for
from draftproof.frontend.request_tracker import Job
from draftproof.frontend.stream_queue import StreamQueue
from draftproof.metrics import EngineStats, SpecStats, StepTotals, WorkerStatus
from draftproof.outputs import EmbeddingRequestOutput, Logprob, RequestOutput, ScoreOutput, TokenEvent
from draftproof.sampling_params import SamplingParams
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.prompts import Prompt
from draftproof.text.tokenizer import Tokenizer

MAX_INLINE_CHARS = 4096  # longer prompts are tokenized in a thread, not on the event loop
STOP_SECONDS = 30.0  # time that the end of a program waits for a step in flight


class AsyncLLM:
    """Model that is loaded and ready to serve. Options are those of `LLM`."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        from draftproof.llm import LLM  # not at the top: a process with a remote engine needs no torch

        self._attach(LLM(model, **options))
        self._owns_llm = True

    @classmethod
    def from_llm(cls, llm: InputProcessor) -> AsyncLLM:
        """Create one on the engine of an LLM, which can be used itself again after `shutdown`."""
        made = cls.__new__(cls)
        made._attach(llm)
        return made

    def _attach(self, llm: InputProcessor) -> None:
        if llm.tracker.is_in_use:
            raise ConfigError("this LLM is in use: shut its AsyncLLM down, or read its streams to their ends")
        self._owns_llm = False
        self._llm = llm
        self._thread = EngineThread(llm.tracker, type(self).__name__)
        # runs when this object is collected or the program ends; the thread holds no reference to it
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(self, self._thread.stop, STOP_SECONDS)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Stream:
        """Return a stream of tokens as they are committed. The request starts with the first read."""
        return Stream(self, prompt, sampling_params, request_id)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """Return the complete output of a prompt. Cancelling this aborts the request."""
        job_id = new_request_id(request_id)
        _, queue = await self._submit(prompt, sampling_params, job_id, stream=False)
        return await self._finish(job_id, queue)

    async def embed(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, *, request_id: str | None = None
    ) -> EmbeddingRequestOutput:
        """Return the embedding of a prompt. Cancelling this aborts the request."""
        params, job_id = pooling_params_for([prompt], pooling_params)[0], new_request_id(request_id)
        self._check_open()
        make = partial(self._llm.new_embedding_job, prompt, params, job_id)
        job = await asyncio.to_thread(make) if _is_long(prompt) else make()
        queue = self._thread.submit(job, stream=False)
        return self._llm.pooler.output(await self._finish(job_id, queue), params)

    async def score(
        self, context: Prompt, continuation: Prompt | None = None, *, request_id: str | None = None
    ) -> ScoreOutput:
        """Return the log-likelihood of a continuation after its context, or of a whole sequence."""
        after = None if continuation is None else [continuation]
        (pair,) = await asyncio.to_thread(self._llm.score_pairs, [context], after)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        result = await self.generate({"prompt_token_ids": pair[0] + pair[1]}, params, request_id=request_id)
        return score_output(len(pair[0]), result)

    async def update_weights(
        self,
        weights: Any = (),
        *,
        draft_weights: Any = (),
        version: int | None = None,
        mode: str = "keep",
    ) -> int:
        """Replace weights while requests run, and return their version; see `LLM.update_weights`."""
        arguments = {"weights": weights, "draft_weights": draft_weights, "version": version}
        return int(await self._operate("update_weights", arguments, mode))

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Release the memory of weights and KV until `wake_up`; requests in flight continue after it."""
        await self._operate("sleep", {"level": level}, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `sleep` released; `tags`: "weights" or "kv_cache" alone."""
        await self._operate("wake_up", {"tags": tags})

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self._llm.engine.sleep_level > 0

    @property
    def weights_version(self) -> int:
        """Version of the weights: 0 as loaded, larger with every update."""
        return self._llm.engine.weights_version

    async def _operate(self, name: OperationName, arguments: Mapping[str, Any], mode: str = "keep") -> Any:
        """Run an operation between two steps of the engine."""
        self._check_open()
        engine: Any = self._llm.engine
        checked, run = check_mode(mode), await asyncio.to_thread(engine.prepare, name, arguments)
        return await self._thread.operate(lambda reply: engine.operate(Operation(run, checked, reply)))

    async def _finish(self, job_id: str, queue: StreamQueue) -> RequestOutput:
        """Wait for the end of a job that is not streamed."""
        try:
            await queue.wait()
        finally:
            self._thread.abort_unread(job_id, queue)
        assert queue.output is not None
        return queue.output

    async def abort(self, request_id: str) -> bool:
        """End a request; False if it is not open. Its reader gets the events from before the call."""
        return await self._thread.abort(request_id)

    async def _submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None, job_id: str, stream: bool
    ) -> tuple[Job, StreamQueue]:
        self._check_open()
        params = params_for([prompt], sampling_params, self._llm.default_params)[0]
        make = partial(self._llm.new_job, prompt, params, job_id)
        # a long text or a grammar takes time: keep it off the caller's loop and the engine thread
        is_slow = _is_long(prompt) or _is_long(params.prediction) or params.structure is not None
        job = await asyncio.to_thread(make) if is_slow else make()
        return job, self._thread.submit(job, stream)

    def _check_open(self) -> None:
        if (error := self._thread.closed_error()) is not None:
            raise error

    async def drain(self, timeout: float | None = None) -> int:
        """Refuse new requests and finish the open ones; return the number aborted after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._thread.drain(), timeout)
        except TimeoutError:
            return await self._thread.abort_all()
        return 0

    async def shutdown(self) -> None:
        """Abort everything and stop. A second call does nothing."""
        await self._thread.shut_down()
        self._finalizer.detach()
        if self._owns_llm:
            self._llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def dead(self) -> bool:
        """True if the engine has failed; `dead_error` is the cause."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> BaseException | None:
        """Exception that the engine failed with."""
        return self._thread.error

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return self._thread.num_open

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine."""
        return self._llm.config

    @property
    def stats(self) -> SpecStats:
        """Speculation counters of all finished outputs."""
        return self._llm.stats

    @property
    def default_options(self) -> Mapping[str, Any]:
        """Sampling options of requests that give none, from the model's generation_config.json."""
        return self._llm.default_options

    @property
    def limits(self) -> Limits:
        """Limits of the requests that the engine can serve."""
        return self._llm.engine.limits

    def engine_stats(self) -> EngineStats:
        """Return counters, gauges and timings of the engine."""
        return self._llm.engine_stats()

    def strategy_label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the strategy of such a request with its label, and whether its output is lossless."""
        return self._llm.engine.strategy_label(params)

    def worker_status(self) -> WorkerStatus | None:
        """Return the state of the engine's process; None if the engine is in this process."""
        return None

    def step_totals(self) -> StepTotals | None:
        """Return number and duration of the steps of the engine's process; None if it is this one."""
        return None

    @property
    def is_embedding_model(self) -> bool:
        """Whether the model's files or an option define the pooling of its embeddings."""
        return self._llm.pooler.is_embedding_model

    def check_embedding(self, params: PoolingParams) -> None:
        """Raise RequestError if embeddings with these options are not available."""
        self._llm.pooler.check(params)

    def describe(self) -> str:
        """Return one line about model, device and speculation."""
        return self._llm.engine.describe()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; RequestError if the model has none."""
        return self._llm.get_tokenizer()

    def chat_token_ids(self, messages: Messages, **template: Any) -> list[int]:
        """Return the prompt of a conversation."""
        return self._llm.chat_token_ids(messages, **template)


class Stream:
    """Events of one request, read in one event loop by one task at a time; `output` is set at the end."""

    def __init__(
        self, llm: AsyncLLM, prompt: Prompt, params: SamplingParams | None, request_id: str | None
    ) -> None:
        self.request_id = new_request_id(request_id)
        self._llm = llm  # keeps the engine alive while the stream exists
        self._arguments = prompt, params
        self._job: Job | None = None
        self._queue: StreamQueue | None = None
        self._ready: deque[TokenEvent] = deque()
        self._closed = False

    @property
    def output(self) -> RequestOutput | None:
        """Complete output, once the stream has ended."""
        return None if self._queue is None else self._queue.output

    @property
    def prompt_logprobs(self) -> Sequence[dict[int, Logprob] | None]:
        """Logprobs of the prompt so far; complete when the first token of the first output arrives."""
        if self._job is None:
            return []
        return LogprobMaps([None, *self._job.prompt_logprob_rows], self._job.tokenizer)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._ready and not await self._more():
            raise StopAsyncIteration
        return self._ready.popleft()

    async def read(self) -> list[TokenEvent]:
        """Return all unread events, at least one; an empty list when the stream has ended."""
        if not self._ready:
            await self._more()
        while not self._closed and self._queue is not None and self._queue.parts:
            self._ready.extend(self._queue.parts.popleft())
        events = list(self._ready)
        self._ready.clear()
        return events

    async def _more(self) -> bool:
        """Wait for the events of a step; False at the end."""
        if self._closed:
            return False
        try:
            if self._queue is None:
                submitted = self._llm._submit(*self._arguments, self.request_id, stream=True)
                self._job, self._queue = await submitted
            await self._queue.wait()
        except BaseException:  # cancelled: the reader has left; refused: nothing is open
            self._leave()
            raise
        if self._queue.parts:
            self._ready.extend(self._queue.parts.popleft())
        return bool(self._ready)

    async def aclose(self) -> None:
        """Stop reading; the request is aborted if it has not ended."""
        self._leave()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._ready.clear()
        if self._queue is not None:
            self._llm._thread.abort_unread(self.request_id, self._queue)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):  # __init__ may have failed
            self._leave()


def _is_long(prompt: Prompt | None) -> bool:
    """Return whether a text takes long to tokenize."""
    return isinstance(prompt, str) and len(prompt) > MAX_INLINE_CHARS


def new_request_id(request_id: str | None) -> str:
    """Return the caller's request id, or a new one; RequestError if it is not a text."""
    if request_id is None:
        return uuid.uuid4().hex
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"request_id must be a text, got {request_id!r}", "request_id")
    return request_id
