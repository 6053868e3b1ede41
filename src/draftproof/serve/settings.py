"""Settings of the HTTP server: names, limits, API keys."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftproof.errors import ConfigError
from draftproof.text.tool_calls.formats import find_format

KEY_VARIABLE = "DRAFTPROOF_API_KEY"  # one key, or several separated by commas
ADMIN_KEY_VARIABLE = "DRAFTPROOF_ADMIN_KEY"  # for the operator's routes; one key, or several
ADMIN_PATHS = ("/update_weights_from_disk", "/sleep", "/wake_up", "/is_sleeping")  # the operator's
ANY_HOST = "*"
MAX_PRIORITY_OPTION = "max-priority"  # of a line with a key
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the server other than the engine's options."""

    served_model_names: tuple[str, ...] = ()  # default: the model's name
    api_keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    admin_keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))  # of the operator's routes
    allowed_hosts: tuple[str, ...] = (
        ANY_HOST,
    )  # names in the header `Host`; "*.example.com": its subdomains
    allowed_origins: tuple[str, ...] = ()  # of pages on other sites; "*": any
    root_path: str = ""  # prefix of all paths that a proxy removes
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allow_control_tokens: bool = False  # special tokens written in messages are encoded as such
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None  # None: the model's limit
    max_n: int = 16
    max_choices: int = 256  # prompts times n of one request
    max_logprob_entries: int = 4_000_000  # tokens times logprobs of one request
    max_concurrent: int = 1024
    max_concurrent_per_key: int | None = None
    keep_alive_seconds: float = 15.0  # of silence after which a stream gets a comment; 0: none
    request_seconds: float = 600.0  # from the end of the request to the end of the response
    body_seconds: float = 30.0  # for the body to arrive
    stall_seconds: float = 60.0  # that a client may leave a full socket unread
    drain_seconds: float = 30.0
    vllm_metrics: bool = False  # also report speculation, queue and KV usage under vLLM's names
    log_prompts: bool = False
    share_prefix_cache: bool = False  # between API keys
    max_priority: int = 0  # requests may have a priority from -max_priority to max_priority
    max_stored_responses: int = 1000  # of one API key, for previous_response_id; 0: none are stored
    max_stored_bytes: int = 32 << 20  # of the stored responses of one API key
    tool_call_parser: str | None = None  # format of tool calls; None: that of the chat template
    classifier_from_token: tuple[str, ...] = ()  # tokens for "no" and "yes" of a reranker
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # of requests without them

    def __post_init__(self) -> None:
        optional = ("max_prompt_tokens", "max_concurrent_per_key")
        counts = ("max_body_bytes", "max_n", "max_choices", "max_logprob_entries", "max_concurrent")
        for name in (*counts, *optional):
            value = getattr(self, name)
            if name in optional and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        for name in ("max_stored_responses", "max_stored_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} must be an integer of at least 0, got {value!r}")
        if isinstance(self.max_priority, bool) or not 0 <= self.max_priority < 1 << 31:
            raise ConfigError(f"max_priority must lie in 0..2**31 - 1, got {self.max_priority!r}")
        if self.tool_call_parser is not None:
            find_format(self.tool_call_parser)
        if len(self.classifier_from_token) not in (0, 2):
            raise ConfigError("classifier_from_token must be two tokens, such as no and yes")
        if not isinstance(self.default_chat_template_kwargs, dict):
            raise ConfigError("default_chat_template_kwargs must be a JSON object")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with '/' and not end with it, got {self.root_path!r}")
        for host in self.allowed_hosts:
            if host != host.lower() or "/" in host or (":" in host and not _is_address(host)):
                raise ConfigError(f"allowed_hosts has names without scheme and port, in lower case: {host!r}")
        self._check_certificate()
        if not self.keep_alive_seconds >= 0:
            raise ConfigError(f"keep_alive_seconds must be at least 0, got {self.keep_alive_seconds!r}")
        for name in ("request_seconds", "body_seconds", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")

    def _check_certificate(self) -> None:
        if self.ssl_keyfile is None and self.ssl_certfile is None:
            return
        if self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            files = " and ".join(filter(None, (self.ssl_certfile, self.ssl_keyfile)))
            raise ConfigError(f"the certificate in {files} cannot be used: {error}") from error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def default_hosts(host: str) -> tuple[str, ...]:
    """Return the hosts allowed without the option: on a loopback address its names, otherwise any.

    A page of another site can resolve its own name to 127.0.0.1 (DNS rebinding). The header `Host` then has
    the name of that site.
    """
    is_loopback = host in LOOPBACK_HOSTS or host.startswith("127.")
    return tuple(dict.fromkeys((*LOOPBACK_HOSTS, host))) if is_loopback else (ANY_HOST,)


class ApiKeys:
    """API keys, stored as digests and compared in constant time."""

    def __init__(
        self,
        keys: Iterable[str] | Mapping[str, int | None],
        digests: Iterable[str] = (),
        max_priorities: Mapping[str, int] | None = None,
    ) -> None:
        """Take keys, a mapping to their own largest priority or None; or what another process derived."""
        limits: Mapping[str, int | None] = keys if isinstance(keys, Mapping) else dict.fromkeys(keys)
        self._digests = [*map(bytes.fromhex, digests), *map(_digest, limits)]
        own = {_name(_digest(key)): limit for key, limit in limits.items() if limit is not None}
        self.max_priorities: dict[str, int] = {**(max_priorities or {}), **own}  # by short name

    @property
    def digests(self) -> list[str]:
        """Digests, to be passed to another HTTP process; keys cannot be derived from them."""
        return [digest.hex() for digest in self._digests]

    @property
    def names(self) -> list[str]:
        """Short names that `find` returns."""
        return [_name(digest) for digest in self._digests]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, sent: str) -> str | None:
        """Return the short name of a key for logs and limits; None for an unknown key."""
        digest, name = _digest(sent), None
        for known in self._digests:
            if hmac.compare_digest(digest, known):
                name = _name(known)
        return name


def _name(digest: bytes) -> str:
    return digest.hex()[:8]


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"draftproof" + key.encode("utf-8", "surrogateescape")).digest()


def read_admin_keys() -> ApiKeys:
    """Read the keys of the operator's routes from the environment."""
    return ApiKeys(_keys_of(ADMIN_KEY_VARIABLE))


def _keys_of(variable: str) -> list[str]:
    return [key for each in os.environ.get(variable, "").split(",") if (key := each.strip())]


def read_keys(path: str | None) -> ApiKeys:
    """Read keys from a file, one a line, and the environment; a command line is visible to other users.

    A key in the file may be followed by `max-priority=N`.
    """
    limits: dict[str, int | None] = dict.fromkeys(_keys_of(KEY_VARIABLE))
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"the API keys in {path} cannot be read: {error.strerror}") from error
        found = {i: line.split() for i, line in enumerate(lines, 1) if not line.lstrip().startswith("#")}
        if not any(found.values()):
            raise ConfigError(f"{path} contains no API key: write one a line")
        for number, words in found.items():
            if words:
                limits[words[0]] = _priority_option(words[1:], f"{path}, line {number}")
    return ApiKeys(limits)


def _priority_option(options: list[str], where: str) -> int | None:
    """Return the largest priority of a key; None: that of the server."""
    for option in options:
        name, _, value = option.partition("=")
        if len(options) > 1 or name != MAX_PRIORITY_OPTION or not value.isdecimal() or int(value) >= 1 << 31:
            expected = f"a key may be followed by {MAX_PRIORITY_OPTION}=N, a number of at least 0"
            raise ConfigError(f"{where}: {expected}")
        return int(value)
    return None
