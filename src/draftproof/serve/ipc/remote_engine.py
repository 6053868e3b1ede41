"""An engine in another process, with the surface that jobs and their driver use.

Requests go out as messages; frames come in and are read as the results that the engine would have given.
What the worker alone can know, that its queue is full or a grammar is none, comes back as a refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from draftproof.engine.step.step_results import StepResults
from draftproof.engine.validation import Limits, check_request
from draftproof.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineDownError,
    QueueFullError,
    RequestError,
    nearest,
)
from draftproof.metrics import EngineStats, RequestStats, Timings
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc.connection import Line, News
from draftproof.serve.ipc.decode import End, Guests, Told, read, results_of
from draftproof.serve.ipc.frame import VERSION, Bounds, FrameError, Status
from draftproof.serve.ipc.messages import (
    FAREWELL,
    TIMINGS,
    WELCOME,
    Abort,
    Add,
    Welcome,
    body_of,
    encode,
    read_farewell,
    read_timings,
    read_welcome,
)
from draftproof.serve.ipc.status import WorkerStatus, folder_of, read_status
from draftproof.types import Request

CONNECT_SECONDS = 60.0
NOTHING = StepResults([], np.zeros((0, 0), np.int64), {})
NOBODY = Guests.of([], {}, 1)
IDLE = EngineStats(*[0] * 8)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Of the worker, since it was started."""

    num_steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Held:
    """A job's requests that are not sent yet: one message takes them all."""

    ids: object  # the very list of its prompt's ids, which the requests of one job share
    handle: int
    seeds: list[int]
    body: bytes


class RemoteEngine:
    """The surface of `Engine` that jobs use. `step` waits for a frame."""

    waits = True

    def __init__(self, address: str, seconds: float = CONNECT_SECONDS) -> None:
        self.on_step: Callable[[float], object] | None = None
        self.totals = StepTotals()
        self._folder = folder_of(address)
        self._stats, self._timings = IDLE, Timings()
        self._known: dict[int, Request] = {}
        self._counts: dict[int, RequestStats] = {}
        self._handles: dict[str, int] = {}
        self._jobs: dict[int, range] = {}  # by the first handle
        self._next = 1
        self._held: Held | None = None
        self._gone: list[int] = []  # handles to abort, not sent yet
        self._guests = NOBODY
        self._sequence = 0
        self._up = False
        self._line = Line(address)
        try:
            self.facts = self._meet(seconds)
        except BaseException:
            self._line.close()
            raise
        self._bounds = Bounds(
            self.facts.limits.vocab_size, self.facts.limits.speculative_tokens, len(self.facts.sources)
        )

    def _meet(self, seconds: float) -> Welcome:
        """The worker's first words."""
        while not self._up:
            news = self._line.receive(seconds)
            if news is None:
                raise EngineDownError(f"the engine's process does not answer within {seconds:g} s")
            if isinstance(news, bytes) and news.startswith(WELCOME):
                return self._welcomed(news)
        raise AssertionError

    def _welcomed(self, data: bytes) -> Welcome:
        facts = read_welcome(data[len(WELCOME) :])
        if facts.version != VERSION:
            raise EngineDeadError(f"the engine speaks version {facts.version} of the wire, this is {VERSION}")
        self._up, self._sequence = True, 0
        return facts

    # --- facts --------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self.facts.limits

    @property
    def sources(self) -> tuple[str, ...]:
        return self.facts.sources

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.facts.eos_token_ids

    @property
    def up(self) -> bool:
        return self._up

    @property
    def has_work(self) -> bool:
        return bool(self._known)

    def stats(self) -> EngineStats:
        """As of the last frame: all servers' requests together."""
        return self._stats

    def describe(self) -> str:
        return self.facts.description

    def status(self) -> WorkerStatus:
        return read_status(self._folder)

    def strategy_label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the strategy of a request with its label, and whether its output is lossless."""
        facts, wish = self.facts, params.speculation
        name = wish.verify_strategy
        if name is None:
            name = facts.strategy if wish.enabled else facts.plain
        if not isinstance(name, str) or name not in facts.strategies:
            raise RequestError(
                f"unknown verify_strategy {name!r}: {nearest(str(name), facts.strategies)}", "speculative"
            )
        guarantee = facts.strategies[name]
        if wish.enabled:  # without drafts no policy applies
            guarantee = guarantee.under_policy(facts.accept_policy)
        return f"{name}: {guarantee.label}", guarantee.is_lossless(params.greedy)

    # --- requests -----------------------------------------------------------------------------------

    def check(self, request: Request) -> int:
        """As the engine would; what only the worker knows comes back later, as a refusal."""
        if not self._up:
            raise self.why_down()
        if request.id in self._handles:
            raise RequestError(f"a request with id {request.id!r} is already running", "request_id")
        self.strategy_label(request.params)
        return check_request(request, self.limits)

    def why_down(self) -> EngineClosedError:
        status = self.status()
        reason = f" ({status.reason})" if status.reason else ""
        if status.state in ("failed", "stopped"):
            return EngineDeadError(f"the engine is not there any more{reason}")
        return EngineDownError(f"the engine is being started again{reason}: try again in a moment")

    def add(self, request: Request, max_length: int | None = None) -> RequestStats:
        if max_length is None:
            self.check(request)
        held = self._held
        if held is None or held.ids is not request.prompt_token_ids:
            self._flush()
            body = body_of(request)
            held = self._held = Held(request.prompt_token_ids, self._next, [], body)
        handle = held.handle + len(held.seeds)
        held.seeds.append(request.seed)
        self._next = handle + 1
        self._jobs[held.handle] = range(held.handle, self._next)
        self._known[handle], self._handles[request.id] = request, handle
        stats = self._counts[handle] = RequestStats()
        return stats

    def abort(self, request_id: str) -> bool:
        handle = self._handles.get(request_id)
        if handle is None:
            return False
        if self._held is not None and handle >= self._held.handle:
            self._flush()
        self._forget(handle)
        self._gone.append(handle)
        return True

    def _forget(self, handle: int) -> Request | None:
        request = self._known.pop(handle, None)
        if request is not None:
            del self._handles[request.id], self._counts[handle]
            self._guests = NOBODY
        self._jobs.pop(handle, None)
        return request

    def _flush(self) -> None:
        """Send what is due. There may be nobody to send it to: then it is lost with the rest."""
        if self._gone:
            gone, self._gone = self._gone, []
            if self._up:
                self._line.send(encode(Abort(gone)))
        if self._held is not None:
            held, self._held = self._held, None
            if self._up:
                self._line.send(encode(Add(held.handle, held.seeds)), held.body)

    # --- results ------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._line.wake()

    def meanwhile(self, work: Callable[[], object]) -> None:
        """No device is here that could be kept waiting."""

    def step(self) -> StepResults:
        """The next frame's results; nothing, if it was woken. EngineDownError: the worker is gone."""
        self._flush()
        news = self._line.receive()
        if isinstance(news, bytes):
            return self._hear(news)
        if news is News.LOST:
            return self._lost("the engine's process is gone")
        return NOTHING

    def _hear(self, data: bytes) -> StepResults:
        try:
            return self._understand(data)
        except (FrameError, msgspec.MsgspecError) as error:
            logging.getLogger("draftproof").critical("what the engine sent cannot be read: %s", error)
            self._line.renew()
            return self._lost(f"what the engine sent cannot be read: {error}")

    def _understand(self, data: bytes) -> StepResults:
        if data.startswith(WELCOME):
            facts = self._welcomed(data)
            if _kind(facts) != _kind(self.facts):
                self._up = False
                raise EngineDeadError("the engine that was started again is another one")
            self.facts = facts
            return NOTHING
        if data.startswith(TIMINGS):
            self._timings = read_timings(data[len(TIMINGS) :])
            self._stats = replace(self._stats, timings=self._timings)
            return NOTHING
        if data.startswith(FAREWELL):
            reason = read_farewell(data[len(FAREWELL) :]).reason
            self._line.renew()
            return self._lost(f"the engine has stopped: {reason}")
        told = read(data, self._bounds, self.facts.sources)
        if told.header.sequence != self._sequence:
            raise FrameError(f"it is number {told.header.sequence}, and {self._sequence} was due")
        self._sequence += 1
        return self._take(told)

    def _lost(self, reason: str) -> StepResults:
        """Everything that is open here has come to nothing."""
        was_up, self._up = self._up, False
        self._held, self._gone, self._guests = None, [], NOBODY
        self._stats, self.totals, self._timings = IDLE, StepTotals(), Timings()
        for table in (self._known, self._counts, self._handles, self._jobs):
            table.clear()
        if was_up:
            raise EngineDownError(f"{reason}; what was not finished is lost: try again")
        return NOTHING

    def _take(self, told: Told) -> StepResults:
        header = told.header
        self._stats, self.totals = (
            told.stats(self._timings),
            StepTotals(header.num_steps, header.busy_seconds),
        )
        if self.on_step is not None and header.step_seconds:
            self.on_step(header.step_seconds)
        refused = {}
        for i, end in told.ends.items():
            if end.status >= Status.REFUSED:
                refused.update(self._refused(told.handles[i], end))
        if told.handles != self._guests.handles:
            self._guests = Guests.of(told.handles, self._known, self._bounds.vocab_size)
        for i, news in told.counted:
            counts = self._counts.get(told.handles[i])
            if counts is not None:
                counts.num_cached_tokens, counts.num_preemptions = (
                    news.num_cached_tokens,
                    news.num_preemptions,
                )
                counts.scheduled_at, counts.first_token_at = news.scheduled_at, news.first_token_at
        results = results_of(told, self._guests, self.facts.sources, refused)
        for i in told.ends:
            self._forget(told.handles[i])
        return results

    def _refused(self, handle: int, end: End) -> dict[str, RequestError | EngineClosedError]:
        """All requests of its job are."""
        first = self._known.get(handle)
        for other in self._jobs.get(handle, ()):
            self._forget(other)
        return {} if first is None else {first.id: _error(end)}

    def close(self) -> None:
        self._up = False
        self._line.close()


def _error(end: End) -> RequestError | EngineClosedError:
    text = end.text or "the engine gives no reason"
    if end.status is Status.FULL:
        return QueueFullError(text, end.param)
    if end.status is Status.CLOSED:
        return EngineDownError(text)
    return RequestError(text, end.param)


def _kind(facts: Welcome) -> Welcome:
    """What must not change from one worker to the next."""
    return msgspec.structs.replace(facts, pid=0)
