"""What a client is told that cannot be served: OpenAI's error object, a status, the option at fault."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from draftproof.errors import EngineClosedError, EngineDeadError, QueueFullError, RequestError, nearest
from draftproof.serve.api.request_schema import ASKS_NOTHING, NOT_HONOURED

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
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorDetail


class Problem(Exception):
    """Ends a request with a status. Raised anywhere between the socket and the engine."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def detail(self) -> ErrorDetail:
        return ErrorDetail(self.message, _TYPES.get(self.status, "server_error"), self.param, self.code)

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorReply(self.detail))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        more = [(b"content-type", b"application/json")]
        if self.status in (429, 503):
            more.append((b"retry-after", b"%d" % RETRY_SECONDS))
        if self.status == 401:
            more.append((b"www-authenticate", b"Bearer"))
        if self.status in (408, 413):
            more.append((b"connection", b"close"))  # the rest of the body is not read
        return more


def problem_of(error: BaseException) -> Problem:
    """What is said of an exception. Only what is meant for people is told; the rest goes to the log."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFullError):
        return Problem(503, str(error), code="queue_full")
    if isinstance(error, RequestError):
        return Problem(400, str(error), error.param)
    if isinstance(error, EngineDeadError):
        return Problem(503, "the engine has stopped; the server's log says why", code="engine_dead")
    if isinstance(error, EngineClosedError):
        return Problem(503, str(error), code="engine_down")
    if isinstance(error, TimeoutError):
        return Problem(504, "the request took longer than this server allows", code="timeout")
    return Problem(500, "something went wrong in the server; its log says what", code="internal_error")


def decode(body: bytes, kind: type[Any]) -> Any:
    """A body as its definition has it; Problem with the option at fault if it is not that."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            return msgspec.convert(_integral(_asked(msgspec.json.decode(body))), kind)
    except msgspec.ValidationError as error:
        raise _wrong(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _asked(value: Any) -> Any:
    """Without what asks for nothing: some clients always send it."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if not _asks_nothing(name, item)}


def _asks_nothing(name: str, item: Any) -> bool:
    """1 is not true here, nor 0 false."""
    same = [known for known in ASKS_NOTHING.get(name, ()) if known == item]
    return any(isinstance(known, bool) == isinstance(item, bool) for known in same)


def _integral(value: Any) -> Any:
    """7.0 is an integer in JSON, and some clients write them so."""
    if isinstance(value, dict):
        return {name: _integral(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_integral(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _wrong(text: str, kind: type[Any]) -> Problem:
    if found := _UNKNOWN.match(text):
        name, place = found[1], _place(found[2])
        if not place:
            if name in NOT_HONOURED:
                return Problem(400, f"{name}: {NOT_HONOURED[name]}", name, "unsupported_option")
            hint = nearest(name, kind.__struct_fields__, "see /openapi.json for what there is")
            return Problem(400, f"unknown option {_short(name)!r}: {hint}", _short(name), "unknown_option")
        return Problem(
            400, f"{place}: unknown key {_short(name)!r}", f"{place}.{_short(name)}", "unknown_option"
        )
    if found := _MISSING.match(text):
        name = ".".join(part for part in (_place(found[2]), found[1]) if part)
        return Problem(400, f"{name} is missing", name, "missing_option")
    found = _AT.search(text)
    place = _place(found[1]) if found else None
    what = text[: found.start()] if found else text
    option = re.split(r"[.\[]", place or "")[0]
    if reason := NOT_HONOURED.get(option):
        return Problem(400, f"{option}: {reason}", place, "unsupported_option")
    if _PART.search(place or ""):
        what += f" ({NOT_HONOURED['modalities']})"
    return Problem(400, f"{place or 'body'}: {what}", place)


def _place(path: str | None) -> str | None:
    return _short(path.removesuffix("[...]")) if path else None


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "…"
