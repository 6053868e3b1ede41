"""ASGI application of the server: routes over an AsyncLLM whose engine is in this or another process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from draftproof.serve.api.admin_routes import AdminRoutes
from draftproof.serve.api.generation.handler import CompletionHandler
from draftproof.serve.api.generation.route_forms import ChatRoute, CompletionRoute
from draftproof.serve.api.info_routes import Endpoint, InfoRoutes
from draftproof.serve.api.messages.routes import MessagesRoute, TokenCounter
from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.api.pooling.handler import PoolingRoutes
from draftproof.serve.api.pooling.scores import ScoreRoutes
from draftproof.serve.api.responses.routes import InputTokenCounter, ResponsesRoute, StoredResponses
from draftproof.serve.api.responses.store import ResponseStore
from draftproof.serve.http.errors import MESSAGES_PATH, ApiError, in_form_of
from draftproof.serve.http.middleware import RequestMiddleware
from draftproof.serve.http.request_guard import OpenRequestCounts, RequestGuard
from draftproof.serve.settings import Settings

SCORE_PATHS = ("/v1/score", "/score")  # vLLM's
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")  # vLLM's, Jina's and Cohere's
PAGE_FOLDER = Path(__file__).parent / "page"


def create_app(
    llm: Any,
    settings: Settings | None = None,
    metrics: ServerMetrics | None = None,
    counts: OpenRequestCounts | None = None,
) -> FastAPI:
    """Build the application over `llm`, an AsyncLLM, which the caller shuts down.

    `counts`: open requests shared with other HTTP processes. `app.state.guard.start_draining()` rejects new
    requests.
    """
    settings = settings or Settings()
    names = settings.served_model_names or (llm.config.model,)
    guard = RequestGuard(settings, counts)
    metrics = metrics or ServerMetrics(llm, names[0], settings.vllm_metrics)
    completions = CompletionHandler(llm, settings, guard, metrics, names)
    routes = InfoRoutes(llm, settings, guard, metrics, completions, names).routes()
    routes["/v1/completions"] = "POST", partial(completions, route=CompletionRoute())
    routes["/v1/chat/completions"] = "POST", partial(completions, route=ChatRoute())
    pooling = PoolingRoutes(llm, settings, guard, metrics, completions)
    routes["/v1/embeddings"] = "POST", pooling.embeddings
    scores = ScoreRoutes(pooling)
    routes |= dict.fromkeys(SCORE_PATHS, ("POST", scores.score))
    routes |= dict.fromkeys(RERANK_PATHS, ("POST", scores.rerank))
    routes |= AdminRoutes(llm, settings).routes()
    store = ResponseStore(settings)
    responses, stored = ResponsesRoute(store), StoredResponses(store)
    routes["/v1/responses"] = "POST", partial(completions, route=responses)
    counter = InputTokenCounter(settings, guard, completions, responses)
    routes["/v1/responses/input_tokens"] = "POST", counter
    routes["/v1/responses/{id}"] = "GET DELETE", stored
    routes["/v1/responses/{id}/input_items"] = "GET", stored.input_items
    routes[MESSAGES_PATH] = "POST", partial(completions, route=MessagesRoute(completions.prompts))
    routes[f"{MESSAGES_PATH}/count_tokens"] = "POST", TokenCounter(settings, guard, completions)
    app = FastAPI(title="Draftproof", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.guard, app.state.metrics = guard, metrics
    for path, (method, handler) in routes.items():
        app.router.routes.append(Route(path, Endpoint(handler), methods=method.split()))
    app.router.routes.append(Route("/", _page, methods=["GET"]))
    app.mount("/page", StaticFiles(directory=PAGE_FOLDER), name="page")
    app.add_exception_handler(HTTPException, _unknown_route)
    app.add_middleware(RequestMiddleware, settings=settings, metrics=metrics, paths={*routes, "/"})
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


async def _page(request: Request) -> Response:
    return FileResponse(PAGE_FOLDER / "index.html")


async def _unknown_route(request: Request, error: Exception) -> Response:
    """Return the error for an unknown path or method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:100]}: {error.detail.lower()}; see /openapi.json"
    api_error = in_form_of(request.url.path, ApiError(error.status_code, text, code="no_such_route"))
    return Response(api_error.body, error.status_code, dict(error.headers or {}), "application/json")
