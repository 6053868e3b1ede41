"""Commands of a conversation, such as /reset: one table of names, arguments and functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from draftproof.cli.chat.conversation import Conversation
from draftproof.cli.chat.views import VIEWS
from draftproof.errors import RequestError, nearest
from draftproof.sampling_params import SamplingParams

# options of /set by name: type and the name in a request
OPTIONS: dict[str, tuple[type, str]] = {
    "temperature": (float, "temperature"),
    "top_p": (float, "top_p"),
    "top_k": (int, "top_k"),
    "min_p": (float, "min_p"),
    "repetition_penalty": (float, "repetition_penalty"),
    "presence_penalty": (float, "presence_penalty"),
    "frequency_penalty": (float, "frequency_penalty"),
    "max_tokens": (int, "max_completion_tokens"),
    "seed": (int, "seed"),
    "thinking_token_budget": (int, "thinking_token_budget"),
    "reasoning_effort": (str, "reasoning_effort"),
}


class SlashCommand(NamedTuple):
    """Command, its argument in the help, and its function; the function returns False to exit."""

    argument: str
    help: str
    run: Callable[[Conversation, str, Console], bool | None]


def run_command(line: str, talk: Conversation, console: Console) -> bool:
    """Run a line that begins with a slash; return False to exit the program."""
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise RequestError(f"unknown command {name!r}: {nearest(name, COMMANDS)}; /help lists them")
    if argument.strip() and not command.argument:
        raise RequestError(f"{name} takes no argument")
    return command.run(talk, argument.strip(), console) is not False


def _help(talk: Conversation, argument: str, console: Console) -> None:
    for name, command in COMMANDS.items():
        console.print(f"{name + ' ' + escape(command.argument):<22} {command.help}")
    console.print('A line that ends in \\ is continued; """ opens and closes a message of several lines.')
    console.print("Ctrl-C stops a reply, Ctrl-D exits.")


def _reset(talk: Conversation, argument: str, console: Console) -> None:
    talk.reset()
    console.print("The conversation is empty.")


def _system(talk: Conversation, argument: str, console: Console) -> None:
    if argument:
        talk.system = None if argument == "none" else argument
    console.print(Text(f"system: {talk.system or 'none'}"))


def _set(talk: Conversation, argument: str, console: Console) -> None:
    if argument:
        name, _, text = argument.replace("=", " ", 1).partition(" ")
        set_option(talk, name, text.strip())
    shown = {name: talk.options.get(key) for name, (_, key) in OPTIONS.items()}
    for name, value in {**shown, "view": talk.view}.items():
        if value is not None or argument.startswith(name):
            console.print(Text(f"{name} {'none' if value is None else value}"))


def set_option(talk: Conversation, name: str, text: str) -> None:
    """Set an option of the next requests; `none` removes it. RequestError for a wrong name or value."""
    if name == "view":
        if text not in VIEWS:
            raise RequestError(f"view must be one of {', '.join(VIEWS)}, got {text!r}")
        talk.view = text
        return
    if name not in OPTIONS:
        raise RequestError(f"there is no option {name!r}: {nearest(name, [*OPTIONS, 'view'])}")
    kind, key = OPTIONS[name]
    if not text:
        raise RequestError(f"/set {name} needs a value; none removes the option")
    value: Any = None
    if text != "none":
        try:
            value = kind(text)
        except ValueError as error:
            raise RequestError(f"{name} must be {_KIND_NAMES[kind]}, got {text!r}") from error
        if name != "reasoning_effort":
            SamplingParams(**{name: value})  # refuses a value outside its range
    talk.options[key] = value


_KIND_NAMES: dict[type, str] = {float: "a number", int: "a whole number", str: "a text"}


def _save(talk: Conversation, argument: str, console: Console) -> None:
    talk.save(_path(argument, "/save"))
    console.print(Text(f"{len(talk.messages)} messages are in {argument}"))


def _load(talk: Conversation, argument: str, console: Console) -> None:
    talk.load(_path(argument, "/load"))
    console.print(Text(f"{len(talk.messages)} messages were loaded"))


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise RequestError(f"{name} needs the name of a file")
    return Path(argument).expanduser()


def _retry(talk: Conversation, argument: str, console: Console) -> None:
    text = talk.undo()
    if text is None:
        raise RequestError("there is no message to send again")
    reply_to(talk, text, console)


def _undo(talk: Conversation, argument: str, console: Console) -> None:
    text = talk.undo()
    if text is None:
        raise RequestError("there is no message to remove")
    console.print(Text(f"removed: {text}"))


def _stats(talk: Conversation, argument: str, console: Console) -> None:
    console.print(Text(talk.totals()))


def _tools(talk: Conversation, argument: str, console: Console) -> None:
    if not talk.tools:
        console.print("There are no tools; start with --tools FILE.")
    for tool in talk.tools.values():
        first = (tool.description.splitlines() or [""])[0]
        console.print(Text(f"{tool.name}  {first}"))


def reply_to(talk: Conversation, text: str, console: Console) -> None:
    """Send a message and print the figures of its last reply."""
    if talk.send(text) and talk.replies:
        console.print(Text(talk.replies[-1].figures(), style="dim"))


COMMANDS = {
    "/help": SlashCommand("", "list the commands", _help),
    "/reset": SlashCommand("", "start over; the system message remains", _reset),
    "/system": SlashCommand("[TEXT]", "show or set the system message; none removes it", _system),
    "/set": SlashCommand("[NAME VALUE]", "show or set options, such as /set temperature 0.7", _set),
    "/save": SlashCommand("FILE", "write the conversation to a JSON file", _save),
    "/load": SlashCommand("FILE", "continue a conversation that was saved", _load),
    "/retry": SlashCommand("", "send the last message again", _retry),
    "/undo": SlashCommand("", "remove the last message and its reply", _undo),
    "/stats": SlashCommand("", "show tokens, acceptance and speed so far", _stats),
    "/tools": SlashCommand("", "list the tools", _tools),
    "/exit": SlashCommand("", "exit", lambda talk, argument, console: False),
}
