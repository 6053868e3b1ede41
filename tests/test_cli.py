"""The command line, as a person types it."""

from __future__ import annotations

import io

import pytest

from draftproof.cli import main

COPY = "one two three four five six seven one two three four five six seven one two"


def test_generate(smollm2_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--raw", "-p", COPY, "-n", "20"]) == 0
    out = capsys.readouterr().out
    assert "six seven one two" in out
    assert "20 tokens in" in out and "acceptance length" in out and "tok/s" in out


def test_compare(
    smollm2_path: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(COPY))
    assert main(["generate", "--raw", "--compare", "-n", "16", "-t", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "tokens identical:   yes" in out and "logprobs identical: yes" in out


def test_chat(
    smollm2_path: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n/reset\n/exit\n"))
    assert main(["chat", "-n", "8"]) == 0
    assert "tok/s" in capsys.readouterr().out


def test_info(smollm2_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "smollm2-135m"]) == 0
    out = capsys.readouterr().out
    assert "134,515,008" in out and "chat template" in out


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "x", "--speculative-config", "{"]) == 2
    assert "not JSON" in capsys.readouterr().err
    assert main(["info", "/nowhere/model"]) == 2
    assert capsys.readouterr().err.startswith("error:")
