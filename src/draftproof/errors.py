"""Errors for users, as one tree.

DraftproofError
├── ConfigError      the engine was set up wrongly (also a ValueError)
├── LoadError        a model, tokenizer or file cannot be used
├── RequestError     one request is wrong; nobody else is affected (also a ValueError)
│   └── QueueFullError   nothing is wrong with it: too many wait already, try later
└── EngineClosedError    nothing is taken in: it drains, or was shut down
    ├── EngineDownError  its process is starting, or starting again: try later
    └── EngineDeadError  something broke that no request is to blame for

`assert` is for us; these are for people, so every message says what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# why an answer ends that cannot go on; its request is to blame, as for a RequestError
NO_TOKEN_LEFT = "no token is left to sample: the request's options forbid every one"


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
    """As many requests wait as may; the same one can be served later."""


class EngineClosedError(DraftproofError):
    """The engine takes no new requests."""


class EngineDownError(EngineClosedError):
    """The engine's process is not there at the moment; the same request can be served later."""


class EngineDeadError(EngineClosedError):
    """The engine broke and has stopped; `__cause__` is what broke it. Start another one."""


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A hint for a misspelt option: the closest known name; if none is close `otherwise`, or all of them."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.65)
    return f"did you mean {close[0]!r}?" if close else otherwise or f"known: {', '.join(options)}"
