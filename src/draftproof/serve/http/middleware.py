"""Around everything: who may come in, an id for each request, its line in the log."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from draftproof.serve.api.metrics import Meters
from draftproof.serve.http.errors import Problem, problem_of
from draftproof.serve.http.io import send_problem
from draftproof.serve.http.request_log import LOGGER, Ticket
from draftproof.serve.settings import Settings

NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Without a key: whether the server lives, what it speaks, and the page, which asks its user for one.
OPEN = {"/", "/health", "/version", "/openapi.json"}
OPEN_FOLDER = "/page/"


class Guard:
    """A pure ASGI layer. Per chunk of a stream it costs one more coroutine and nothing else."""

    def __init__(self, app: ASGIApp, settings: Settings, meters: Meters, paths: set[str]) -> None:
        self._app, self._settings, self._meters, self._paths = app, settings, meters, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        sent = headers.get(b"x-request-id", b"").decode("latin-1")
        ticket = Ticket(
            id=sent if NAME.fullmatch(sent) else uuid.uuid4().hex,
            method=scope["method"],
            path=scope["path"] if scope["path"] in self._paths else "other",
            started=time.perf_counter(),
        )
        scope.setdefault("state", {})["ticket"] = ticket
        started = False

        async def tell(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                ticket.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", ticket.id.encode())]
            await send(message)

        try:
            self._check_key(scope["path"], headers, ticket)
            await self._app(scope, receive, tell)
        except Exception as error:
            problem = problem_of(error)
            if problem.status == 500:
                LOGGER.error("request failed", exc_info=error, extra={"facts": {"request_id": ticket.id}})
            if started:
                raise
            await send_problem(tell, problem)
        finally:
            self._meters.requests[ticket.path, ticket.status] += 1
            ticket.write(time.perf_counter() - ticket.started)

    def _check_key(self, path: str, headers: dict[bytes, bytes], ticket: Ticket) -> None:
        keys = self._settings.api_keys
        if not keys or path in OPEN or path.startswith(OPEN_FOLDER):
            return
        scheme, _, sent = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        name = keys.find(sent.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise Problem(
                401,
                "this server needs an API key: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        ticket.key = name
