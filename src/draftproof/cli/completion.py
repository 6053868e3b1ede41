"""`draftproof completion`: scripts for bash, zsh and fish, made from the argument parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftproof.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

FILE_METAVARS = ("FILE", "FOLDER", "JSONL")
INSTALL = {
    "bash": "source <(draftproof completion bash)",
    "zsh": "draftproof completion zsh > ~/.zfunc/_draftproof, with ~/.zfunc in fpath before compinit",
    "fish": "draftproof completion fish > ~/.config/fish/completions/draftproof.fish",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """Option of a command as a shell completes it."""

    names: tuple[str, ...]
    help: str
    has_value: bool
    choices: tuple[str, ...] = ()
    is_file: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """Command with its flags and the words that may follow it."""

    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]  # choices of its positional arguments
    has_files: bool  # its positional arguments may be files


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    lines = "\n".join(f"  {shell + ':':<6} {line}" for shell, line in INSTALL.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"installation:\n{lines}"
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell that runs the script")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Print the script."""
    from draftproof.cli.main import COMMANDS, parsers

    commands = {name: describe(parser, COMMANDS[name][1]) for name, parser in parsers()[1].items()}
    console.file.write(SCRIPTS[options.shell](commands))
    return 0


def describe(parser: argparse.ArgumentParser, text: str) -> Command:
    """Return the flags and positional arguments of a parser."""
    flags: list[Flag] = []
    words: list[str] = []
    has_files = False
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        is_file = action.type is Path or action.metavar in FILE_METAVARS
        if action.option_strings:
            has_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
            shown = parser._get_formatter()._expand_help(action) if action.help else ""
            names = tuple(action.option_strings)
            flags.append(Flag(names, shown.partition(" (default")[0], has_value, choices, is_file))
        elif action.dest == "model":
            words, has_files = [*words, DEFAULT_MODEL], True
        else:
            words, has_files = [*words, *choices], has_files or is_file
    return Command(text, tuple(flags), tuple(words), has_files)


# --- bash -----------------------------------------------------------------------------------------------

BASH = """# Completion of draftproof for bash, made by `draftproof completion bash`.
_draftproof() {
    local IFS=$'\\n' current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= word
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in -*) ;; *) command=$word; break ;; esac
    done
    COMPREPLY=()
    case $command:$before in
@VALUES@
    esac
    case $command in
@COMMANDS@
    esac
}
complete -o filenames -F _draftproof draftproof
"""


def _bash_words(words: tuple[str, ...]) -> str:
    return "$'" + "\\n".join(words) + "'"


def _bash_reply(words: tuple[str, ...], has_files: bool) -> str:
    files = "-f " if has_files else ""
    return f'COMPREPLY=($(compgen {files}-W {_bash_words(words)} -- "$current"))'


def bash(commands: Mapping[str, Command]) -> str:
    """Return the script for bash."""
    values, cases = [], []
    for name, command in commands.items():
        for flag in command.flags:
            if flag.has_value:
                pattern = "|".join(f"{name}:{each}" for each in flag.names)
                reply = _bash_reply(flag.choices, flag.is_file) + "; " if flag.choices or flag.is_file else ""
                values.append(f"    {pattern}) {reply}return ;;")
        flags = tuple(each for flag in command.flags for each in flag.names if each.startswith("--"))
        cases.append(
            f"    {name}) if [[ $current == -* ]]; then {_bash_reply(flags, False)}; "
            f"else {_bash_reply(command.words, command.has_files)}; fi ;;"
        )
    first = (*commands, "--help", "--version")
    cases.insert(0, f"    '') {_bash_reply(first, False)} ;;")
    return BASH.replace("@VALUES@", "\n".join(values)).replace("@COMMANDS@", "\n".join(cases))


# --- zsh ------------------------------------------------------------------------------------------------

ZSH = """#compdef draftproof
# Completion of draftproof for zsh, made by `draftproof completion zsh`.
_draftproof() {
    local -a commands=(
@NAMES@
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        _arguments '--help[show the options]' '--version[show the version]'
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
@COMMANDS@
    esac
}
if [ "$funcstack[1]" = _draftproof ]; then _draftproof "$@"; else compdef _draftproof draftproof; fi
"""


def _zsh_text(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, "\\" + character)
    return text


def _zsh_values(choices: tuple[str, ...], is_file: bool) -> str:
    return f":({' '.join(choices)})" if choices else ":_files" if is_file else ":"


def _zsh_flag(flag: Flag) -> list[str]:
    value = f":value{_zsh_values(flag.choices, flag.is_file)}" if flag.has_value else ""
    exclusive = f"({' '.join(flag.names)})" if len(flag.names) > 1 else ""
    return [shlex.quote(f"{exclusive}{name}[{_zsh_text(flag.help)}]{value}") for name in flag.names]


def zsh(commands: Mapping[str, Command]) -> str:
    """Return the script for zsh."""
    names = "\n".join(" " * 8 + shlex.quote(f"{name}:{_zsh_text(c.help)}") for name, c in commands.items())
    cases = []
    for name, command in commands.items():
        specs = [each for flag in command.flags for each in _zsh_flag(flag)]
        if command.words and command.has_files:
            action = f'{{_alternative "names:name:({" ".join(command.words)})" "files:file:_files"}}'
            specs.append(shlex.quote(f"*:argument:{action}"))
        elif command.words or command.has_files:
            specs.append(shlex.quote(f"*:argument{_zsh_values(command.words, command.has_files)}"))
        lines = " \\\n            ".join(specs)
        cases.append(f"    {name})\n        _arguments \\\n            {lines} ;;")
    return ZSH.replace("@NAMES@", names).replace("@COMMANDS@", "\n".join(cases))


# --- fish -----------------------------------------------------------------------------------------------


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_flag(flag: Flag, condition: str) -> str:
    parts = [f"complete -c draftproof {condition}"]
    for name in flag.names:
        parts.append(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}")
    if flag.choices:
        parts.append(f"-x -a {_fish_text(' '.join(flag.choices))}")
    elif flag.has_value:
        parts.append("-r -F" if flag.is_file else "-x")
    return " ".join([*parts, f"-d {_fish_text(flag.help)}"])


def fish(commands: Mapping[str, Command]) -> str:
    """Return the script for fish."""
    lines = ["# Completion of draftproof for fish, made by `draftproof completion fish`."]
    lines.append("complete -c draftproof -f")
    for name, command in commands.items():
        start = "complete -c draftproof -n __fish_use_subcommand"
        lines.append(f"{start} -a {name} -d {_fish_text(command.help)}")
    for name, command in commands.items():
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        if command.has_files:
            lines.append(f"complete -c draftproof {condition} -F")
        if command.words:
            lines.append(f"complete -c draftproof {condition} -a {_fish_text(' '.join(command.words))}")
        lines += [_fish_flag(flag, condition) for flag in command.flags]
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[Mapping[str, Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
