"""The few things of HTTP that routes share: a body that is limited in size and time, answers, problems."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from draftproof.serve.http.errors import Problem, decode
from draftproof.serve.http.request_guard import ClientGone
from draftproof.serve.settings import Settings

BIG_BODY = 256 << 10  # bytes that an event loop should not decode itself
T = TypeVar("T")
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Reply:
    """A stream to a client. Its status line goes with the first bytes."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.started = False

    async def more(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self.send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def last(self, data: bytes) -> None:
        await self.more(data)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


async def apart(call: Callable[[], T], big: bool) -> T:
    """Something that may take long, in a thread of its own then, so that others' streams go on."""
    return await asyncio.to_thread(call) if big else call()


async def send_body(
    send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] = JSON
) -> None:
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers + length})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: msgspec.Struct, status: int = 200) -> None:
    await send_body(send, msgspec.json.encode(value), status)


async def send_problem(send: Send, problem: Problem) -> None:
    await send_body(send, problem.body, problem.status, problem.headers)


async def read_json(scope: Scope, receive: Receive, settings: Settings, kind: type[T]) -> T:
    """A body as its definition has it."""
    body = await read_body(scope, receive, settings)
    made: T = await apart(partial(decode, body, kind), len(body) > BIG_BODY)
    return made


async def read_body(scope: Scope, receive: Receive, settings: Settings) -> bytes:
    """All of it; Problem if it is no JSON, too large, or too slow."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Problem(415, "the body must be JSON: send the header 'Content-Type: application/json'")
    most = settings.max_body_bytes
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(settings.body_seconds):
            return await _read(receive, most)
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {settings.body_seconds:g} s") from None


async def _read(receive: Receive, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("gone")
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(most: int) -> Problem:
    return Problem(
        413, f"the body is larger than the {most} bytes that this server takes", code="body_too_large"
    )
