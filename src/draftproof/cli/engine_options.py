"""Command-line flags of the engine, generated from the fields of `EngineConfig`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from typing import Any

from draftproof.compat.vllm_options import OPTION_ALIASES
from draftproof.config import DEFAULT_MODEL, EngineConfig
from draftproof.speculative_config import read_speculation

DEFAULT_SPECULATION = '{"method": "ngram", "num_speculative_tokens": 7}'
FLAG_TYPES = {"int": int, "float": float, "str": str, "dict[str, Any]": json.loads}
METAVARS = {"int": "N", "float": "X", "dict[str, Any]": "JSON"}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the optional model."""
    text = "a built-in name, a folder, a .gguf file or a hub id (default: %(default)s)"
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=text)


def offered_options() -> list[str]:
    """Return the names of the engine options that the command line offers."""
    hidden = ("model", "speculative")
    return [f.name for f in fields(EngineConfig) if f.name not in hidden and not f.metadata.get("api_only")]


def add_engine_options(group: Any, names: Iterable[str], defaults: Mapping[str, Any] | None = None) -> None:
    """Add `--speculative-config` and a flag for each named option; `defaults` replace those of the engine."""
    group.add_argument(
        "--speculative-config",
        default=DEFAULT_SPECULATION,
        metavar="JSON",
        help="speculative decoding in vLLM's keys; 'off' for none (default: %(default)s)",
    )
    declared = {f.name: f for f in fields(EngineConfig)}
    for name in names:
        _add_flag(group, declared[name], (defaults or {}).get(name, declared[name].default))


def _add_flag(group: Any, declared: Field[Any], default: Any) -> None:
    names = [declared.name, *(alias for alias, name in OPTION_ALIASES.items() if name == declared.name)]
    flags = ["--" + name.replace("_", "-") for name in names]
    shown = declared.metadata.get("default_text") if default is declared.default else None
    shown = shown or ("none" if default is None else default)
    text = f"{declared.metadata['help']} (default: {shown})".replace("`", "").replace("%", "%%")
    kind = str(declared.type).removesuffix(" | None")
    if kind == "bool":
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=default, help=text)
        return
    choices = declared.metadata.get("choices")
    group.add_argument(
        *flags,
        type=FLAG_TYPES[kind],
        choices=choices,
        default=default,
        metavar=None if choices else METAVARS.get(kind, "NAME"),
        help=text,
    )


def read_engine_options(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return keyword options for `LLM` or the supervisor."""
    values = {name: getattr(options, name) for name in names}
    return {**values, "speculative_config": read_speculation(options.speculative_config)}
