"""Routes of the Responses API: create, return, delete, list input items, count input tokens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from draftproof.serve.api.generation.handler import CompletionHandler
from draftproof.serve.api.generation.request_schema import ChatCompletionRequest, Message
from draftproof.serve.api.generation.route_forms import EventEncoder, GenerationRoute, renamed
from draftproof.serve.api.responses.builder import ResponsesBuilder, ResponsesEncoder
from draftproof.serve.api.responses.input_items import item_page
from draftproof.serve.api.responses.request_schema import ResponseRequest
from draftproof.serve.api.responses.response_schema import DeletedResponse, InputTokenCount
from draftproof.serve.api.responses.store import OFF, ResponseStore
from draftproof.serve.api.responses.translate import chat_request
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.io import read_json, send_body, send_json
from draftproof.serve.http.request_guard import RequestGuard
from draftproof.serve.http.request_log import RequestRecord
from draftproof.serve.settings import Settings

# names of the chat request's options in the body of this route
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesRoute(GenerationRoute):
    """POST /v1/responses."""

    schema = ResponseRequest
    id_prefix = "resp_"

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def request(self, body: Any, record: RequestRecord) -> ChatCompletionRequest:
        """Return the chat request of a body."""
        if body.store and not self._store.is_on:
            raise ApiError(400, f"store: {OFF}", "store", "unsupported_option")
        return chat_request(body, self._earlier(body, record.key))

    def _earlier(self, body: ResponseRequest, key: str) -> list[Message]:
        if body.previous_response_id is None:
            return []
        return self._store.find(key, body.previous_response_id, "previous_response_id").messages()

    def builder(self, body: Any, record: RequestRecord, *args: Any) -> ResponsesBuilder:
        """Return the builder of the response."""
        made = ResponsesBuilder(*args)
        made.body, made.store, made.key = body, self._store, record.key
        made.earlier = self._earlier(body, record.key)
        return made

    def encoder(self, builder: Any) -> EventEncoder:
        """Return the encoder of a stream."""
        return ResponsesEncoder(builder)

    def error(self, error: ApiError) -> ApiError:
        """Return an error with the names of this route."""
        return renamed(error, _NAMES, ResponseRequest.unsupported)


class StoredResponses:
    """Handlers of GET and DELETE /v1/responses/ID."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return or delete a stored response of the same API key."""
        key, id = scope["state"]["record"].key, Request(scope).path_params["id"]
        if scope["method"] == "DELETE":
            self._store.delete(key, id)
            await send_json(send, DeletedResponse(id=id))
        else:
            if Request(scope).query_params.get("stream", "false") != "false":
                raise ApiError(400, "stream: a stored response is returned whole", "stream")
            await send_body(send, self._store.find(key, id).body)

    async def input_items(self, scope: Scope, receive: Receive, send: Send) -> None:
        """List the input items of a stored response, those of the previous responses included."""
        key, request = scope["state"]["record"].key, Request(scope)
        id = request.path_params["id"]
        messages = self._store.find(key, id).messages()[:-1]
        await send_json(send, item_page(id, messages, request.query_params))


class InputTokenCounter:
    """Handler of POST /v1/responses/input_tokens."""

    def __init__(
        self, settings: Settings, guard: RequestGuard, completions: CompletionHandler, route: ResponsesRoute
    ) -> None:
        self._settings, self._guard, self._completions, self._route = settings, guard, completions, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return the number of prompt tokens that a response to this body would have."""
        record: RequestRecord = scope["state"]["record"]
        with self._guard.admit(record):
            body = await read_json(scope, receive, self._settings, ResponseRequest)
            self._completions.check_model(body.model)
            try:
                ids = await self._completions.prompts.conversation(self._route.request(body, record))
            except ApiError as error:
                raise self._route.error(error) from error
        await send_json(send, InputTokenCount(input_tokens=len(ids)))
