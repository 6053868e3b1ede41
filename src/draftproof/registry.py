"""Lookup of classes by name in tables of "module:Class", which are imported on first use.

A new proposer, strategy or backend is one file and one line in the table of its package. A name of the form
``package.module:Class`` is imported directly, so private plug-ins need no line at all.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
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
