"""AsyncLLM: one engine for many callers, from any event loop and any thread, in the habits of vLLM's users.

    async with AsyncLLM("smollm2-135m") as llm:
        async for event in llm.stream("Once upon a time", SamplingParams(max_tokens=32)):
            ...

What is promised:

* Answers are those of `LLM`, bit for bit, whoever else is served and whatever happens to them.
* A reader that is slow slows itself alone. The engine never waits for one: the request runs to its end at
  full speed, gives its slot and pages back, and what was not read yet is kept: at most `max_tokens` of it, in
  hardly more memory than the answer takes anyway.
* A reader that leaves (break, cancellation, `aclose`, its loop closed) aborts its request: nothing is
  delivered any more, and its slot and pages are free before the next step.
* What was delivered stands: a step's results go out when all of it has been read and settled. If the engine
  breaks, what has not ended ends with finish_reason "error" and why; later calls raise EngineDeadError.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

from draftproof.config import DEFAULT_MODEL, EngineConfig
from draftproof.engine.validation import Limits
from draftproof.errors import ConfigError, RequestError
from draftproof.frontend.engine_thread import Driver
from draftproof.frontend.input_processor import Front, Messages, params_for
from draftproof.frontend.request_tracker import Job
from draftproof.frontend.stream_queue import Box
from draftproof.metrics import EngineStats, SpecStats, StepTotals, WorkerStatus
from draftproof.sampling_params import SamplingParams
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.prompts import Prompt
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Logprob, RequestOutput, TokenEvent

LONG_TEXT = 4096  # characters of a prompt that an event loop should not tokenise itself
STOP_SECONDS = 30.0  # that the end of a program waits for a step under way


class AsyncLLM:
    """A model, ready to serve. Options are those of `LLM`."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        from draftproof.llm import LLM  # here: a process that has its engine elsewhere needs no torch

        self._own(LLM(model, **options))
        self._made_it = True

    @classmethod
    def from_llm(cls, llm: Front) -> AsyncLLM:
        """On the engine of an LLM, which can be used itself again after `shutdown`."""
        made = cls.__new__(cls)
        made._own(llm)
        return made

    def _own(self, llm: Front) -> None:
        if llm.jobs.driver is not None or llm.jobs.owners:
            raise ConfigError("this LLM is in use: shut its AsyncLLM down, or read its streams to their ends")
        self._made_it = False
        self._llm = llm
        self._driver = Driver(llm.jobs, type(self).__name__)
        # when nobody has it any more, or at the end of the program; the thread does not hold it
        self._stop: weakref.finalize[..., Any] = weakref.finalize(self, self._driver.stop, STOP_SECONDS)

    # --- requests -----------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Stream:
        """Token by token, as they are committed. The request is made when the first is asked for."""
        return Stream(self, prompt, sampling_params, request_id)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> RequestOutput:
        """The whole answer (n of them). Cancelling this aborts the request."""
        name = name_of(request_id)
        _, box = await self._submit(prompt, sampling_params, name, stream=False)
        try:
            await box.wait()
        finally:
            self._driver.leave(name, box)
        assert box.output is not None
        return box.output

    async def abort(self, request_id: str) -> bool:
        """End a request; False if it is not (or no longer) here. Its reader gets what was there before."""
        return await self._driver.abort(request_id)

    async def _submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None, name: str, stream: bool
    ) -> tuple[Job, Box]:
        error = self._driver.closed()
        if error is not None:
            raise error
        params = params_for([prompt], sampling_params)[0]
        make = partial(self._llm.new_job, prompt, params, name)
        # a long text or a grammar takes a while: not on the caller's loop, and never on the engine's thread
        long = any(isinstance(text, str) and len(text) > LONG_TEXT for text in (prompt, params.prediction))
        job = await asyncio.to_thread(make) if long or params.structure is not None else make()
        return job, self._driver.submit(job, stream)

    # --- ends ---------------------------------------------------------------------------------------

    async def drain(self, timeout: float | None = None) -> int:
        """Refuse new requests and finish those that are here; after `timeout` seconds abort the rest.

        How many had to be aborted.
        """
        try:
            await asyncio.wait_for(self._driver.drain(), timeout)
        except TimeoutError:
            return await self._driver.abort_all()
        return 0

    async def shutdown(self) -> None:
        """Abort everything and stop; once more does nothing."""
        await self._driver.stopped()
        self._stop.detach()
        if self._made_it:
            self._llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    # --- facts --------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Has the engine broken? Then `dead_error` says by what."""
        return self._driver.cause is not None

    @property
    def dead_error(self) -> BaseException | None:
        return self._driver.cause

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._driver.num_open

    @property
    def config(self) -> EngineConfig:
        return self._llm.config

    @property
    def stats(self) -> SpecStats:
        return self._llm.stats

    @property
    def limits(self) -> Limits:
        """What this engine can serve."""
        return self._llm.engine.limits

    def engine_stats(self) -> EngineStats:
        """How the engine stands: who runs and waits, pages, cache hits."""
        return self._llm.engine_stats()

    def worker_status(self) -> WorkerStatus | None:
        """Return the state of the engine's process; None if the engine is in this process."""
        return None

    def step_totals(self) -> StepTotals | None:
        """Return number and duration of the steps of the engine's process; None if it is this one."""
        return None

    def describe(self) -> str:
        return self._llm.engine.describe()

    def get_tokenizer(self) -> Tokenizer:
        return self._llm.get_tokenizer()

    def chat_token_ids(self, messages: Messages, **template: Any) -> list[int]:
        """A conversation as a prompt."""
        return self._llm.chat_token_ids(messages, **template)


class Stream:
    """The events of one request, to be read in one event loop by one task at a time.

    When it is over, `output` is the whole of it.
    """

    def __init__(
        self, llm: AsyncLLM, prompt: Prompt, params: SamplingParams | None, request_id: str | None
    ) -> None:
        self.request_id = name_of(request_id)
        self._llm = llm  # which must not be collected before this
        self._asked = prompt, params
        self._job: Job | None = None
        self._box: Box | None = None
        self._ready: deque[TokenEvent] = deque()
        self._closed = False

    @property
    def output(self) -> RequestOutput | None:
        return None if self._box is None else self._box.output

    @property
    def prompt_logprobs(self) -> Sequence[dict[int, Logprob] | None]:
        """Of the prompt, as far as they are here: all of them when the first answer's first token is."""
        if self._job is None:
            return []
        return LogprobMaps([None, *self._job.prompt_rows], self._job.tokenizer)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._ready and not await self._more():
            raise StopAsyncIteration
        return self._ready.popleft()

    async def read(self) -> list[TokenEvent]:
        """All events that are here, at least one; none when it is over."""
        if not self._ready:
            await self._more()
        while not self._closed and self._box is not None and self._box.parts:
            self._ready.extend(self._box.parts.popleft())
        events = list(self._ready)
        self._ready.clear()
        return events

    async def _more(self) -> bool:
        """Wait for a step's events."""
        if self._closed:
            return False
        try:
            if self._box is None:
                self._job, self._box = await self._llm._submit(*self._asked, self.request_id, stream=True)
            await self._box.wait()
        except BaseException:  # cancelled: the reader is gone; refused: there is nothing to leave
            self._leave()
            raise
        if self._box.parts:
            self._ready.extend(self._box.parts.popleft())
        return bool(self._ready)

    async def aclose(self) -> None:
        """Leave; the request is aborted if it has not ended."""
        self._leave()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._ready.clear()
        if self._box is not None:
            self._llm._driver.leave(self.request_id, self._box)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):  # it may never have come to be
            self._leave()


def name_of(request_id: str | None) -> str:
    if request_id is None:
        return uuid.uuid4().hex
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"request_id must be a text, got {request_id!r}", "request_id")
    return request_id
