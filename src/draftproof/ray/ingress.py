"""Ingress: reads a request, routes it to a replica of the engine, and forwards the response.

A replica that ends in mid-stream ends its streams with an error event in the form of the route.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from draftproof.ray.routed_request import new_request
from draftproof.serve.http.errors import MESSAGES_PATH, ApiError, in_form_of
from draftproof.serve.http.io import read_whole, send_error
from draftproof.serve.http.request_guard import ClientDisconnected
from draftproof.serve.http.sse import DONE
from draftproof.serve.settings import ADMIN_PATHS

RESPONSES_PATH = "/v1/responses"
REPLICA_LOST = "the replica that computed this response has ended: try again"
log = logging.getLogger("ray.serve")


class Ingress:
    """Deployment class that forwards requests to `engine`, a handle of the engine's deployment."""

    def __init__(self, engine: Any, max_body_bytes: int, body_seconds: float) -> None:
        self._engine = engine.options(stream=True)
        self._max_body_bytes, self._body_seconds = max_body_bytes, body_seconds

    async def __call__(self, request: Request) -> Response:
        """Return a response that forwards the request when it is sent."""
        return _Forwarded(self)

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as an ASGI application."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        response = _ForwardedResponse(path, send)
        try:
            if path in ADMIN_PATHS:
                text = f"{path} would reach one replica only: deploy the application again instead"
                raise ApiError(400, text, code="unsupported_route")
            body = await read_whole(receive, self._max_body_bytes, self._body_seconds)
            await self._forward(new_request(scope, body), response)
        except ClientDisconnected:
            return
        except Exception as error:
            await response.fail(_to_api_error(error), error)

    async def _forward(self, request: Any, response: _ForwardedResponse) -> None:
        answers = self._engine.handle.remote(request)
        is_complete = False
        try:
            async for messages in answers:
                for message in messages:
                    await response.send(message)
            is_complete = True
        finally:
            if not is_complete:
                answers.cancel()


class _ForwardedResponse:
    """Response whose messages are sent as they arrive from a replica."""

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self._is_started = self._is_stream = False
        self._num_events = 0  # of /v1/responses, which numbers them

    async def send(self, message: Message) -> None:
        """Send a message. Ray's proxy adds the header x-request-id itself."""
        if message["type"] == "http.response.start":
            headers = [item for item in message["headers"] if item[0] != b"x-request-id"]
            message = {**message, "headers": headers}
            self._is_started = True
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in headers)
        elif self._path == RESPONSES_PATH:
            self._num_events += message.get("body", b"").count(b'"sequence_number":')
        await self._send(message)

    async def fail(self, error: ApiError, cause: Exception) -> None:
        """Send an error: as the response, or as the last event of a stream."""
        if error.status == 500:
            log.error("a request failed", exc_info=cause)
        shown = in_form_of(self._path, error)
        if not self._is_started:
            await send_error(self._send, shown)
        elif self._is_stream:
            await self._send({"type": "http.response.body", "body": self._event(shown), "more_body": False})
        else:
            raise cause  # the connection is closed before the announced length

    def _event(self, error: ApiError) -> bytes:
        if self._path == MESSAGES_PATH:
            return b"event: error\ndata: %s\n\n" % error.body
        if self._path == RESPONSES_PATH:
            event = {"type": "error", "code": "server_error", "message": error.message, "param": None}
            data = msgspec.json.encode({**event, "sequence_number": self._num_events})
            return b"event: error\ndata: %s\n\n" % data
        return b"data: %s\n\n" % error.body + DONE


class _Forwarded(Response):
    """Response for Ray Serve that is an ASGI application."""

    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ingress.forward(scope, receive, send)


def _to_api_error(error: Exception) -> ApiError:
    """Return the error response of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RayActorError):
        return ApiError(503, REPLICA_LOST, code="engine_down")
    if isinstance(error, (BackPressureError, DeploymentUnavailableError)):
        return ApiError(503, f"no replica can take the request: {error}", code="too_many")
    return ApiError(500, "internal error; the details are in the server's log", code="internal_error")
