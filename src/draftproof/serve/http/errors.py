"""HTTP errors: OpenAI's error object with a status and the invalid option."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from draftproof.errors import EngineClosedError, EngineDeadError, QueueFullError, RequestError, nearest
from draftproof.serve.api.generation.request_schema import UNSUPPORTED, Unsupported

RETRY_SECONDS = 1
UNREAD_BODY_STATUSES = (408, 413)  # the connection is closed, and the rest of the body is not used
_TYPES = {
    **dict.fromkeys((400, 405, 413, 415), "invalid_request_error"),
    **dict.fromkeys((408, 504), "timeout_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}  # others: server_error
MESSAGES_PATH = "/v1/messages"
_MESSAGE_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}  # others: as above
# exception, status, message (None: the exception's own), code; the first match counts
_ERRORS: tuple[tuple[type[Exception], int, str | None, str | None], ...] = (
    (QueueFullError, 503, None, "queue_full"),
    (RequestError, 400, None, None),
    (EngineDeadError, 503, "the engine has stopped; the reason is in the server's log", "engine_dead"),
    (EngineClosedError, 503, None, "engine_down"),
    (TimeoutError, 504, "the request took longer than this server allows", "timeout"),
)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.S)
_AT = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$", re.S)
_PART = re.compile(r"content\[\d+\]\.type$")
_TOOL = re.compile(r"tools\[(\d+|\.\.\.)\]\.type$")
_MISSING = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.S)


class ErrorDetail(msgspec.Struct):
    """Fields of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorDetail


class MessageErrorDetail(ErrorDetail, omit_defaults=True):
    """Fields of an error of the Messages API; `param` and `code` are additions of this server."""

    details: dict[str, str] | None = None


class MessageErrorResponse(msgspec.Struct):
    """Anthropic's error object."""

    error: MessageErrorDetail
    type: Literal["error"] = "error"


class ApiError(Exception):
    """Error response with a status. Raised anywhere between the socket and the engine."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param or None, code

    @property
    def detail(self) -> ErrorDetail:
        """Fields of the error."""
        return ErrorDetail(self.message, _TYPES.get(self.status, "server_error"), self.param, self.code)

    @property
    def body(self) -> bytes:
        """Response body."""
        return msgspec.json.encode(ErrorResponse(self.detail))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers."""
        headers = [(b"content-type", b"application/json")]
        if self.status in (429, 503):
            headers.append((b"retry-after", b"%d" % RETRY_SECONDS))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status in UNREAD_BODY_STATUSES:
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        return headers


class MessageError(ApiError):
    """Error response in the form of the Messages API."""

    @property
    def detail(self) -> MessageErrorDetail:
        """Fields of the error, with a type of that API."""
        kind = _MESSAGE_TYPES.get(self.status, super().detail.type)
        # the anthropic client then sends the whole conversation without a thread
        details = {"error_code": "thread_unsupported_request"} if self.param == "thread" else None
        return MessageErrorDetail(self.message, kind, self.param, self.code, details)

    @property
    def body(self) -> bytes:
        """Response body."""
        return msgspec.json.encode(MessageErrorResponse(self.detail))


def in_form_of(path: str, error: ApiError) -> ApiError:
    """Return an error in the form of the API that a path belongs to."""
    if MESSAGES_PATH not in path:  # a root path may precede it
        return error
    return MessageError(error.status, error.message, error.param, error.code)


def to_api_error(error: BaseException) -> ApiError:
    """Return the error response of an exception. Messages of internal errors go to the log only."""
    if isinstance(error, ApiError):
        return error
    for kind, status, text, code in _ERRORS:
        if isinstance(error, kind):
            return ApiError(status, text or str(error), getattr(error, "param", None), code)
    return ApiError(500, "internal error; the details are in the server's log", code="internal_error")


def decode(body: bytes, kind: type[Any]) -> Any:
    """Decode a body; ApiError with the invalid option if it does not match `kind`."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            return msgspec.convert(_with_integers(_without_no_effect(msgspec.json.decode(body), kind)), kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _without_no_effect(value: Any, kind: type[Any]) -> Any:
    """Remove unsupported options whose value changes nothing; some clients always send them."""
    if not isinstance(value, dict):
        return value
    known, table = kind.__struct_fields__, _unsupported(kind)
    return {
        name: item
        for name, item in value.items()
        if name in known or not _has_no_effect(item, table.get(name, ("", ()))[1])
    }


def _unsupported(kind: type[Any]) -> Unsupported:
    """Return the unsupported options of a body; a body may have a table of its own."""
    found: Unsupported = getattr(kind, "unsupported", UNSUPPORTED)
    return found


def _has_no_effect(item: Any, values: tuple[Any, ...]) -> bool:
    """Compare with the values that change nothing; 1 is not the same as true."""
    same = [known for known in values if known == item]
    return any(isinstance(known, bool) == isinstance(item, bool) for known in same)


def _with_integers(value: Any) -> Any:
    """Convert floats such as 7.0 to integers: JSON makes no difference, and some clients write them so."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _validation_error(text: str, kind: type[Any]) -> ApiError:
    table = _unsupported(kind)
    if found := _UNKNOWN.match(text):
        name, place = found[1], _place(found[2])
        short = _short(name)
        if place:
            return ApiError(400, f"{place}: unknown key {short!r}", f"{place}.{short}", "unknown_option")
        if name in table:
            return ApiError(400, f"{name}: {table[name][0]}", name, "unsupported_option")
        hint = nearest(name, kind.__struct_fields__, "see /openapi.json for the options")
        return ApiError(400, f"unknown option {short!r}: {hint}", short, "unknown_option")
    if found := _MISSING.match(text):
        name = ".".join(part for part in (_place(found[2]), found[1]) if part)
        return ApiError(400, f"{name} is missing", name, "missing_option")
    found = _AT.search(text)
    place = _place(found[1]) if found else None
    message = text[: found.start()] if found else text
    option = re.split(r"[.\[]", place or "")[0]
    if option in table and option not in kind.__struct_fields__:
        return ApiError(400, f"{option}: {table[option][0]}", place, "unsupported_option")
    if _TOOL.match(place or ""):
        message += " (only functions are supported; run other tools in the client)"
    if _PART.search(place or ""):
        message += f" ({UNSUPPORTED['modalities'][0]})"
    return ApiError(400, f"{place or 'body'}: {message}", place)


def _place(path: str | None) -> str | None:
    return _short(path.removesuffix("[...]")) if path else None


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "…"
