"""Tools from a Python file: its public functions, with schemas from signatures and docstrings."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from draftproof.cli.chat.tools import Tool, ToolError
from draftproof.errors import ConfigError

_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_HEADING = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$")


def load_functions(path: Path) -> list[Tool]:
    """Import a file and return a tool for each public function defined in it."""
    name = f"draftproof_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # needed to resolve annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    functions = inspect.getmembers(module, inspect.isfunction)
    return [
        function_tool(function, f"{path}: {name}")
        for name, function in functions
        if function.__module__ == module.__name__ and not name.startswith("_")
    ]


def function_tool(function: Callable[..., Any], where: str) -> Tool:
    """Return the tool of one function; ConfigError if its signature has no schema."""
    text, descriptions = read_docstring(inspect.getdoc(function) or "")
    model = _arguments_model(function, descriptions, where)
    try:
        schema = _without_titles(model.model_json_schema())
    except PydanticUserError as error:
        raise ConfigError(f"{where}: its signature has no JSON schema: {error}") from error

    def call(arguments: dict[str, Any]) -> str:
        try:
            checked = model.model_validate(arguments)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolError("; ".join(problems)) from error
        given = {name: getattr(checked, name) for name in checked.model_fields_set}
        try:
            result = function(**given)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
        except Exception as error:  # the user's code may raise anything; the model receives the reason
            raise ToolError(f"{type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    def show(arguments: dict[str, Any]) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return f"{function.__name__}({shown})"

    return Tool(function.__name__, text, schema, call, show)


async def _awaited(result: Any) -> Any:
    return await result


def _arguments_model(
    function: Callable[..., Any], descriptions: dict[str, str], where: str
) -> type[BaseModel]:
    """Return a pydantic model of the parameters."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{where}: its annotations cannot be resolved: {error}") from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: the parameter {parameter} cannot be given by name")
        if name not in hints:
            raise ConfigError(f"{where}: the parameter {name!r} needs an annotation, such as {name}: str")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=descriptions.get(name)))
    try:
        return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError, TypeError) as error:
        raise ConfigError(f"{where}: its signature has no JSON schema: {error}") from error


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description and those of the parameters, from a docstring in Google's style."""
    before: list[str] = []
    found: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            section = heading[1]
        elif not section:
            before.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            if entry := _ARGUMENT.match(line):
                last = entry[1]
                found[last] = entry[2].strip()
            elif last:
                found[last] = f"{found[last]} {line.strip()}"
    return "\n".join(before).strip(), found


def _without_titles(schema: Any) -> Any:
    """Return a schema without the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            kept[key] = {name: _without_titles(each) for name, each in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            kept[key] = value
        elif key != "title":
            kept[key] = _without_titles(value)
    return kept
