"""Jobs: prompts on their way through the engine, and what each step brought them.

`LLM` and `AsyncLLM` share this. One thread at a time may use it: the one that runs the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftproof.engine.step.logprob_routing import needs_host_logprobs
from draftproof.engine.step.step_results import Finish, StepResults
from draftproof.engine.validation import Limits
from draftproof.errors import EngineClosedError, RequestError
from draftproof.metrics import EngineStats, RequestStats, SpecStats
from draftproof.sampling_params import SamplingParams
from draftproof.text.bulk.output import Answer
from draftproof.text.bulk.output_table import Ended, Ledger
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.streaming_output import OutputBuilder
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import FinishReason, LogprobRow, Request, RequestOutput, TokenEvent

BY_STOP_STRING = Finish("stop")  # the engine knows none: the answer says which
Tell = Callable[[Sequence[TokenEvent]], Any]


class EngineLike(Protocol):
    """What jobs are run on: `engine.Engine`, or one in another process."""

    @property
    def limits(self) -> Limits: ...
    @property
    def sources(self) -> tuple[str, ...]:
        """Who may have proposed a draft."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def waits(self) -> bool:
        """Does `step` wait for something to happen? Then `wake`, from any thread, ends that."""

    def check(self, request: Request) -> int: ...
    def add(self, request: Request, max_length: int | None = None) -> RequestStats: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> StepResults: ...
    def wake(self) -> None: ...
    def meanwhile(self, work: Callable[[], object]) -> None:
        """`work`, which may be done at any time between two steps, is best done while a device runs one."""

    def strategy_label(self, params: SamplingParams) -> tuple[str, bool]: ...
    def stats(self) -> EngineStats: ...
    def describe(self) -> str: ...


@dataclass(slots=True)
class Job:
    """One prompt on its way: its requests (n of them) and what has come back."""

    name: str
    text: str | None
    ids: list[int]
    requests: list[Request]
    tokenizer: Tokenizer | None
    tell: Tell | None  # takes the events of a stream, step by step
    max_length: int = 0
    answers: Sequence[Answer | OutputBuilder] = ()  # none before it is opened
    prompt_rows: list[LogprobRow] = field(default_factory=list)
    counts: list[RequestStats] = field(default_factory=list)  # of the requests that were let in
    num_ended: int = 0
    refused: RequestError | EngineClosedError | None = None  # by an engine that is asked from afar

    @property
    def finished(self) -> bool:
        """Have all its answers come to an end of their own?"""
        return self.num_ended == len(self.requests)


@dataclass(frozen=True, slots=True)
class Company:
    """The requests of a step: those whose answers are built in bulk, and the others."""

    requests: list[Request]
    lines: NDArray[np.int64]  # in the ledger
    at: NDArray[np.int64]  # where in `requests`
    singly: list[int]  # where the others are


NOBODY = Company([], np.zeros(0, np.int64), np.zeros(0, np.int64), [])


class Jobs:
    """Who has which request in the engine."""

    def __init__(self, engine: EngineLike) -> None:
        self.engine = engine
        self.stats = SpecStats()  # of everything
        self.owners: dict[str, tuple[Job, int]] = {}
        self.driver: str | None = None  # who alone may run the engine, if somebody claims that
        limits = engine.limits
        self.ledger = Ledger(limits.vocab_size, limits.speculative_tokens, engine.sources)
        self.patient = False  # nobody waits for an answer before all are there: then they are closed together
        self._ending: list[tuple[Job, int]] = []  # answers that ended and may not be closed yet
        self._company = NOBODY
        engine.meanwhile(self.ledger.catch_up)

    # --- coming and going ---------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        """Ask the engine whether it can be served (RequestError), and prepare its answers."""
        params = job.requests[0].params
        job.max_length = self.engine.check(job.requests[0])
        # nobody sees a token before the answer is complete: then it is built when it is
        in_bulk = job.tell is None and not needs_host_logprobs(params, self.engine.limits.vocab_size)
        make = self.ledger.answer if in_bulk else OutputBuilder
        job.answers = [make(i, request, job.tokenizer) for i, request in enumerate(job.requests)]

    def add(self, job: Job) -> None:
        """Let it in. If this raises, `drop` leaves nothing behind; called again, it goes on from there."""
        self._company = NOBODY  # it may equal one that was here before, name and all
        for request in job.requests[len(job.counts) :]:
            if request.id in self.owners:
                raise RequestError(f"a request with id {request.id!r} is already running", "request_id")
            self.owners[request.id] = job, len(job.counts)
            try:
                job.counts.append(self.engine.add(request, job.max_length))
            except RequestError:
                del self.owners[request.id]
                raise

    def drop(self, job: Job, reason: FinishReason = "abort", error: str | None = None) -> None:
        """Let it go, wherever it is; answers that have not ended end by this."""
        if any(one is job for one, _ in self._ending):
            self._forget_ending(job)
        try:
            for request in job.requests:
                if self.owners.get(request.id, (None,))[0] is job:
                    del self.owners[request.id]
                    self.engine.abort(request.id)
        finally:  # also where a broken engine lets nobody go
            for answer in job.answers:
                if not answer.output.finished():
                    self._cut_off(job, answer, reason, error)

    def _forget_ending(self, job: Job) -> None:
        """Answers of it have ended by themselves; `step` names it no more, since it is nobody's."""
        self.ledger.write()
        mine = [index for one, index in self._ending if one is job]
        self._ending = [one for one in self._ending if one[0] is not job]
        for index in mine:
            if job.answers[index].output.finished():
                self._ended(job, index)

    def _cut_off(
        self, job: Job, answer: Answer | OutputBuilder, reason: FinishReason, error: str | None
    ) -> None:
        if isinstance(answer, Answer):
            out = self.ledger.close(answer, "abort", None, None)
            out.finish_reason, out.error = reason, error
        else:
            events = answer.abort(reason, error)
            if job.tell is not None:
                job.tell(events)
        self.stats.add(answer.output.metrics)

    def result(self, job: Job) -> RequestOutput:
        params = job.requests[0].params
        strategy, lossless = self.engine.strategy_label(params)
        total = SpecStats()
        for answer in job.answers:
            total.add(answer.output.metrics)
        asked = params.prompt_logprobs is not None
        return RequestOutput(
            request_id=job.name,
            prompt=job.text,
            prompt_token_ids=job.ids,
            prompt_logprobs=LogprobMaps([None, *job.prompt_rows], job.tokenizer) if asked else None,
            outputs=[answer.output for answer in job.answers],
            finished=job.finished,
            metrics=total,
            num_cached_tokens=job.counts[0].num_cached_tokens if job.counts else 0,
            num_preemptions=sum(counts.num_preemptions for counts in job.counts),
            queue_seconds=_first(counts.queue_seconds for counts in job.counts),
            first_token_seconds=_first(counts.first_token_seconds for counts in job.counts),
            strategy=strategy,
            lossless=lossless,
        )

    # --- steps --------------------------------------------------------------------------------------

    def step(self) -> list[Job]:
        """One step of the engine; each job gets what is its own. The jobs that it completed or refused."""
        results, company = self.engine.step(), self._company
        completed = [self._refuse(*refusal) for refusal in results.refused.items()]
        if not len(results):
            return completed + self._closed()
        if results.requests != company.requests:
            company = self._company = self._meet(results.requests)
        matched = self._write_down(results, company) if len(company.lines) else []
        for i, extra in results.host_logprobs.items():
            job, index = self.owners[results.requests[i].id]
            if extra.prompt_logprobs is not None and index == 0:
                job.prompt_rows.extend(extra.prompt_logprobs)
        for i in company.singly:
            output = results[i]
            job, index = self.owners[output.request_id]
            builder = job.answers[index]
            assert isinstance(builder, OutputBuilder)
            events = builder.feed(output, tell=job.tell is not None)
            if job.tell is not None and events:
                job.tell(events)
            if builder.finished:
                self.engine.abort(output.request_id)  # a stop string ends it here, not in the engine
                completed += self._ended(job, index)
        if results.finishes or matched:
            self._close(results, dict.fromkeys([*results.finishes, *matched]))
        return completed + self._closed()

    def _close(self, results: StepResults, ended: Iterable[int]) -> None:
        """The answers built in bulk that ended with a step."""
        owners = {i: self.owners[results.requests[i].id] for i in ended}
        closing: dict[int, Ended] = {}
        for i, (job, index) in owners.items():
            answer, how = job.answers[index], results.finishes.get(i, BY_STOP_STRING)
            if isinstance(answer, Answer):
                closing[i] = answer, how.reason, how.stop, how.error
                self._ending.append((job, index))
        (self.ledger.close_soon if self.patient else self.ledger.close_all)(list(closing.values()))
        for i in closing:
            if i not in results.finishes:
                self.engine.abort(results.requests[i].id)

    def _closed(self) -> list[Job]:
        """The jobs of which the last answer is closed by now. When there is nothing else to do, all are."""
        if not self._ending:
            return []
        if not self.engine.has_work:
            self.ledger.write()
        over = [job.answers[index].output.finished() for job, index in self._ending]
        closed = [one for one, is_over in zip(self._ending, over, strict=True) if is_over]
        self._ending = [one for one, is_over in zip(self._ending, over, strict=True) if not is_over]
        return [job for one in closed for job in self._ended(*one)]

    def _refuse(self, request_id: str, error: RequestError | EngineClosedError) -> Job:
        """All of the job: none of its requests was let in."""
        job, _ = self.owners[request_id]
        job.refused, job.tell = error, None
        return job

    def _meet(self, requests: list[Request]) -> Company:
        """Who takes part in a step, for as long as it stays the same."""
        lines, singly = [], []
        for i, request in enumerate(requests):
            job, index = self.owners[request.id]
            answer = job.answers[index]
            if isinstance(answer, Answer):
                lines.append(answer.line if answer.line >= 0 else self.ledger.open(answer))
            else:
                singly.append(i)
        at = np.delete(np.arange(len(requests)), singly)
        return Company(requests, np.array(lines, np.int64), at, singly)

    def _write_down(self, results: StepResults, company: Company) -> list[int]:
        """What a step brought the answers built in bulk; those of them that met a stop string."""
        table, source = results.table, results.source
        ends = {i: ending.reason for i, ending in results.finishes.items()}
        if company.singly:
            table, source = table[company.at], None if source is None else source[company.at]
            ends = {n: ends[i] for n, i in enumerate(company.at.tolist()) if i in ends}
        columns = {kind: (c.values, c.ids, c.ranks) for kind, c in results.columns.items()}
        matched = self.ledger.add(company.lines, table, source, columns, ends)
        return [int(company.at[n]) for n in matched]

    def _ended(self, job: Job, index: int) -> list[Job]:
        """Count an answer that is complete; the job if it was its last."""
        self.stats.add(job.answers[index].output.metrics)
        job.num_ended += 1
        return [job] if job.finished else []


def _first(times: Iterable[float | None]) -> float | None:
    return min((seconds for seconds in times if seconds is not None), default=None)
