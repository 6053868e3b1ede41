"""Names that a server answers to, and response headers against framing and content sniffing."""

from __future__ import annotations

from collections.abc import Collection

from draftproof.serve.http.errors import ApiError
from draftproof.serve.settings import ANY_HOST

HEADERS = [(b"x-content-type-options", b"nosniff")]
PAGE_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


def check_host(header: bytes | None, allowed: Collection[str]) -> None:
    """ApiError 403 if the header `Host` has a name that is not allowed; browsers always send the header."""
    if header is None or ANY_HOST in allowed:
        return
    host = host_name(header.decode("latin-1"))
    if not any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in allowed):
        message = f"host {host[:100]!r} is not allowed; the server's option --allowed-hosts adds names"
        raise ApiError(403, message, code="host_not_allowed")


def host_name(header: str) -> str:
    """Return the name or address of a `Host` header, without port, brackets and trailing dot."""
    name = header.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name.rstrip(".")
