"""Routes without generation: models, health, version, metrics, /openapi.json."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from draftproof import __version__
from draftproof.serve.api.generation import response_schema as schema
from draftproof.serve.api.generation.handler import CompletionHandler
from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.api.openapi import document
from draftproof.serve.api.token_routes import TokenRoutes
from draftproof.serve.http.errors import in_form_of, to_api_error
from draftproof.serve.http.io import send_body, send_error, send_json
from draftproof.serve.http.request_guard import ClientDisconnected, RequestGuard
from draftproof.serve.settings import Settings

METRICS_HEADERS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class InfoRoutes:
    """Handlers of the routes that need no engine step."""

    def __init__(
        self,
        llm: Any,
        settings: Settings,
        guard: RequestGuard,
        metrics: ServerMetrics,
        completions: CompletionHandler,
        names: Sequence[str],
    ) -> None:
        self._llm, self._guard, self._metrics = llm, guard, metrics
        self._completions, self._names = completions, names
        self._tokens = TokenRoutes(llm, settings, guard, completions)
        self._created = int(time.time())
        adds_tokens = bool(completions.prompts.tokenizer.encode(""))
        openapi = document(names, llm.limits, adds_tokens, bool(settings.api_keys))
        self._openapi = msgspec.json.encode(openapi)

    def routes(self) -> dict[str, tuple[str, Handler]]:
        """Return method and handler by path."""
        return {
            "/v1/models": ("GET", self.models),
            "/v1/models/{model:path}": ("GET", self.model),
            "/health": ("GET", self.health),
            "/version": ("GET", self.version),
            "/metrics": ("GET", self.metrics),
            "/openapi.json": ("GET", self.openapi),
            "/tokenize": ("POST", self._tokens.tokenize),
            "/detokenize": ("POST", self._tokens.detokenize),
            "/tokenizer_info": ("GET", self._tokens.tokenizer_info),
        }

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """List the models."""
        await send_json(send, schema.ModelList(data=[self._card(name) for name in self._names]))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Describe one model."""
        name = Request(scope).path_params["model"]
        await send_json(send, self._card(self._completions.check_model(name)))

    def _card(self, name: str) -> schema.ModelCard:
        length, root = self._llm.limits.max_model_len, self._llm.config.model
        return schema.ModelCard(id=name, created=self._created, root=root, max_model_len=length)

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Report the state of the engine: 200 if requests are served, otherwise 503."""
        state = self._health()
        await send_json(send, state, 200 if state.status == "ok" else 503)

    def _health(self) -> schema.Health:
        worker = self._llm.worker_status()
        restarts = worker.restarts if worker else 0
        if self._llm.dead:
            reason = worker.reason if worker else "see the log"
            return schema.Health(status="failed", reason=reason, restarts=restarts)
        if self._guard.draining:
            return schema.Health(status="draining", restarts=restarts)
        if worker is not None and worker.state != "ready":
            return schema.Health(status=worker.state, reason=worker.reason, restarts=restarts)
        return schema.Health(status="ok", restarts=restarts)

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Report the version and the engine's description."""
        await send_json(send, self._version())

    def _version(self) -> schema.Version:
        engine, weights = self._llm.describe(), self._llm.weights_version
        return schema.Version(version=__version__, engine=engine, weights_version=weights)

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the metrics for Prometheus."""
        await send_body(send, self._metrics.page(), headers=METRICS_HEADERS)

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the OpenAPI document."""
        await send_body(send, self._openapi)


class Endpoint:
    """Handler as an ASGI application that sends exceptions as error responses.

    Starlette would call a plain function with a Request.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handler(scope, receive, send)
        except ClientDisconnected:
            scope["state"]["record"].status = 499
        except Exception as error:
            api_error = to_api_error(error)
            if api_error.status == 500:
                raise
            await send_error(send, in_form_of(scope["path"], api_error))
