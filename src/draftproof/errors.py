"""Exceptions for users, as one tree.

DraftproofError
├── ConfigError      an option of the engine is wrong (also a ValueError)
├── LoadError        a model, tokenizer or file cannot be used
├── RequestError     one request is wrong; no other is affected (also a ValueError)
│   └── QueueFullError   the waiting queue is full; the same request can be sent later
├── RequestFailedError   an embedding or a score was begun and has no result
└── EngineClosedError    no request is accepted: the engine drains or was shut down
    ├── EngineDownError  the engine's process is starting or restarting: try later
    └── EngineDeadError  the engine has failed, through no fault of a request

`assert` marks errors in this code. These exceptions are for users: every message names a remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

DEVICE_ERRORS = (RuntimeError, MemoryError)  # of devices and allocators; torch's own derive from the first
# errors of outputs that cannot continue because of their own request's options
NO_TOKEN_LEFT = "no token is left to sample: the request's options forbid every one"
GRAMMAR_TOO_SLOW = "matching the request's grammar takes too long"


class DraftproofError(Exception):
    """Base of every error that Draftproof raises on purpose."""


class ConfigError(DraftproofError, ValueError):
    """The engine cannot be built from these options."""


class LoadError(DraftproofError):
    """A checkpoint, tokenizer or file is missing, damaged or not supported."""


class RequestError(DraftproofError, ValueError):
    """This request cannot be served; `param` names the option at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RequestError):
    """The waiting queue is full; the same request can be served later."""


class RequestFailedError(DraftproofError):
    """A request without output text has no result; `reason` is "error" or "abort"."""

    def __init__(self, reason: str | None, error: str | None) -> None:
        super().__init__(error or "the request was aborted")
        self.reason, self.error = reason, error


class EngineClosedError(DraftproofError):
    """The engine takes no new requests."""


class EngineDownError(EngineClosedError):
    """The engine's process is not running at the moment; the same request can be served later."""


class EngineDeadError(EngineClosedError):
    """The engine has failed and stopped; `__cause__` is the reason. Create a new one."""


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return a hint for a misspelt option: the closest known name, else `otherwise` or all names."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.65)
    return f"did you mean {close[0]!r}?" if close else otherwise or f"known: {', '.join(options)}"
