"""Entry point of the command line: the table of commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from draftproof import __version__
from draftproof.cli import completion, generate, model_info, quantize, run, serve, simulate, train
from draftproof.cli.audit import command as audit
from draftproof.cli.chat import command as chat
from draftproof.errors import DraftproofError, nearest

COMMANDS = {
    "generate": (generate, "complete one prompt"),
    "serve": (serve, "serve a model over HTTP with OpenAI's API"),
    "chat": (chat, "chat with a model in the terminal"),
    "run": (run, "print one reply to a prompt"),
    "train": (train, "train a draft head for a model"),
    "simulate": (simulate, "estimate the gain of a proposer on recorded outputs"),
    "quantize": (quantize, "write a quantised copy of a model"),
    "audit": (audit, "test whether the speculation of an endpoint is lossless"),
    "info": (model_info, "describe a model without loading its weights"),
    "completion": (completion, "print a script that completes these commands in a shell"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        status: int = options.run(options, console)
        return status
    except DraftproofError as error:
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        errors.print(Text(f"error: {error}", style="red"))
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, with those of a `--config` file of `serve` before them."""
    parser, commands = parsers()
    if arguments and arguments[0] == "serve":
        arguments = ["serve", *serve.with_config_file(commands["serve"], arguments[1:])]
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.get(arguments[0], parser).refuse(unknown[0].partition("=")[0])
    return options


class Parser(argparse.ArgumentParser):
    """Argument parser without abbreviations: a prefix of a flag is an error, not another flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def refuse(self, flag: str) -> NoReturn:
        """Exit with the usage of the command and the nearest flag."""
        hint = nearest(flag, self._option_string_actions, f"see {self.prog} --help")
        if any(flag == f"--{action.dest}" for action in self._get_positional_actions()):
            hint = f"it is a positional argument: leave {flag} out"
        what = "unknown option" if flag.startswith("-") else "one argument too many:"
        self.error(f"{what} {flag!r}: {hint}")


def parsers() -> tuple[Parser, Mapping[str, Parser]]:
    """Return the parser of the program and those of its commands by name."""
    text = "LLM inference in which speculation changes nothing but the speed."
    parser = Parser(prog="draftproof", description=text)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        module.add_options(commands.add_parser(name, help=text))
    return parser, commands.choices


if __name__ == "__main__":
    sys.exit(main())
