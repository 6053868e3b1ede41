"""`draftproof run MODEL "prompt"`: one reply on standard output, or a conversation without a prompt."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.text import Text

from draftproof.cli.chat import command
from draftproof.cli.chat.line_input import LineInput
from draftproof.cli.engine_options import add_engine_options
from draftproof.cli.local_model import CHAT_ENGINE_OPTIONS, add_sampling_options
from draftproof.errors import RequestError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "draftproof run MODEL [PROMPT] [options]"
    text = "a built-in name, a folder, a .gguf file, a hub id, or the address of a server (http://HOST:PORT)"
    parser.add_argument("model", help=text)
    text = "the prompt; text that is piped to standard input follows it; without both, a conversation begins"
    parser.add_argument("prompt", nargs="*", help=text)
    add_engine_options(parser, CHAT_ENGINE_OPTIONS)
    add_sampling_options(parser)
    command.add_chat_options(parser)
    parser.add_argument("--stats", action="store_true", help="print tokens, acceptance and speed to stderr")
    parser.set_defaults(run=run, url=None)


def run(options: argparse.Namespace, console: Console) -> int:
    """Print one reply, and nothing else, to standard output; return the exit status."""
    if options.model.startswith(("http://", "https://")):
        options.url, options.model = options.model, options.engine_defaults["model"]
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    prompt = "\n\n".join(part for part in (" ".join(options.prompt), piped.rstrip("\n")) if part.strip())
    if not prompt:
        if sys.stdin.isatty():
            return command.run(options, console)
        raise RequestError("there is no prompt: give it after the model or on standard input")
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    reader = LineInput([])
    tools = command.read_tools(options, reader.is_interactive)
    with command.open_client(options, notes) as client:
        confirm = command.Confirmation(options.yes, reader, notes)
        talk = command.open_conversation(options, client, console, tools, confirm, notes)
        is_complete = talk.send(prompt)
        if options.stats:
            notes.print(Text(talk.totals(), style="dim"))
    return 0 if is_complete else 130
