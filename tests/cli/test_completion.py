"""Completion scripts, run by the shells that are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pytest import CaptureFixture

from draftproof.cli.completion import SCRIPTS
from draftproof.cli.main import main, parsers

REPLY = """
complete_words() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _draftproof; printf '%s\\n' "${COMPREPLY[@]}"
}
"""


def script(shell: str, capsys: CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_has_every_command_and_flag(shell: str, capsys: CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for name, parser in parsers()[1].items():
        assert re.search(rf"\b{name}\b", text)
        for action in parser._actions:
            for flag in (each for each in action.option_strings if each.startswith("--")):
                assert re.search(rf"(-l |--){re.escape(flag[2:])}\b", text), flag


@pytest.mark.parametrize("shell", SCRIPTS)
def test_shell_parses_the_script(shell: str, capsys: CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n"], input=script(shell, capsys), text=True, capture_output=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("c", ["chat", "completion"]),
        ("serve --log-lev", ["--log-level"]),
        ("serve --log-level ", ["debug", "info", "warning", "error"]),
        ("serve --port ", [""]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("chat smol", ["smollm2-135m"]),
        ("chat --tools my", ["my tools.json"]),
        ("run smollm2-135m --view d", ["drafts"]),
    ],
)
def test_bash_completes(words: str, expected: list[str], capsys: CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "my tools.json").touch()
    arguments = ["draftproof", *words.split(" ")]
    text = script("bash", capsys) + REPLY + 'complete_words "$@"'
    done = subprocess.run(
        ["bash", "-c", text, "bash", *arguments], text=True, capture_output=True, cwd=tmp_path, check=True
    )
    assert done.stdout.split("\n")[:-1] == expected
