"""The server as an ASGI application: routes over an AsyncLLM, in this process or in front of a worker's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from draftproof.serve.api.completions import Answers
from draftproof.serve.api.info_routes import Facts, Handler, told
from draftproof.serve.api.metrics import Meters
from draftproof.serve.http.errors import Problem
from draftproof.serve.http.middleware import Guard
from draftproof.serve.http.request_guard import Desk
from draftproof.serve.http.shared_limits import Seats
from draftproof.serve.settings import Settings

PAGE = Path(__file__).parent / "page"


class Endpoint:
    """A handler as an application: starlette calls functions with a Request, and objects with the socket."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope, receive, send)


def create_app(
    llm: Any, settings: Settings | None = None, meters: Meters | None = None, seats: Seats | None = None
) -> FastAPI:
    """Routes over `llm`, an AsyncLLM, which stays the caller's to shut down. `seats`: of several processes.

    `app.state.desk.draining = True` refuses newcomers.
    """
    settings = settings or Settings()
    names = settings.served_model_names or (llm.config.model,)
    desk = Desk(settings, seats)
    meters = meters or Meters(llm, names[0], settings.vllm_metrics)
    answers = Answers(llm, settings, desk, meters, names)
    facts = Facts(llm, settings, desk, meters, answers, names)
    routes = facts.routes()
    routes["/v1/completions"] = "POST", partial(answers, chat=False)
    routes["/v1/chat/completions"] = "POST", partial(answers, chat=True)
    app = FastAPI(title="Draftproof", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.desk, app.state.meters = desk, meters
    for path, (method, handler) in routes.items():
        app.router.routes.append(Route(path, Endpoint(told(handler)), methods=[method]))
    app.router.routes.append(Route("/", _page, methods=["GET"]))
    if PAGE.is_dir():
        app.mount("/page", StaticFiles(directory=PAGE), name="page")
    app.add_exception_handler(HTTPException, _not_here)
    app.add_middleware(Guard, settings=settings, meters=meters, paths={*routes, "/"})
    return app


async def _page(request: Request) -> Response:
    index = PAGE / "index.html"
    if index.exists():
        return FileResponse(index)
    return PlainTextResponse("Draftproof. The API is at /v1, its description at /openapi.json.\n")


async def _not_here(request: Request, error: Exception) -> Response:
    """No such route, or not by this method, as OpenAI says it."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:100]}: {error.detail.lower()}; see /openapi.json"
    problem = Problem(error.status_code, text, code="no_such_route")
    return Response(problem.body, error.status_code, dict(error.headers or {}), "application/json")
