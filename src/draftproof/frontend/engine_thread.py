"""Thread that runs the engine for `AsyncLLM`.

Calls reach the thread as commands in its inbox, which it reads between steps; when idle it waits for one.
The events of a step are delivered when the step is complete: into the queue of each request, with one wake-up
for each event loop that has readers. The thread never waits for a reader.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from draftproof.errors import EngineClosedError, EngineDeadError, EngineDownError, RequestError
from draftproof.frontend.operations import PendingOperations, is_idle, raised
from draftproof.frontend.request_tracker import Job, RequestTracker
from draftproof.frontend.stream_queue import EventDelivery, StreamQueue

Reply = Callable[[Any], None]
_log = logging.getLogger("draftproof")


class EngineThread:
    """Engine loop with an inbox. Methods `_on_…` and those they call run in the thread."""

    def __init__(self, tracker: RequestTracker, name: str) -> None:
        self._tracker = tracker
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # reentrant, so safe in __del__
        self._delivery = EventDelivery()
        self._open: dict[str, tuple[Job, StreamQueue]] = {}
        self._drain_replies: list[Reply] = []
        self._stop_replies: list[Reply] = []
        self._operations = PendingOperations()
        self._closed_reason: str | None = None  # why no new request is accepted
        self._is_stopping = self._has_ended = False
        self.error: BaseException | None = None  # the exception that ended the engine
        tracker.claim(name)
        # a daemon thread lets the program end; the owner stops it before
        self._thread = threading.Thread(target=self._run, name="draftproof-engine", daemon=True)
        self._thread.start()

    # --- calls from any thread ----------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return len(self._open)

    def closed_error(self) -> EngineClosedError | None:
        """Return a new error if no request is accepted any more."""
        if self._closed_reason is None:
            return None
        if self.error is None:
            return EngineClosedError(self._closed_reason)
        error = EngineDeadError(self._closed_reason)
        error.__cause__ = self.error
        return error

    def submit(self, job: Job, stream: bool) -> StreamQueue:
        """Queue a job for the running event loop; its results and errors come through the queue."""
        queue = StreamQueue(self._delivery.current_waker())
        if stream:
            job.on_events = partial(self._delivery.buffer, queue)
        self._post(partial(self._on_submit, job, queue))
        return queue

    def abort_unread(self, job_id: str, queue: StreamQueue) -> None:
        """Abort a job whose stream was closed by its caller. Does not wait; safe in __del__."""
        queue.abandon()
        if not queue.is_ended:
            self._post(partial(self._on_abort_unread, job_id, queue))

    def abort(self, job_id: str) -> asyncio.Future[bool]:
        """Abort a job; False if it is not open."""
        return self._call(partial(self._on_abort, job_id))

    def drain(self) -> asyncio.Future[None]:
        """Accept no new job; done when all open ones have ended."""
        return self._call(self._on_drain)

    async def operate(self, start: Callable[[Reply], None]) -> Any:
        """Call `start` in the thread with a reply, and return what is replied, or raise it."""
        return raised(await self._call(partial(self._operations.begin, start, self.closed_error)))

    def abort_all(self) -> asyncio.Future[int]:
        """Abort every open job and return their number."""
        return self._call(self._on_abort_all)

    async def shut_down(self) -> None:
        """Stop the thread and wait for its end."""
        await self._call(self._on_stop)
        self.join()

    def stop(self, seconds: float | None = None) -> None:
        """Stop the thread without an event loop, also while the interpreter exits."""
        self._post(partial(self._on_stop, lambda _: None))
        self.join(seconds)

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread."""
        if threading.current_thread() is not self._thread:  # the garbage collector may run in any thread
            self._thread.join(seconds)

    def _call(self, command: Callable[[Reply], None]) -> asyncio.Future[Any]:
        """Post a command and return a future of its reply in the running loop."""
        waker = self._delivery.current_waker()
        result: asyncio.Future[Any] = waker.loop.create_future()

        def set_result(value: Any) -> None:
            if not result.done():
                result.set_result(value)

        def reply(value: Any) -> None:
            waker.add(partial(set_result, value))
            waker.wake()

        self._post(partial(command, reply))
        return result

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.put(command)
        self._tracker.engine.wake()
        if self._has_ended:
            self._drain_inbox()

    def _drain_inbox(self) -> None:
        """Run commands that came after the end of the thread."""
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()
        self._delivery.wake_loops()

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._tracker.engine
        try:
            while not self._is_stopping:
                self._read_inbox()
                if engine.step_blocks:
                    self._publish()  # results of commands must not wait for the step
                if not is_idle(engine, self._open) and not self._is_stopping:
                    self._step()
                self._publish()
        except BaseException as error:
            _log.critical("the engine has failed and stopped", exc_info=error)
            self.error = error
            self._closed_reason = f"the engine has failed and stopped: {type(error).__name__}: {error}"
        self._end_all()

    def _read_inbox(self) -> None:
        """Run the commands that are queued now; wait for one if the engine is idle."""
        if is_idle(self._tracker.engine, self._open):
            self._inbox.get()()
        with suppress(Empty):
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()

    def _step(self) -> None:
        """Run one engine step and end the jobs that it finished or rejected."""
        try:
            finished = self._tracker.step()
        except EngineDownError as error:  # the engine's process is gone; a new one may come
            for job, _ in list(self._open.values()):
                self._end_job(job, "error", str(error))
            return
        for job in finished:
            if job.rejection is None:
                self._end_job(job)
            else:
                self._reject_job(job, job.rejection)
        if self._open and not self._tracker.engine.has_work:  # an error instead of readers that wait for ever
            raise AssertionError(f"the engine has lost {len(self._open)} requests")

    def _end_job(self, job: Job, reason: Any = "abort", error: str | None = None) -> None:
        """End a job, finished or not; its last events are delivered with the step."""
        _, queue = self._open.pop(job.id)
        try:
            self._tracker.drop(job, reason, error)
        finally:
            self._delivery.end(queue, self._tracker.result(job))

    def _reject_job(self, job: Job, error: Exception) -> None:
        """End a job that the engine did not accept; its reader gets the error alone."""
        _, queue = self._open.pop(job.id)
        job.on_events = None
        self._tracker.drop(job)
        self._delivery.end(queue, None, error)

    def _publish(self) -> None:
        """Deliver the events of a complete step; end jobs whose event loop is closed."""
        self._delivery.flush()
        closed = self._delivery.wake_loops()
        for job, queue in list(self._open.values()) if closed else ():
            if queue.waker in closed:
                self._end_job(job)
        if self._drain_replies and not self._open:
            _reply_all(self._drain_replies)

    def _end_all(self) -> None:
        """End every open job when the thread ends. In a failed engine each of these may fail as well."""
        reason = "error" if self.error is not None else "abort"
        for job, queue in list(self._open.values()):
            try:
                self._end_job(job, reason, self._closed_reason if self.error is not None else None)
            except Exception as error:
                _log.error("request %s is lost", job.id, exc_info=error)
                self._delivery.end(queue, None, self.closed_error())
        self._publish()
        if self.error is None:
            self._tracker.release()
        self._has_ended = True
        self._drain_inbox()
        _reply_all(self._drain_replies)
        _reply_all(self._stop_replies)
        self._operations.end(self.closed_error() or EngineClosedError("the engine was shut down"))

    # --- commands -----------------------------------------------------------------------------------

    def _on_submit(self, job: Job, queue: StreamQueue) -> None:
        error: Exception | None = self.closed_error()
        if error is None and job.id in self._open:
            error = RequestError(f"a request with id {job.id!r} is already running", "request_id")
        if error is None:
            try:
                self._tracker.open(job)
                _check_number(job, self._tracker.engine.limits.max_open_requests)
                self._tracker.add(job)
            except Exception as caught:  # concerns this job alone; mostly a RequestError
                error, job.on_events = caught, None
                self._tracker.drop(job)
        if error is None:
            self._open[job.id] = job, queue
        else:
            self._delivery.end(queue, None, error)

    def _on_abort_unread(self, job_id: str, queue: StreamQueue) -> None:
        job, current = self._open.get(job_id, (None, None))
        if job is not None and current is queue:  # not a later job of the same id
            self._end_job(job)

    def _on_abort(self, job_id: str, reply: Reply) -> None:
        is_open = job_id in self._open
        if is_open:
            self._end_job(self._open[job_id][0])
        reply(is_open)

    def _on_drain(self, reply: Reply) -> None:
        if self._closed_reason is None:
            self._closed_reason = "the engine drains: it takes no new requests"
        if self._open:
            self._drain_replies.append(reply)
        else:
            reply(None)

    def _on_abort_all(self, reply: Reply) -> None:
        jobs = [job for job, _ in self._open.values()]
        for job in jobs:
            self._end_job(job)
        reply(len(jobs))

    def _on_stop(self, reply: Reply) -> None:
        if self.error is None:
            self._closed_reason = "the engine was shut down"
        self._is_stopping = True
        if self._has_ended:
            reply(None)
        else:
            self._stop_replies.append(reply)


def _check_number(job: Job, limit: int | None) -> None:
    number = len(job.requests)
    if limit is not None and number > limit:
        hint = "send several requests with a smaller n, or start it with higher limits"
        text = f"n={number} is more than this engine takes at once, which is {limit} "
        raise RequestError(f"{text}(max_num_seqs and max_num_waiting): {hint}", "n")


def _reply_all(replies: list[Reply]) -> None:
    while replies:
        replies.pop()(None)
