"""The worker: the engine's loop in a process of its own, for any number of server processes.

A turn: read what the servers say, let in whose grammar is compiled, step, send each server its own frame.
The step waits for nobody: grammars are compiled elsewhere, and sending never blocks (see `clients`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

from draftproof.engine.step.logprob_routing import logprob_kind_of
from draftproof.engine.step.step_results import StepResults
from draftproof.errors import QueueFullError, RequestError
from draftproof.llm import LLM
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams, top_of
from draftproof.serve.ipc.connection import QUEUED
from draftproof.serve.ipc.encode import Party, Refusal, Standing, frame_of, refusal_frame
from draftproof.serve.ipc.frame import VERSION, Status
from draftproof.serve.ipc.frontend_connection import Client, Entry, Gone, Stuck
from draftproof.serve.ipc.messages import (
    FAREWELL,
    TIMINGS,
    WELCOME,
    Abort,
    Add,
    Body,
    Farewell,
    Hello,
    Welcome,
    encode,
    params_of,
    read_body,
    read_note,
    requests_of,
)
from draftproof.serve.ipc.waker import Bell
from draftproof.types import Grammar, Request
from draftproof.verify import PLAIN_STRATEGY, STRATEGIES

MESSAGES = 1000  # read in a turn at most: a flood keeps no step waiting
COMPILERS = 4  # threads that wait for grammars; one process compiles them
IDLE_SECONDS = 1.0  # between two frames that tell an idle server how the engine stands
FULL_SECONDS = 0.002  # between two looks at a server that did not read
DRAIN_SECONDS = 60.0
LINGER = 10_000  # milliseconds that the last frames and words may take, on a machine with much to do

log = logging.getLogger("draftproof")


class Worker:
    """Serves until `run` is told to drain, or the engine breaks."""

    def __init__(self, llm: LLM, address: str, options: dict[str, Any]) -> None:
        self.llm, self.engine = llm, llm.engine
        self.turned = time.monotonic()  # when the last turn began, for who watches
        self._welcome = WELCOME + encode(welcome_of(llm, options))
        self._clients: dict[bytes, Client] = {}
        self._numbers = 0
        self._entries: dict[str, Entry] = {}
        self._met: list[Request] = []
        self._parties: list[tuple[Client, Party, list[Entry]]] = []
        self._untold: set[str] = set()  # whose counts are not told
        self._num_preemptions = 0
        self._num_steps, self._busy = 0, 0.0
        self._told = self._timed = time.monotonic()
        self._cut_off: list[Client] = []  # to whom that is still to be said
        self._compilers = ThreadPoolExecutor(COMPILERS, "draftproof-grammar")
        self._compiled: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell = Bell()
        self._drain_until: float | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.sndhwm = QUEUED
        self._socket.linger = LINGER
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def drain(self) -> None:
        """Take nothing in any more, finish what is here, and end. From any thread, or a signal."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + DRAIN_SECONDS
        self._bell.ring()

    def stop(self) -> None:
        """End after this turn, whoever is here."""
        self._drain_until = 0.0
        self._bell.ring()

    def run(self) -> None:
        reason = "it was told to"
        try:
            while not self._drained():
                self._turn()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._leave(reason)

    def _turn(self) -> None:
        self.turned = time.monotonic()
        self._receive()
        while True:
            try:
                self._compiled.get_nowait()()
            except Empty:
                break
        self._each(self._tell_refusals)
        if self._cut_off:
            self._cut_off = [client for client in self._cut_off if not self._dismiss(client)]
        if self.turned - self._timed >= IDLE_SECONDS:
            self._timed = self.turned
            timings = TIMINGS + encode(self.engine.stats().timings)
            self._each(lambda client: client.outbox or client.put(self._socket, timings))
        if any(client.outbox for client in self._clients.values()):
            self._each(self._flush)
        if any(client.entries and not client.stuck for client in self._clients.values()):
            self._step()
        else:
            self._rest()

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        busy = any(c.entries or c.compiling or c.outbox or c.refusals for c in self._clients.values())
        return not busy or time.monotonic() > self._drain_until

    def _leave(self, reason: str) -> None:
        words = FAREWELL + encode(Farewell(reason))
        for client in list(self._clients.values()):
            with contextlib.suppress(Gone):
                client.put(self._socket, words)
            with contextlib.suppress(Exception):  # of an engine that broke
                self._drop(client)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._socket.close()
        self._context.term()
        self._bell.close()

    # --- servers ------------------------------------------------------------------------------------

    def _each(self, act: Callable[[Client], object]) -> None:
        for client in list(self._clients.values()):
            self._try(client, act, client)

    def _try(self, client: Client, act: Callable[..., object], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Gone:
            if client.entries or client.compiling:
                log.warning("a server is gone: %d of its requests are aborted", len(client.entries))
            self._drop(client)
        except Stuck:
            log.error("a server does not read: %d of its requests are aborted", len(client.entries))
            self._drop(client)
            self._cut_off.append(client)

    def _flush(self, client: Client) -> None:
        if client.outbox:
            client.flush(self._socket, alone=len(client.entries) == len(self._entries))

    def _drop(self, client: Client) -> None:
        self._clients.pop(client.identity, None)
        for entry in list(client.entries.values()):
            self._remove(entry)
            self.engine.abort(entry.request.id)
        client.compiling.clear()

    def _dismiss(self, client: Client) -> bool:
        """Say that nothing comes any more, behind what has come. False: there is no room even for that."""
        try:
            return client.put(self._socket, FAREWELL + encode(Farewell("this server was not heard of")))
        except Gone:
            return True

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.request.id], entry.client.entries[entry.handle]
        self._untold.discard(entry.request.id)
        self._met, self._parties = [], []

    def _receive(self) -> None:
        for _ in range(MESSAGES):
            try:
                identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                note = read_note(parts[0])
            except (msgspec.MsgspecError, IndexError, UnicodeDecodeError) as error:
                log.error("a message of a server cannot be read: %s", error)
                continue
            client = self._clients.get(identity)
            if isinstance(note, Hello):
                self._greet(identity, note)
            elif client is None:
                log.error("a message of somebody who did not say hello")
                self._dismiss(Client(identity, 0))
            elif isinstance(note, Abort):
                self._abort(client, note)
            else:
                self._add(client, note, parts[1:])

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if identity in self._clients:
            self._drop(self._clients[identity])
        if hello.version != VERSION:
            log.error("a server speaks version %d of the wire, this is %d", hello.version, VERSION)
        self._numbers += 1
        client = self._clients[identity] = Client(identity, self._numbers)
        # whatever its version: it sees ours in it, and knows better than to go on
        self._try(client, client.put, self._socket, self._welcome)

    # --- requests -----------------------------------------------------------------------------------

    def _add(self, client: Client, add: Add, rest: list[bytes]) -> None:
        if self._drain_until is not None:
            text = "the engine drains: it takes no new requests at the moment"
            client.refusals.append(Refusal(add.handle, Status.CLOSED, text))
            return
        try:
            body = read_body(rest[0])
            params = params_of(body.params)
        except (msgspec.MsgspecError, IndexError, UnicodeDecodeError, RequestError) as error:
            self._refuse(client, add, error)
            return
        if params.structure is None:
            self._let_in(client, add, body, params, None)
        else:
            client.compiling.add(add.handle)
            self._compilers.submit(self._compile, client, add, body, params)

    def _compile(self, client: Client, add: Add, body: Body, params: SamplingParams) -> None:
        """In a thread: the grammar, then back to the loop with it."""
        try:
            grammar = self.llm.grammar_of(params)
            self._compiled.put(partial(self._let_in, client, add, body, params, grammar))
        except Exception as error:
            self._compiled.put(partial(self._refuse, client, add, error))
        self._bell.ring()

    def _let_in(
        self, client: Client, add: Add, body: Body, params: SamplingParams, grammar: Grammar | None
    ) -> None:
        if grammar is not None and add.handle not in client.compiling:
            return  # aborted in the meantime, or the whole server is gone
        client.compiling.discard(add.handle)
        vocab = self.engine.limits.vocab_size
        wants, top = logprob_kind_of(params, vocab), top_of(params.logprobs, vocab)
        made: list[Entry] = []
        try:
            for i, request in enumerate(requests_of(add, body, params, f"{client.number}:", grammar)):
                stats = self.engine.add(request)
                made.append(Entry(client, add.handle + i, request, stats, wants, top))
        except Exception as error:
            for entry in made:
                self.engine.abort(entry.request.id)
            self._refuse(client, add, error)
            return
        for entry in made:
            self._entries[entry.request.id] = client.entries[entry.handle] = entry
            self._untold.add(entry.request.id)

    def _refuse(self, client: Client, add: Add, error: Exception) -> None:
        client.compiling.discard(add.handle)
        if not isinstance(error, RequestError):
            log.error("a request could not be taken in", exc_info=error)
        full = isinstance(error, QueueFullError)
        param = error.param if isinstance(error, RequestError) else None
        status = Status.FULL if full else Status.REFUSED
        client.refusals.append(Refusal(add.handle, status, str(error), param))

    def _abort(self, client: Client, abort: Abort) -> None:
        for handle in abort.handles:
            client.compiling.discard(handle)
            entry = client.entries.get(handle)  # it may have ended by itself meanwhile
            if entry is not None:
                self._remove(entry)
                self.engine.abort(entry.request.id)

    # --- results ------------------------------------------------------------------------------------

    def _standing(self, seconds: float = 0.0) -> Standing:
        drafts = self.engine.limits.speculative_tokens
        return Standing(drafts, self._num_steps, seconds, self._busy, self.engine.stats())

    def _step(self) -> None:
        began = time.perf_counter()
        results = self.engine.step()
        seconds = time.perf_counter() - began
        self._num_steps += 1
        self._busy += seconds
        if len(results):
            self._tell(results, self._standing(seconds))

    def _tell(self, results: StepResults, standing: Standing) -> None:
        if results.requests != self._met:
            self._meet(results.requests)
        if standing.stats.num_preemptions != self._num_preemptions:
            self._num_preemptions = standing.stats.num_preemptions
            self._untold.update(self._entries)
        for client, party, entries in self._parties:
            counted = []
            if self._untold:
                counted = [(i, e.stats) for i, e in enumerate(entries) if e.request.id in self._untold]
                self._untold.difference_update(
                    entries[i].request.id for i, stats in counted if stats.first_token_at is not None
                )
            frame = frame_of(client.sequence, standing, results, party, counted)
            self._try(client, client.send, self._socket, frame)
        self._told = time.monotonic()
        for i in results.finishes:
            entry = self._entries.get(results.requests[i].id)
            if entry is not None:  # its server may be gone by now
                self._remove(entry)

    def _meet(self, requests: list[Request]) -> None:
        """Whose they are, for as long as they stay the same."""
        of: dict[Client, list[tuple[int, Entry]]] = {}
        for i, request in enumerate(requests):
            entry = self._entries[request.id]
            of.setdefault(entry.client, []).append((i, entry))
        self._met, self._parties = requests, []
        for client, mine in of.items():
            at = None if len(of) == 1 else [i for i, _ in mine]
            party = Party.of(at, [(entry.handle, entry.wants, entry.top) for _, entry in mine])
            self._parties.append((client, party, [entry for _, entry in mine]))

    def _tell_refusals(self, client: Client) -> None:
        if client.refusals:
            refusals, client.refusals = client.refusals, []
            client.send(self._socket, refusal_frame(client.sequence, self._standing(), refusals))

    def _rest(self) -> None:
        """Nothing to do, or nobody to tell: wait for somebody to say something."""
        full = any(client.outbox for client in self._clients.values())
        ready = dict(self._poller.poll(int(1000 * (FULL_SECONDS if full else IDLE_SECONDS))))
        if self._bell.fileno() in ready:
            self._bell.hush()
        if not ready and time.monotonic() - self._told >= IDLE_SECONDS:
            self._told = time.monotonic()
            self._each(self._tell_standing)

    def _tell_standing(self, client: Client) -> None:
        """It may go missing: the next one says the same."""
        frame = refusal_frame(client.sequence, self._standing(), [])
        if not client.outbox and client.put(self._socket, frame):
            client.sequence += 1


def welcome_of(llm: LLM, options: dict[str, Any]) -> Welcome:
    engine = llm.engine
    strategies = {}
    for name in {*STRATEGIES, engine.strategy_name}:
        strategies[name] = lookup(STRATEGIES, name, "verify_strategy")(engine.ops, {}).guarantee()
    speculative = llm.config.speculative
    return Welcome(
        version=VERSION,
        pid=os.getpid(),
        model=llm.config.model,
        options=options,
        limits=engine.limits,
        sources=engine.sources,
        strategies=strategies,
        accept_policy=speculative.accept_policy if speculative else "normal",
        strategy=engine.strategy_name,
        plain=PLAIN_STRATEGY,
        eos_token_ids=engine.eos_token_ids,
        tokenizer=None if llm.tokenizer is None else llm.tokenizer.where,
        description=engine.describe(),
    )
