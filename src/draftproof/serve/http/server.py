"""Runs the application on a listening socket until it is told to stop, and drains what is open then."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.config import Config

from draftproof.errors import ConfigError
from draftproof.serve.api.metrics import Meters
from draftproof.serve.http.app import create_app
from draftproof.serve.http.request_guard import Desk
from draftproof.serve.http.shared_limits import Seats
from draftproof.serve.http.uvicorn_protocol import Protocol
from draftproof.serve.settings import Settings

BACKLOG = 4096
LAST_WORDS_SECONDS = 5.0  # after a drain, for what is left in sockets
TICKS_A_SECOND = 10
Tick = Callable[[], object]
log = logging.getLogger("draftproof.serve")


class HttpServer(uvicorn.Server):
    """A server that finishes what it has begun: new requests are refused, open ones have `drain_seconds`."""

    def __init__(self, config: Config, llm: Any, desk: Desk, settings: Settings, tick: Tick | None) -> None:
        super().__init__(config)
        self._llm, self._desk, self._settings, self._tick = llm, desk, settings, tick

    async def on_tick(self, counter: int) -> bool:
        if self._tick is not None and counter % TICKS_A_SECOND == 0:
            self._tick()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._desk.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._desk.draining = True
        log.info("draining", extra={"facts": {"open": self._desk.num_open}})
        drain = asyncio.create_task(self._llm.drain(self._settings.drain_seconds))
        await super().shutdown(sockets)
        aborted = await drain
        log.info("drained", extra={"facts": {"aborted": aborted}})
        await self._llm.shutdown()


def listen(host: str, port: int, stall_seconds: float) -> socket.socket:
    """Bound before anything is loaded: a port that is taken is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # whoever stops reading is let go, whatever was sent last
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stall_seconds))
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        why = error.strerror if isinstance(error, OSError) else "a port lies in 0..65535"
        raise ConfigError(
            f"cannot listen on {host}:{port}: {why}; choose another --host or --port"
        ) from error
    return made


def serve(
    llm: Any,
    settings: Settings,
    listener: socket.socket,
    meters: Meters,
    *,
    seats: Seats | None = None,
    ready: Callable[[], object] | None = None,
    tick: Tick | None = None,
    parent: int | None = None,
) -> None:
    """Until SIGTERM or SIGINT, or the other end of the pipe `parent` is gone; then drained.

    `ready` is called when nothing can go wrong any more, `tick` once a second.
    """
    _many_files()
    app = create_app(llm, settings, meters, seats)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(settings.drain_seconds + LAST_WORDS_SECONDS),
    )
    server = HttpServer(config, llm, app.state.desk, settings, tick)
    # uvicorn raises the signals that it caught once more when it has ended, and there is something to tidy
    # up; and one that comes before it listens for them counts
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    if parent is not None:
        _stop_with_parent(parent, server)
    listener.listen(BACKLOG)
    if ready is not None:
        ready()
    server.run(sockets=[listener])


def _stop_with_parent(fd: int, server: uvicorn.Server) -> None:
    """The process that started this one holds the other end, and nobody else does."""

    def wait() -> None:
        while os.read(fd, 1):
            pass
        server.should_exit = True

    threading.Thread(target=wait, name="draftproof-parent", daemon=True).start()


def _many_files() -> None:
    """As many connections as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
