"""Middleware around all routes: host, API key, request id, security headers, access log."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.http.errors import UNREAD_BODY_STATUSES, ApiError, in_form_of, to_api_error
from draftproof.serve.http.io import IncomingBody, send_error
from draftproof.serve.http.request_log import LOGGER, RequestRecord
from draftproof.serve.http.security import HEADERS, PAGE_HEADERS, check_host
from draftproof.serve.settings import ADMIN_PATHS, Settings

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# paths without a key: health, version, API description, and the page, which has a field for the key
PUBLIC_PATHS = {"/", "/health", "/version", "/openapi.json"}
PUBLIC_FOLDER = "/page/"


class RequestMiddleware:
    """ASGI middleware. It costs one coroutine per chunk of a stream."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: ServerMetrics, paths: set[str]) -> None:
        self._app, self._settings, self._metrics, self._paths = app, settings, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        sent = headers.get(b"x-request-id", b"").decode("latin-1")
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        record = RequestRecord(
            id=sent if REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex,
            method=scope["method"],
            path=path if path in self._paths else "other",
            started=time.perf_counter(),
        )
        scope.setdefault("state", {})["record"] = record
        started, body = False, IncomingBody(receive)
        is_page = path == "/" or path.startswith(PUBLIC_FOLDER)
        security = [*HEADERS, *(PAGE_HEADERS if is_page else ())]

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                request_id = (b"x-request-id", record.id.encode())  # a body may change it
                message["headers"] = [*message["headers"], *security, request_id]
            is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_end and record.status in UNREAD_BODY_STATUSES:
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            check_host(headers.get(b"host"), self._settings.allowed_hosts)
            self._check_key(path, headers, record)
            await self._app(scope, body.receive, send_with_id)
        except Exception as error:
            api_error = in_form_of(path, to_api_error(error))
            if api_error.status == 500:
                LOGGER.error("request failed", exc_info=error, extra={"fields": {"request_id": record.id}})
            if started:
                raise
            await send_error(send_with_id, api_error)
        finally:
            self._metrics.requests[record.path, record.status] += 1
            record.write(time.perf_counter() - record.started)

    def _check_key(self, path: str, headers: dict[bytes, bytes], record: RequestRecord) -> None:
        keys = self._settings.api_keys
        is_free = path in (*PUBLIC_PATHS, *ADMIN_PATHS) or path.startswith(PUBLIC_FOLDER)
        if not keys or is_free:  # the operator's routes check a key of their own
            return
        scheme, _, sent = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if not scheme:  # clients of the Messages API
            scheme, sent = "bearer", headers.get(b"x-api-key", b"").decode("latin-1")
        name = keys.find(sent.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise ApiError(
                401,
                "this server needs an API key: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        record.key = name
