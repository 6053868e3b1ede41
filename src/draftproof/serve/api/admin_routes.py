"""Routes of the operator: weight updates from files, sleep and wake-up, under the names of vLLM and SGLang.

They need an admin key, which is apart from the API keys. Without one they are closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from draftproof.errors import ConfigError, LoadError
from draftproof.serve.api.generation.response_schema import ResponseStruct
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.io import read_json, send_json
from draftproof.serve.settings import ADMIN_KEY_VARIABLE, ADMIN_PATHS, Settings


class UpdateWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /update_weights_from_disk: folders that the engine's process can read."""

    model_path: str | None = None
    draft_model_path: str | None = None
    version: int | None = None
    mode: Literal["keep", "wait"] = "keep"


class UpdateWeightsResponse(ResponseStruct, kw_only=True):
    """Result of an update."""

    success: bool = True
    message: str
    weights_version: int


class SleepState(ResponseStruct, kw_only=True):
    """State of the engine's sleep."""

    is_sleeping: bool
    weights_version: int


class AdminRoutes:
    """Handlers of the operator's routes."""

    def __init__(self, llm: Any, settings: Settings) -> None:
        self._llm, self._settings = llm, settings

    def routes(self) -> dict[str, tuple[str, Any]]:
        """Return method and handler by path."""
        handlers = self.update_weights, self.sleep, self.wake_up, self.is_sleeping
        methods = "POST", "POST", "POST", "GET"
        return dict(zip(ADMIN_PATHS, zip(methods, handlers, strict=True), strict=True))

    def _check_key(self, scope: Scope) -> None:
        keys = self._settings.admin_keys
        if not keys:
            text = f"the operator's routes are closed: start the server with {ADMIN_KEY_VARIABLE} set"
            raise ApiError(403, text, code="no_admin_key")
        header = Request(scope).headers.get("authorization", "")
        scheme, _, sent = header.partition(" ")
        if scheme.lower() != "bearer" or keys.find(sent.strip()) is None:
            raise ApiError(401, "this route needs the admin key", code="invalid_api_key")

    async def update_weights(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Update weights from safetensors files in a folder, while requests run."""
        self._check_key(scope)
        body = await read_json(scope, receive, self._settings, UpdateWeightsRequest)
        with _as_request_errors():
            version = await self._llm.update_weights(
                body.model_path or (),
                draft_weights=body.draft_model_path or (),
                version=body.version,
                mode=body.mode,
            )
        await send_json(send, UpdateWeightsResponse(message="weights are updated", weights_version=version))

    async def sleep(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Release the memory of weights and KV: /sleep?level=1."""
        self._check_key(scope)
        query = Request(scope).query_params
        level = query.get("level", "1")
        if level not in ("1", "2"):
            raise ApiError(400, f"level must be 1 or 2, got {level[:20]!r}", "level")
        with _as_request_errors():
            await self._llm.sleep(int(level), query.get("mode", "keep"))
        await self._send_state(send)

    async def wake_up(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Restore weights and KV: /wake_up, or /wake_up?tags=weights."""
        self._check_key(scope)
        with _as_request_errors():
            await self._llm.wake_up(Request(scope).query_params.getlist("tags") or None)
        await self._send_state(send)

    async def is_sleeping(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Report whether the engine sleeps."""
        self._check_key(scope)
        await self._send_state(send)

    async def _send_state(self, send: Send) -> None:
        is_sleeping = await self._llm.is_sleeping()
        await send_json(send, SleepState(is_sleeping=is_sleeping, weights_version=self._llm.weights_version))


@contextmanager
def _as_request_errors() -> Iterator[None]:
    """Turn refusals of an operation into errors of the request."""
    try:
        yield
    except (LoadError, ConfigError) as error:
        raise ApiError(400, str(error), code="operation_refused") from error
