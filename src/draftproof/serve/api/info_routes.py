"""The routes that say what is here: models, health, version, metrics, tokens, /openapi.json."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from draftproof import __version__
from draftproof.serve.api.completions import Answers
from draftproof.serve.api.metrics import Meters
from draftproof.serve.api.openapi import document
from draftproof.serve.api.request_parser import LONG_TEXT
from draftproof.serve.api.request_schema import DetokenizeAsked, TokenizeAsked
from draftproof.serve.api.response_schema import (
    DetokenizeReply,
    Health,
    ModelCard,
    ModelList,
    TokenizeReply,
    Version,
)
from draftproof.serve.http.errors import Problem, problem_of
from draftproof.serve.http.io import apart, read_json, send_body, send_json, send_problem
from draftproof.serve.http.request_guard import ClientGone, Desk
from draftproof.serve.settings import Settings

METRICS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Facts:
    """Answers that need no engine step."""

    def __init__(
        self, llm: Any, settings: Settings, desk: Desk, meters: Meters, answers: Answers, names: Sequence[str]
    ) -> None:
        self._llm, self._settings, self._desk, self._meters = llm, settings, desk, meters
        self._answers, self._wishes, self._names = answers, answers.wishes, names
        self._created = int(time.time())
        begins = bool(self._wishes.tokenizer.encode(""))
        told = document(names, llm.limits.vocab_size, begins, bool(settings.api_keys))
        self._document = msgspec.json.encode(told)

    def routes(self) -> dict[str, tuple[str, Handler]]:
        return {
            "/v1/models": ("GET", self.models),
            "/v1/models/{model:path}": ("GET", self.model),
            "/health": ("GET", self.health),
            "/version": ("GET", self.version),
            "/metrics": ("GET", self.metrics),
            "/openapi.json": ("GET", self.openapi),
            "/tokenize": ("POST", self.tokenize),
            "/detokenize": ("POST", self.detokenize),
        }

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, ModelList(data=[self._card(name) for name in self._names]))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = Request(scope).path_params["model"]
        await send_json(send, self._card(self._answers.check_model(name)))

    def _card(self, name: str) -> ModelCard:
        length = self._llm.limits.max_model_len
        return ModelCard(id=name, created=self._created, root=self._llm.config.model, max_model_len=length)

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._health()
        await send_json(send, state, 200 if state.status == "ok" else 503)

    def _health(self) -> Health:
        worker = self._llm.worker_status()
        restarts = worker.restarts if worker else 0
        if self._llm.dead:
            return Health(
                status="failed", reason=worker.reason if worker else "see the log", restarts=restarts
            )
        if self._desk.draining:
            return Health(status="draining", restarts=restarts)
        if worker is not None and worker.state != "ready":
            return Health(status=worker.state, reason=worker.reason, restarts=restarts)
        return Health(status="ok", restarts=restarts)

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, Version(version=__version__, engine=self._llm.describe()))

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, self._meters.page(), headers=METRICS)

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, self._document)

    # --- tokens -------------------------------------------------------------------------------------

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = await read_json(scope, receive, self._settings, TokenizeAsked)
        self._answers.check_model(asked.model)
        if (asked.prompt is UNSET) == (asked.messages is UNSET):
            raise Problem(400, "give a prompt or messages", "prompt")
        if isinstance(asked.prompt, str):
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(asked, name) is not None:
                    raise Problem(400, f"{name} is for messages", name)
            ids = await self._wishes.encode(asked.prompt, asked.add_special_tokens is not False)
        elif asked.add_special_tokens is not None:
            raise Problem(
                400, "add_special_tokens is for a prompt: a template says its own", "add_special_tokens"
            )
        else:
            ids = await self._wishes.conversation(asked)
        names = self._answers.token_names
        reply = TokenizeReply(count=len(ids), max_model_len=self._llm.limits.max_model_len, tokens=ids)
        if asked.return_token_strs:
            reply.token_strs = [names[i][0] for i in ids]
        await send_json(send, reply)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = await read_json(scope, receive, self._settings, DetokenizeAsked)
        self._answers.check_model(asked.model)
        vocab = self._llm.limits.vocab_size
        if asked.tokens and max(asked.tokens) >= vocab:
            raise Problem(
                400, f"tokens holds {max(asked.tokens)}, outside the vocabulary 0..{vocab - 1}", "tokens"
            )
        make = partial(self._wishes.tokenizer.decode, asked.tokens, bool(asked.skip_special_tokens))
        text = await apart(make, len(asked.tokens) > LONG_TEXT)
        await send_json(send, DetokenizeReply(prompt=text))


def told(handler: Handler) -> Handler:
    """A handler whose problems are answers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await handler(scope, receive, send)
        except ClientGone:
            scope["state"]["ticket"].status = 499
        except Exception as error:
            problem = problem_of(error)
            if problem.status == 500:
                raise
            await send_problem(send, problem)

    return answer
