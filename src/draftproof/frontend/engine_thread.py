"""The thread that runs the engine for `AsyncLLM`.

Calls reach the thread as notes in its inbox, which it reads between steps; without work it sleeps on it.
What a step brought goes out when the step is whole: into the box of each request, with one wake-up for each
event loop that has readers. The thread never waits for a reader.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

from draftproof.errors import EngineClosedError, EngineDeadError, EngineDownError, RequestError
from draftproof.frontend.request_tracker import Job, Jobs
from draftproof.frontend.stream_queue import Bell, Box
from draftproof.types import RequestOutput, TokenEvent

Reply = Callable[[Any], None]


class Driver:
    """Runs steps while there is work. What is named `_on_…` and everything below it is the thread's own."""

    def __init__(self, jobs: Jobs, name: str) -> None:
        self._jobs = jobs
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # `put` may interrupt itself: __del__
        self._bells: WeakValueDictionary[asyncio.AbstractEventLoop, Bell] = WeakValueDictionary()
        self._open: dict[str, tuple[Job, Box]] = {}
        self._news: list[tuple[Box, Sequence[TokenEvent]]] = []  # of a step that is not whole yet
        self._due: set[Bell] = set()
        self._drainers: list[Reply] = []
        self._stoppers: list[Reply] = []
        self._refusal: str | None = None  # why nothing is taken in any more
        self._stopping = self._gone = False
        self.cause: BaseException | None = None  # what broke it
        jobs.driver = name
        # a daemon, so that a program may end; whoever owns this stops it before
        self._thread = threading.Thread(target=self._run, name="draftproof-engine", daemon=True)
        self._thread.start()

    # --- for callers, from any thread ---------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._open)

    def closed(self) -> EngineClosedError | None:
        """A new error if nothing is taken in any more."""
        if self._refusal is None:
            return None
        if self.cause is None:
            return EngineClosedError(self._refusal)
        error = EngineDeadError(self._refusal)
        error.__cause__ = self.cause
        return error

    def submit(self, job: Job, stream: bool) -> Box:
        """For the loop that runs; what becomes of it is told in the box."""
        box = Box(self._bell())
        if stream:
            job.tell = partial(self._hear, box)
        self._post(partial(self._on_submit, job, box))
        return box

    def leave(self, name: str, box: Box) -> None:
        """The reader is gone. Nothing waits; safe in __del__."""
        box.left = True
        box.parts.clear()
        if not box.ended:
            self._post(partial(self._on_leave, name, box))

    def abort(self, name: str) -> asyncio.Future[bool]:
        return self._ask(partial(self._on_abort, name))

    def drain(self) -> asyncio.Future[None]:
        """Take nothing in from now on; done when all that is here has ended."""
        return self._ask(self._on_drain)

    def abort_all(self) -> asyncio.Future[int]:
        return self._ask(self._on_abort_all)

    async def stopped(self) -> None:
        await self._ask(self._on_stop)
        self.join()

    def stop(self, seconds: float | None = None) -> None:
        """Without an event loop, also at the very end of a program."""
        self._post(partial(self._on_stop, lambda _: None))
        self.join(seconds)

    def join(self, seconds: float | None = None) -> None:
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            self._thread.join(seconds)

    def _bell(self) -> Bell:
        loop = asyncio.get_running_loop()
        bell = self._bells.get(loop)
        if bell is None:
            bell = self._bells[loop] = Bell(loop)
        return bell

    def _ask(self, note: Callable[[Reply], None]) -> asyncio.Future[Any]:
        bell = self._bell()
        answer: asyncio.Future[Any] = bell.loop.create_future()

        def settle(value: Any) -> None:
            if not answer.done():
                answer.set_result(value)

        def reply(value: Any) -> None:
            bell.add(partial(settle, value))
            bell.ring()

        self._post(partial(note, reply))
        return answer

    def _post(self, note: Callable[[], None]) -> None:
        self._inbox.put(note)
        self._jobs.engine.wake()
        if self._gone:
            self._sweep()

    def _sweep(self) -> None:
        """Answer what came too late for the thread."""
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()
        self._ring()

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._listen()
                if self._jobs.engine.waits:
                    self._publish()  # what the notes brought does not wait with the step
                if (self._open or self._jobs.engine.waits) and not self._stopping:
                    self._step()
                self._publish()
        except BaseException as error:
            logging.getLogger("draftproof").critical("the engine broke and has stopped", exc_info=error)
            self.cause = error
            self._refusal = f"the engine broke and has stopped: {type(error).__name__}: {error}"
        self._finish()

    def _listen(self) -> None:
        """Read the notes that are here by now; more of them keep no step waiting. Idle: wait for one."""
        if not self._open and not self._jobs.engine.waits:
            self._inbox.get()()
        with suppress(Empty):
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()

    def _step(self) -> None:
        try:
            ended = self._jobs.step()
        except EngineDownError as error:  # its process is gone: another one may come
            self._lose(error)
            return
        for job in ended:
            if job.refused is None:
                self._let_go(job)
            else:
                self._refuse(job, job.refused)
        if self._open and not self._jobs.engine.has_work:  # better an error than readers who wait for ever
            raise AssertionError(f"the engine has lost {len(self._open)} requests")

    def _let_go(self, job: Job, reason: Any = "abort", error: str | None = None) -> None:
        """It has ended, or ends by this; what it gave goes out with the rest of the step."""
        _, box = self._open.pop(job.name)
        try:
            self._jobs.drop(job, reason, error)
        finally:
            self._tell_end(box, self._jobs.result(job))

    def _refuse(self, job: Job, error: Exception) -> None:
        _, box = self._open.pop(job.name)
        job.tell = None  # nothing came of it, and nobody hears of its end but by the error
        self._jobs.drop(job)
        self._tell_end(box, None, error)

    def _lose(self, error: EngineDownError) -> None:
        """What was delivered stands; what has not ended never will."""
        for job, _ in list(self._open.values()):
            self._let_go(job, "error", str(error))

    def _hear(self, box: Box, events: Sequence[TokenEvent]) -> None:
        self._news.append((box, events))

    def _tell_end(self, box: Box, output: RequestOutput | None, error: Exception | None = None) -> None:
        """Behind its events."""
        self._tell_news()
        box.end(output, error)
        self._wake(box)

    def _tell_news(self) -> None:
        news, self._news = self._news, []
        for box, events in news:
            box.put(events)
            self._wake(box)

    def _wake(self, box: Box) -> None:
        if not box.due:
            box.due = True
            box.bell.add(box.wake)
            self._due.add(box.bell)

    def _publish(self) -> None:
        """A step is whole: out with it."""
        self._tell_news()
        closed = self._ring()
        for job, box in list(self._open.values()) if closed else ():
            if box.bell in closed:
                self._let_go(job)
        if self._drainers and not self._open:
            self._answer(self._drainers)

    def _ring(self) -> set[Bell]:
        """Those that nobody hears any more."""
        closed = set()
        with suppress(KeyError):  # it is empty; once the thread is gone, several callers may be here
            while True:
                bell = self._due.pop()
                if not bell.ring():
                    closed.add(bell)
        return closed

    def _answer(self, replies: list[Reply]) -> None:
        while replies:
            replies.pop()(None)

    def _finish(self) -> None:
        """Everything open ends here. In a broken engine each of these may fail as well."""
        reason = "error" if self.cause is not None else "abort"
        for job, box in list(self._open.values()):
            try:
                self._let_go(job, reason, self._refusal if self.cause is not None else None)
            except Exception as error:
                logging.getLogger("draftproof").error("request %s is lost", job.name, exc_info=error)
                self._tell_end(box, None, self.closed())
        self._publish()
        if self.cause is None:
            self._jobs.driver = None
        self._gone = True
        self._sweep()
        self._answer(self._drainers)
        self._answer(self._stoppers)

    # --- notes --------------------------------------------------------------------------------------

    def _on_submit(self, job: Job, box: Box) -> None:
        error: Exception | None = self.closed()
        if error is None and job.name in self._open:
            error = RequestError(f"a request with id {job.name!r} is already running", "request_id")
        if error is None:
            try:
                self._jobs.open(job)
                self._check_number(job)
                self._jobs.add(job)
            except Exception as caught:  # its own business; a RequestError if all is well
                error, job.tell = caught, None
                self._jobs.drop(job)
        if error is None:
            self._open[job.name] = job, box
        else:
            self._tell_end(box, None, error)

    def _check_number(self, job: Job) -> None:
        """Later there would not be more room for it either."""
        most, number = self._jobs.engine.limits.at_once, len(job.requests)
        if most is not None and number > most:
            raise RequestError(
                f"n={number} is more than this engine takes at once, which is {most} (max_num_seqs and "
                "max_num_waiting): ask for fewer, several times, or start it with more",
                "n",
            )

    def _on_leave(self, name: str, box: Box) -> None:
        job, its = self._open.get(name, (None, None))
        if job is not None and its is box:  # and not another one of the same name
            self._let_go(job)

    def _on_abort(self, name: str, reply: Reply) -> None:
        here = name in self._open
        if here:
            self._let_go(self._open[name][0])
        reply(here)

    def _on_drain(self, reply: Reply) -> None:
        if self._refusal is None:
            self._refusal = "the engine drains: it takes no new requests"
        if self._open:
            self._drainers.append(reply)
        else:
            reply(None)

    def _on_abort_all(self, reply: Reply) -> None:
        jobs = [job for job, _ in self._open.values()]
        for job in jobs:
            self._let_go(job)
        reply(len(jobs))

    def _on_stop(self, reply: Reply) -> None:
        if self.cause is None:
            self._refusal = "the engine was shut down"
        self._stopping = True
        if self._gone:
            reply(None)
        else:
            self._stoppers.append(reply)
