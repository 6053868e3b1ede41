"""`draftproof chat`: a conversation with a local model or with the model of a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftproof.cli.chat.client import ChatClient
from draftproof.cli.chat.conversation import Conversation
from draftproof.cli.chat.line_input import LineInput
from draftproof.cli.chat.slash_commands import COMMANDS, reply_to, run_command
from draftproof.cli.chat.tools import Tool, load_tools
from draftproof.cli.chat.views import VIEWS, printable
from draftproof.cli.local_model import CHAT_ENGINE_OPTIONS, add_model_options, load_model
from draftproof.cli.output_rendering import legend
from draftproof.errors import ConfigError, DraftproofError

LOCAL_REQUEST_SECONDS = 7 * 86400.0  # no limit in practice: the user can stop a reply
SERVER_OPTIONS = ("tool_call_parser",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model_options(parser, CHAT_ENGINE_OPTIONS)
    parser.add_argument("--url", help="address of a server, such as http://127.0.0.1:8000; loads no model")
    add_chat_options(parser)
    parser.set_defaults(run=run)


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `chat` and `run` share."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system message")
    text = "functions of a .py file, or commands of a .json file, that the model may call"
    add("--tools", type=Path, metavar="FILE", help=text)
    add("--yes", action="store_true", help="run tool calls without confirmation")
    text = "format of tool calls, such as hermes (default: that of the chat template)"
    add("--tool-call-parser", metavar="NAME", help=text)
    text = (
        "rendered Markdown, tokens coloured by origin, or text (default: markdown on a terminal, else plain)"
    )
    add("--view", choices=VIEWS, help=text)
    names = ("model", "speculative_config", *CHAT_ENGINE_OPTIONS, *SERVER_OPTIONS)
    parser.set_defaults(engine_defaults={name: parser.get_default(name) for name in names})


def run(options: argparse.Namespace, console: Console) -> int:
    """Read messages and show replies until the end of input."""
    reader = LineInput(list(COMMANDS))
    tools = read_tools(options, reader.is_interactive)
    with open_client(options, console) as client:
        if reader.is_interactive:
            console.print("/help lists the commands, Ctrl-C stops a reply, Ctrl-D exits.")
        talk = open_conversation(options, client, console, tools, Confirmation(options.yes, reader, console))
        if talk.view == "drafts":
            console.print(legend())
        try:
            return _converse(talk, reader, console)
        finally:
            reader.close()


def _converse(talk: Conversation, reader: LineInput, console: Console) -> int:
    while True:
        try:
            line = reader.read()
        except EOFError:
            if reader.is_interactive:
                console.print()
            return 0
        except KeyboardInterrupt:
            if not reader.is_interactive:
                return 130
            console.print("\n/exit or Ctrl-D exits.")
            continue
        try:
            if line.startswith("/"):
                if not run_command(line, talk, console):
                    return 0
            elif line:
                reply_to(talk, line, console)
        except DraftproofError as error:
            console.print(Text(f"error: {printable(str(error))}", style="red"))
        except KeyboardInterrupt:
            console.print()


class Confirmation:
    """Question before a tool call."""

    def __init__(self, always: bool, reader: LineInput, console: Console) -> None:
        self._always, self._reader, self._console = always, reader, console

    def __call__(self, what: str) -> bool:
        """Return whether the user permits the call."""
        if self._always:
            return True
        self._console.print(Text(f"The model calls: {printable(what)}", style="bold"))
        try:
            answer = self._reader.line("Run it? [y/N, a: always] ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return False
        self._always = answer in ("a", "always")
        return self._always or answer in ("y", "yes")


def read_tools(options: argparse.Namespace, is_interactive: bool) -> dict[str, Tool]:
    """Return the tools of the command line; ConfigError if calls could not be confirmed."""
    if options.tools is None:
        if options.yes:
            raise ConfigError("--yes concerns tool calls: give --tools too, or leave it out")
        return {}
    if not options.yes and not is_interactive:
        raise ConfigError("--tools without a terminal: calls cannot be confirmed; add --yes to run them all")
    return load_tools(options.tools)


def open_conversation(
    options: argparse.Namespace,
    client: ChatClient,
    console: Console,
    tools: dict[str, Tool],
    confirm: Callable[[str], bool],
    notes: Console | None = None,
) -> Conversation:
    """Return a conversation with the options of the command line."""
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
    request: dict[str, Any] = {name: getattr(options, name) for name in names}
    request["max_completion_tokens"] = options.max_tokens
    if options.stop:
        request["stop"] = options.stop
    view = options.view or ("markdown" if console.is_terminal and not console.is_dumb_terminal else "plain")
    talk = Conversation(client, console, request, view, tools=tools, confirm=confirm, notes=notes)
    talk.system = options.system
    return talk


@contextmanager
def open_client(options: argparse.Namespace, console: Console) -> Iterator[ChatClient]:
    """Connect to a server, or load the model and close it at the end."""
    if options.url:
        from draftproof.cli.chat.http_client import HttpClient

        changed = [n for n, value in options.engine_defaults.items() if getattr(options, n) != value]
        if changed:
            raise ConfigError(f"{' and '.join(changed)}: set by the server when --url is given; leave it out")
        remote = HttpClient(options.url)
        console.print(Text(remote.describe(), style="dim"))
        yield remote
        return
    from draftproof.cli.chat.local_client import LocalClient
    from draftproof.serve.settings import Settings

    more = {name: getattr(options, name) for name in SERVER_OPTIONS}
    settings = Settings(request_seconds=LOCAL_REQUEST_SECONDS, **more)
    llm = load_model(options, console, CHAT_ENGINE_OPTIONS)
    local = LocalClient(llm, settings)
    try:
        yield local
    finally:
        local.close()
        llm.close()
