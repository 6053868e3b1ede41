"""Forms of generation routes: the body, its translation, the response, its events and its errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from draftproof.outputs import LogprobRow, RequestOutput, TokenEvent
from draftproof.serve.api.generation.logprob_format import TokenStrings
from draftproof.serve.api.generation.request_parser import ParsedRequest
from draftproof.serve.api.generation.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    SamplingRequest,
)
from draftproof.serve.api.generation.response_builder import (
    ChatBuilder,
    CompletionBuilder,
    Fields,
    ResponseBuilder,
)
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.request_log import RequestRecord
from draftproof.serve.http.sse import SseEncoder


class EventEncoder(Protocol):
    """Encoder of the events of one HTTP request. `p` is the index of a prompt."""

    def open(self, out: bytearray, p: int, rows: Sequence[LogprobRow | None]) -> None:
        """Write what comes before the first token."""

    def add(self, out: bytearray, p: int, events: Sequence[TokenEvent]) -> None:
        """Write tokens of prompt `p`. GenerationFailed after the tokens before a failure."""

    def close(self, out: bytearray, outputs: Sequence[RequestOutput]) -> None:
        """Write what comes after the last token."""

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error after the status line was sent."""


class GenerationRoute:
    """Form of one route. Routes of other APIs translate their body to a chat request."""

    schema: type[SamplingRequest]
    id_prefix: str

    def request(self, body: Any, record: RequestRecord) -> GenerationRequest:
        """Return the request of a body."""
        assert isinstance(body, GenerationRequest)
        return body

    def builder(
        self,
        body: Any,
        record: RequestRecord,
        parsed: ParsedRequest,
        strings: TokenStrings,
        head: Fields,
        max_drafts: int,
    ) -> ResponseBuilder:
        """Return the builder of the response. `head`: fields that every body and chunk begins with."""
        raise NotImplementedError

    def encoder(self, builder: Any) -> EventEncoder:
        """Return the encoder of a stream."""
        return SseEncoder(builder)

    def error(self, error: ApiError) -> ApiError:
        """Return an error in the form of the route."""
        return error


class CompletionRoute(GenerationRoute):
    """/v1/completions."""

    schema = CompletionRequest
    id_prefix = "cmpl-"

    def builder(self, body: Any, record: RequestRecord, *args: Any) -> ResponseBuilder:
        """Return the builder of the response."""
        return CompletionBuilder(*args)


class ChatRoute(GenerationRoute):
    """/v1/chat/completions."""

    schema = ChatCompletionRequest
    id_prefix = "chatcmpl-"

    def builder(self, body: Any, record: RequestRecord, *args: Any) -> ResponseBuilder:
        """Return the builder of the response."""
        return ChatBuilder(*args)


def renamed(error: ApiError, names: dict[str, str], own: Collection[str]) -> ApiError:
    """Return an error of a chat request with the names of another API's options; `own`: as they are."""
    param = error.param or ""
    if error.code == "unknown_option" or (error.code == "unsupported_option" and param in own):
        return error
    for name, other in names.items():
        if param == name or param.startswith((f"{name}[", f"{name}.")):
            text = error.message
            text = other + text.removeprefix(param) if text.startswith(param) else text
            return ApiError(error.status, text, other, error.code)
    return error
