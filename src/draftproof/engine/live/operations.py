"""Operations on a running engine, as every kind of frontend requests them. Free of torch.

An operation waits until the engine is quiet. Mode "keep" stops between two steps, and requests in flight
continue after the operation. Mode "wait" finishes the requests that have begun, while new ones are queued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from draftproof.errors import ConfigError

PauseMode = Literal["keep", "wait"]
OperationName = Literal["update_weights", "sleep", "wake_up"]
Reply = Callable[[Any], None]  # receives the result, or the exception


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that is ready to run on a quiet engine."""

    run: Callable[[], Any]
    mode: PauseMode
    reply: Reply


def check_mode(mode: str) -> PauseMode:
    """Return the mode; ConfigError if there is no such one."""
    for known in get_args(PauseMode):
        if mode == known:
            return cast(PauseMode, known)
    hint = "; abort the requests yourself, then use keep" if mode == "abort" else ""
    raise ConfigError(f"mode must be keep or wait, got {mode!r}{hint}")
