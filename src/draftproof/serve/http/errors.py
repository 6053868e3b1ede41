"""HTTP errors: OpenAI's error object with a status and the invalid option."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from draftproof.errors import EngineClosedError, EngineDeadError, QueueFullError, RequestError, nearest
from draftproof.serve.api.request_schema import NO_EFFECT_VALUES, UNSUPPORTED

RETRY_SECONDS = 1
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.S)
_AT = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$", re.S)
_PART = re.compile(r"content\[\d+\]\.type$")
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


class ApiError(Exception):
    """Error response with a status. Raised anywhere between the socket and the engine."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

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
        if self.status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        return headers


def to_api_error(error: BaseException) -> ApiError:
    """Return the error response of an exception. Messages of internal errors go to the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has stopped; the reason is in the server's log", code="engine_dead")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_down")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows", code="timeout")
    return ApiError(500, "internal error; the details are in the server's log", code="internal_error")


def decode(body: bytes, kind: type[Any]) -> Any:
    """Decode a body; ApiError with the invalid option if it does not match `kind`."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            return msgspec.convert(_with_integers(_without_no_effect(msgspec.json.decode(body))), kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _without_no_effect(value: Any) -> Any:
    """Remove unsupported options whose value changes nothing; some clients always send them."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if not _has_no_effect(name, item)}


def _has_no_effect(name: str, item: Any) -> bool:
    """Return True for a value of NO_EFFECT_VALUES; 1 is not the same as true."""
    same = [known for known in NO_EFFECT_VALUES.get(name, ()) if known == item]
    return any(isinstance(known, bool) == isinstance(item, bool) for known in same)


def _with_integers(value: Any) -> Any:
    """Convert floats such as 7.0 to integers: JSON makes no difference, and some clients write them so."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _validation_error(text: str, kind: type[Any]) -> ApiError:
    if found := _UNKNOWN.match(text):
        name, place = found[1], _place(found[2])
        if not place:
            if name in UNSUPPORTED:
                return ApiError(400, f"{name}: {UNSUPPORTED[name]}", name, "unsupported_option")
            hint = nearest(name, kind.__struct_fields__, "see /openapi.json for the options")
            return ApiError(400, f"unknown option {_short(name)!r}: {hint}", _short(name), "unknown_option")
        return ApiError(
            400, f"{place}: unknown key {_short(name)!r}", f"{place}.{_short(name)}", "unknown_option"
        )
    if found := _MISSING.match(text):
        name = ".".join(part for part in (_place(found[2]), found[1]) if part)
        return ApiError(400, f"{name} is missing", name, "missing_option")
    found = _AT.search(text)
    place = _place(found[1]) if found else None
    message = text[: found.start()] if found else text
    option = re.split(r"[.\[]", place or "")[0]
    if reason := UNSUPPORTED.get(option):
        return ApiError(400, f"{option}: {reason}", place, "unsupported_option")
    if _PART.search(place or ""):
        message += f" ({UNSUPPORTED['modalities']})"
    return ApiError(400, f"{place or 'body'}: {message}", place)


def _place(path: str | None) -> str | None:
    return _short(path.removesuffix("[...]")) if path else None


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "…"
