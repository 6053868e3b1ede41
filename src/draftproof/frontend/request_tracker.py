"""Request tracker: jobs, and the mapping of step results to their outputs.

`LLM` and `AsyncLLM` share it. Only the thread that runs the engine may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.engine.step.step_results import Finish, StepResults, has_long_logprobs
from draftproof.errors import EngineClosedError, RequestError
from draftproof.frontend.engine_client import EngineClient
from draftproof.metrics import RequestStats, SpecStats
from draftproof.outputs import (
    CompletionOutput,
    FinishReason,
    LogprobRow,
    RequestOutput,
    TokenEvent,
    WeightsSpan,
)
from draftproof.text.bulk.output import BulkOutput
from draftproof.text.bulk.output_table import FinishedOutput, OutputTable
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.streaming_output import StreamingOutput
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Request

OnEvents = Callable[[Sequence[TokenEvent]], Any]
FINISHED_BY_STOP_STRING = Finish("stop")  # the output has the string; the engine does not search for any


@dataclass(slots=True)
class Job:
    """One prompt, its n requests and their outputs."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[Request]
    tokenizer: Tokenizer | None
    on_events: OnEvents | None  # receives the events of a stream, step by step; None: not streamed
    is_prompt_only: bool = False  # the one token that the engine generates is not part of the outputs
    max_length: int = 0
    outputs: Sequence[BulkOutput | StreamingOutput] = ()  # created when the job is opened
    prompt_logprob_rows: list[LogprobRow] = field(default_factory=list)
    embedding: NDArray[np.float32] | None = None  # [hidden] of requests with pooling
    request_stats: list[RequestStats] = field(default_factory=list)  # of requests the engine has accepted
    num_finished: int = 0
    rejection: RequestError | EngineClosedError | None = None  # by an engine in another process

    @property
    def is_finished(self) -> bool:
        """True if every output has finished by itself."""
        return self.num_finished == len(self.requests)


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of a step, split by how their outputs are built. Reused while they stay the same."""

    requests: list[Request]
    lines: NDArray[np.int64]  # of the output table, for bulk outputs
    bulk: NDArray[np.int64]  # indices into `requests`: bulk outputs
    streaming: list[int]  # indices into `requests`: streaming outputs


NO_REQUESTS = RequestGroup([], np.zeros(0, np.int64), np.zeros(0, np.int64), [])


class RequestTracker:
    """Jobs in the engine and their outputs."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.stats = SpecStats()  # of all finished outputs
        limits = engine.limits
        self.table = OutputTable(limits.vocab_size, limits.speculative_tokens, engine.sources)
        self._jobs: dict[str, tuple[Job, int]] = {}  # by request id: its job, and its index there
        self._owner: str | None = None
        self._finishing: list[tuple[Job, int]] = []  # finished outputs that may not be closed yet
        self._group = NO_REQUESTS
        self._weights_version = engine.weights_version
        engine.set_background_work(self.table.flush_if_due)

    @property
    def owner(self) -> str | None:
        """Name of the object that alone may run the engine, if one has claimed it."""
        return self._owner

    def claim(self, owner: str) -> None:
        """Reserve the engine for one runner."""
        self._owner = owner

    def release(self) -> None:
        """Drop the reservation."""
        self._owner = None

    @property
    def is_in_use(self) -> bool:
        """True if the engine is claimed or has requests."""
        return self._owner is not None or bool(self._jobs)

    @property
    def num_requests(self) -> int:
        """Requests in the engine."""
        return len(self._jobs)

    @property
    def has_pending_outputs(self) -> bool:
        """True while the output of any request is not complete."""
        return bool(self._jobs or self._finishing or self.table.num_open)

    def reset_stats(self) -> None:
        """Start the totals again."""
        self.stats = SpecStats()

    def open(self, job: Job) -> None:
        """Check a job against the engine's limits (RequestError) and create its outputs."""
        params = job.requests[0].params
        if job.is_prompt_only and job.on_events is not None:
            raise RequestError("max_tokens=0 leaves nothing to stream: use generate", "max_tokens")
        job.max_length = self.engine.check(job.requests[0])
        # an output without a reader is built in bulk
        is_bulk = job.on_events is None and not has_long_logprobs(params, self.engine.limits.vocab_size)
        create = self.table.new_output if is_bulk else StreamingOutput
        job.outputs = [create(i, request, job.tokenizer) for i, request in enumerate(job.requests)]

    def add(self, job: Job) -> None:
        """Queue the requests of a job. After an error `add` continues where it stopped; `drop` undoes it."""
        self._group = NO_REQUESTS  # a request with the same id and fields may have been in the last step
        for request in job.requests[len(job.request_stats) :]:
            if request.id in self._jobs:
                raise RequestError(f"a request with id {request.id!r} is already running", "request_id")
            self._jobs[request.id] = job, len(job.request_stats)
            version = self.engine.weights_version
            job.outputs[len(job.request_stats)].output.weights_versions = [WeightsSpan(version, 0)]
            try:
                job.request_stats.append(self.engine.add(request, job.max_length))
            except RequestError:
                del self._jobs[request.id]
                raise

    def drop(self, job: Job, reason: FinishReason = "abort", error: str | None = None) -> None:
        """Remove a job from the engine and finish its unfinished outputs with `reason`."""
        if any(one is job for one, _ in self._finishing):
            self._close_finishing(job)
        try:
            for request in job.requests:
                if self._jobs.get(request.id, (None,))[0] is job:
                    del self._jobs[request.id]
                    self.engine.abort(request.id)
        finally:  # the engine may have failed
            for output in job.outputs:
                if not output.output.finished():
                    self._abort_output(job, output, reason, error)

    def drop_all(self) -> None:
        """Remove every job."""
        for job in {id(job): job for job, _ in self._jobs.values()}.values():
            self.drop(job)

    def _close_finishing(self, job: Job) -> None:
        """Close outputs of a job that finished by themselves; `step` no longer returns the job."""
        self.table.flush_steps()
        indices = [index for one, index in self._finishing if one is job]
        self._finishing = [one for one in self._finishing if one[0] is not job]
        for index in indices:
            if job.outputs[index].output.finished():
                self._count_finished(job, index)

    def _abort_output(
        self, job: Job, output: BulkOutput | StreamingOutput, reason: FinishReason, error: str | None
    ) -> None:
        if isinstance(output, BulkOutput):
            out = self.table.close(output, "abort", None, None)
            out.finish_reason, out.error = reason, error
        else:
            events = output.abort(reason, error)
            if job.on_events is not None:
                job.on_events(events)
        self.stats.add(output.output.metrics)

    def result(self, job: Job) -> RequestOutput:
        """Return the outputs of a job so far."""
        params = job.requests[0].params
        strategy, lossless = self.engine.strategy_label(params)
        total = SpecStats()
        for output in job.outputs:
            total.add(output.output.metrics)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = LogprobMaps([None, *job.prompt_logprob_rows], job.tokenizer)
        stats = job.request_stats
        return RequestOutput(
            request_id=job.id,
            prompt=job.prompt,
            prompt_token_ids=job.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[_without_tokens(o.output) if job.is_prompt_only else o.output for o in job.outputs],
            finished=job.is_finished,
            metrics=total,
            num_cached_tokens=stats[0].num_cached_tokens if stats else 0,
            num_preemptions=sum(each.num_preemptions for each in stats),
            queue_seconds=_first([each.queue_seconds for each in stats]),
            first_token_seconds=_first([each.first_token_seconds for each in stats]),
            strategy=strategy,
            lossless=lossless,
            embedding=job.embedding,
        )

    def step(self, defer_close: bool = False) -> list[Job]:
        """Run one engine step and return the jobs that it finished or rejected.

        `defer_close`: bulk outputs may be completed some steps later, several at once.
        """
        results, group = self.engine.step(), self._group
        if self.engine.weights_version != self._weights_version:
            self._begin_spans()
        completed = [self._reject(*refusal) for refusal in results.refused.items()]
        if not len(results):
            return completed + self._take_closed()
        if results.requests != group.requests:
            group = self._group = self._regroup(results.requests)
        matched = self._append_bulk(results, group) if len(group.lines) else []
        for i, extra in results.host_outputs.items():
            job, index = self._jobs[results.requests[i].id]
            if extra.prompt_logprobs is not None and index == 0:
                job.prompt_logprob_rows.extend(extra.prompt_logprobs)
            if extra.embedding is not None:
                job.embedding = extra.embedding
        for i in group.streaming:
            step_output = results[i]
            job, index = self._jobs[step_output.request_id]
            output = job.outputs[index]
            assert isinstance(output, StreamingOutput)
            events = output.feed(step_output, returns_events=job.on_events is not None)
            if job.on_events is not None and events:
                job.on_events(events)
            if output.finished:
                self.engine.abort(step_output.request_id)  # the engine does not search for stop strings
                completed += self._count_finished(job, index)
        if results.finishes or matched:
            self._close(results, dict.fromkeys([*results.finishes, *matched]), defer_close)
        return completed + self._take_closed()

    def _begin_spans(self) -> None:
        """Record in every open output that its next tokens are made with new weights."""
        version = self._weights_version = self.engine.weights_version
        for job, index in self._jobs.values():
            output = job.outputs[index]
            if isinstance(output, BulkOutput):
                count = self.table.num_tokens(output)
            else:
                count = len(output.output.token_ids)
            spans = output.output.weights_versions
            output.output.weights_versions = [*(spans if count else []), WeightsSpan(version, count)]
            if not count and not index:  # the engine computes the rows of the prompt again
                job.prompt_logprob_rows.clear()

    def _close(self, results: StepResults, finished: Iterable[int], defer_close: bool) -> None:
        jobs = {i: self._jobs[results.requests[i].id] for i in finished}
        closing: dict[int, FinishedOutput] = {}
        for i, (job, index) in jobs.items():
            output, how = job.outputs[index], results.finishes.get(i, FINISHED_BY_STOP_STRING)
            if isinstance(output, BulkOutput):
                closing[i] = FinishedOutput(output, how.reason, how.stop, how.error)
                self._finishing.append((job, index))
        close = self.table.close_deferred if defer_close else self.table.close_all
        close(list(closing.values()))
        for i in closing:
            if i not in results.finishes:
                self.engine.abort(results.requests[i].id)

    def _take_closed(self) -> list[Job]:
        """Return the jobs whose last output is closed; when the engine is idle, all outputs are closed."""
        if not self._finishing:
            return []
        if not self.engine.has_work:
            self.table.flush_steps()
        is_closed = [job.outputs[index].output.finished() for job, index in self._finishing]
        closed = [one for one, done in zip(self._finishing, is_closed, strict=True) if done]
        self._finishing = [one for one, done in zip(self._finishing, is_closed, strict=True) if not done]
        return [job for one in closed for job in self._count_finished(*one)]

    def _reject(self, request_id: str, error: RequestError | EngineClosedError) -> Job:
        """Mark a job as rejected; the engine has accepted none of its requests."""
        job, _ = self._jobs[request_id]
        job.rejection, job.on_events = error, None
        return job

    def _regroup(self, requests: list[Request]) -> RequestGroup:
        places = [self._jobs[request.id] for request in requests]
        outputs = [job.outputs[index] for job, index in places]
        streaming = [i for i, output in enumerate(outputs) if not isinstance(output, BulkOutput)]
        lines = [
            output.line if output.line >= 0 else self.table.open(output)
            for output in outputs
            if isinstance(output, BulkOutput)
        ]
        bulk = np.delete(np.arange(len(requests)), streaming)
        return RequestGroup(requests, np.array(lines, np.int64), bulk, streaming)

    def _append_bulk(self, results: StepResults, group: RequestGroup) -> list[int]:
        """Append a step to the bulk outputs; return the indices of requests that a stop string ends."""
        table, source, drafts = results.table, results.draft_sources, results.drafts
        reasons = {i: finish.reason for i, finish in results.finishes.items()}
        if group.streaming:
            table, source = table[group.bulk], None if source is None else source[group.bulk]
            drafts = None if drafts is None else drafts.of_requests(group.bulk, len(results))
            reasons = {n: reasons[i] for n, i in enumerate(group.bulk.tolist()) if i in reasons}
        matched = self.table.add(group.lines, table, source, results.columns, reasons, drafts)
        return [int(group.bulk[n]) for n in matched]

    def _count_finished(self, job: Job, index: int) -> list[Job]:
        """Count a complete output; return its job if it was the last."""
        self.stats.add(job.outputs[index].output.metrics)
        job.num_finished += 1
        return [job] if job.is_finished else []


def _without_tokens(output: CompletionOutput) -> CompletionOutput:
    """Return an empty output that ended as `output` did; by its length, unless it failed."""
    has_failed = output.finish_reason in ("abort", "error")
    reason = output.finish_reason if has_failed else "length"
    versions = [WeightsSpan(output.weights_version, 0)]
    return CompletionOutput(
        output.index, output.seed, finish_reason=reason, error=output.error, weights_versions=versions
    )


def _first(times: Iterable[float | None]) -> float | None:
    return min([seconds for seconds in times if seconds is not None], default=None)
