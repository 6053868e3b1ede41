"""Imports on first use: classes by name in tables of "module:Class", without garbage collection.

A new proposer, strategy or backend is one file and one line in the table of its package. A name of the form
``package.module:Class`` is imported directly, so private plug-ins need no line at all.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from draftproof.errors import ConfigError, nearest


def lookup(table: Mapping[str, str], name: str, what: str) -> Any:
    """Return the class of `name` in `table`; `what` names the kind in the error message."""
    target = table.get(name, name if ":" in name else "")
    if not target:
        raise ConfigError(f"unknown {what} {name!r}: {nearest(name, table)}")
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {what} {name!r} from {target!r}: {error}") from error


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage for a while.

    Imports and compilers make many objects that stay, and every collection visits all of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
