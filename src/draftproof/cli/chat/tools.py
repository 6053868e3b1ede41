"""Tools of a conversation: shell commands from a JSON file, or functions of a Python file."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import ConfigError, nearest

MAX_RESULT_CHARACTERS = 20_000
COMMAND_SECONDS = 60.0  # default time limit of a command
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_KEYS = ("name", "description", "parameters", "command", "timeout_seconds")


class ToolError(Exception):
    """Failure of a call; the model receives the message as its result."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    call: Callable[[dict[str, Any]], str]
    show: Callable[[dict[str, Any]], str]  # one line of what a call runs

    @property
    def schema(self) -> dict[str, Any]:
        """Tool in the form of the API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def load_tools(path: Path) -> dict[str, Tool]:
    """Load the tools of a .json or .py file, by name; ConfigError with the reason if that is not possible."""
    if path.suffix == ".py":
        from draftproof.cli.chat.python_tools import load_functions

        tools = load_functions(path)
    elif path.suffix == ".json":
        tools = [_command_tool(entry, f"{path}: tool {i + 1}") for i, entry in enumerate(_entries(path))]
    else:
        raise ConfigError(f"{path}: tools are read from a .json or a .py file")
    if not tools:
        raise ConfigError(f"{path} defines no tool")
    found = {tool.name: tool for tool in tools}
    if len(found) < len(tools):
        raise ConfigError(f"{path}: two tools have the same name")
    return found


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; ToolError if they are not a JSON object."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ToolError(f"the arguments are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ToolError("the arguments are not a JSON object")
    return value


def cut_result(text: str) -> str:
    """Return a result of at most MAX_RESULT_CHARACTERS, with a note if it was longer."""
    if len(text) <= MAX_RESULT_CHARACTERS:
        return text
    return (
        f"{text[:MAX_RESULT_CHARACTERS]}\n[{len(text) - MAX_RESULT_CHARACTERS} further characters left out]"
    )


def _entries(path: Path) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, list):
        raise ConfigError(f"{path} must be a list of tools")
    return value


def _command_tool(entry: Any, where: str) -> Tool:
    """Return the tool of one entry: the fields of the API and a command."""
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        rest = {key: value for key, value in entry.items() if key not in ("type", "function")}
        entry = {**entry["function"], **rest}
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not an object")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}: {nearest(key, _KEYS)}")
    name, command = entry.get("name"), entry.get("command")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be 1 to 64 letters, digits, _ or -, got {name!r}")
    parameters = entry.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        raise ConfigError(f"{where}: parameters must be a JSON schema of an object")
    is_list = isinstance(command, list) and command and all(isinstance(part, str) for part in command)
    if command is None or not (is_list or (isinstance(command, str) and command.strip())):
        raise ConfigError(f"{where}: command must be a text for the shell or a list of arguments")
    limit = entry.get("timeout_seconds", COMMAND_SECONDS)
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0:
        raise ConfigError(f"{where}: timeout_seconds must be above 0, got {limit!r}")
    runner = _Command(command, tuple(parameters.get("properties", {})), float(limit))
    return Tool(name, str(entry.get("description", "")), parameters, runner, runner.shown)


class _Command:
    """Command with placeholders: `{path}` is replaced by the argument `path`, quoted for the shell."""

    def __init__(self, command: str | list[str], names: tuple[str, ...], seconds: float) -> None:
        self._command, self._names, self._seconds = command, names, seconds

    def shown(self, arguments: dict[str, Any]) -> str:
        """Return the command as it is run."""
        command = self._filled(arguments)
        return command if isinstance(command, str) else shlex.join(command)

    def _filled(self, arguments: Mapping[str, Any]) -> str | list[str]:
        def value(match: re.Match[str], quote: Callable[[str], str]) -> str:
            if match[1] not in self._names:
                return match[0]  # braces of the shell or of another program
            given = arguments.get(match[1])
            if given is None:
                return ""
            return quote(given if isinstance(given, str) else json.dumps(given))

        if isinstance(self._command, str):
            return _PLACEHOLDER.sub(lambda match: value(match, shlex.quote), self._command)
        parts = [(part, _PLACEHOLDER.sub(lambda m: value(m, str), part)) for part in self._command]
        return [filled for part, filled in parts if filled or not _PLACEHOLDER.fullmatch(part)]

    def __call__(self, arguments: dict[str, Any]) -> str:
        """Run the command with the arguments as JSON on its standard input; return its output."""
        command = self._filled(arguments)
        try:
            done = subprocess.run(
                command,
                shell=isinstance(command, str),
                input=json.dumps(arguments),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"the command took longer than {self._seconds:g} s") from error
        except (OSError, ValueError) as error:
            raise ToolError(f"the command cannot be run: {error}") from error
        if done.returncode:
            raise ToolError(f"exit status {done.returncode}\n{done.stderr or done.stdout}".rstrip())
        return done.stdout
