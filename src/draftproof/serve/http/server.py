"""HTTP server on a listening socket: runs until a signal, then finishes open requests."""

from __future__ import annotations

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
from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.http.app import create_app
from draftproof.serve.http.request_guard import OpenRequestCounts, RequestGuard
from draftproof.serve.http.uvicorn_protocol import Protocol
from draftproof.serve.settings import Settings

BACKLOG = 4096
CLOSE_SECONDS = 5.0  # after draining, for the rest of the responses to be sent
TICKS_PER_SECOND = 10
Tick = Callable[[], object]
log = logging.getLogger("draftproof.serve")


class HttpServer(uvicorn.Server):
    """Uvicorn server that drains: new requests are rejected, open ones have `drain_seconds`."""

    def __init__(
        self, config: Config, llm: Any, guard: RequestGuard, settings: Settings, tick: Tick | None
    ) -> None:
        super().__init__(config)
        self._llm, self._guard, self._settings, self._tick = llm, guard, settings, tick

    async def on_tick(self, counter: int) -> bool:
        """Call `tick` once a second."""
        if self._tick is not None and counter % TICKS_PER_SECOND == 0:
            self._tick()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining at a signal."""
        self._guard.start_draining()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close."""
        self._guard.start_draining()
        log.info("draining", extra={"fields": {"open": self._guard.num_open}})
        # new connections are accepted meanwhile, and their requests get 503
        aborted = await self._llm.drain(self._settings.drain_seconds)
        await super().shutdown(sockets)
        log.info("drained", extra={"fields": {"aborted": aborted}})
        await self._llm.shutdown()


def listen(host: str, port: int, stall_seconds: float) -> socket.socket:
    """Bind the socket; called before the model is loaded, so that a used port is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # close connections whose client does not read
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stall_seconds))
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
        text = f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        raise ConfigError(text) from error
    return made


def uvicorn_config(app: Any, settings: Settings) -> Config:
    """Return uvicorn's configuration."""
    return Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=settings.root_path,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        backlog=BACKLOG,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(settings.drain_seconds + CLOSE_SECONDS),
    )


def serve(
    llm: Any,
    settings: Settings,
    listener: socket.socket,
    metrics: ServerMetrics,
    *,
    counts: OpenRequestCounts | None = None,
    ready: Callable[[], object] | None = None,
    tick: Tick | None = None,
    parent: int | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT, or the other end of the pipe `parent` is closed; then drain.

    `ready` is called when the server is set up, `tick` once a second.
    """
    _raise_file_limit()
    app = create_app(llm, settings, metrics, counts)
    server = HttpServer(uvicorn_config(app, settings), llm, app.state.guard, settings, tick)
    # uvicorn raises the signals that it caught again after its end, while the caller still cleans up; and a
    # signal before uvicorn installs its handlers must count as well
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
    """Stop the server when the process that started it closes its end of the pipe, or ends."""

    def wait() -> None:
        while os.read(fd, 1):
            pass
        server.should_exit = True

    threading.Thread(target=wait, name="draftproof-parent", daemon=True).start()


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
