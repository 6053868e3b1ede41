"""The command line, as a person types it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from draftproof import LLM, TokenEvent, __version__
from draftproof.cli.main import main
from draftproof.text.tokenizer import Tokenizer

COPY = "one two three four five six seven one two three four five six seven one two"


def test_generate(smollm2_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 7, "adaptive": false}'
    assert main(["generate", "--raw", "-p", COPY, "-n", "20", "--speculative-config", drafts]) == 0
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


def test_an_interrupted_comparison_claims_nothing(
    smollm2_path: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LLM.stream

    def interrupted(*arguments: Any) -> Iterator[TokenEvent]:
        yield from islice(whole(*arguments), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert main(["generate", "--raw", "--compare", "-p", COPY, "-n", "9", "--device", "cpu"]) == 130
    assert "identical" not in capsys.readouterr().out


def test_a_model_without_chat_template_names_the_way_out(
    smollm2_path: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Tokenizer.__init__

    def bare(self: Tokenizer, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{**options, "chat_template": None})

    monkeypatch.setattr(Tokenizer, "__init__", bare)
    assert main(["generate", "-p", "x", "-n", "2"]) == 2
    assert "--raw" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and __version__ in capsys.readouterr().out


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "no-such-model-at-all"]) == 2
    assert capsys.readouterr().err.count("\n") == 1  # also where it is longer than a terminal is wide
    assert main(["generate", "-p", "x", "--speculative-config", "{"]) == 2
    assert "not JSON" in capsys.readouterr().err
    assert main(["info", "/nowhere/model"]) == 2
    assert capsys.readouterr().err.startswith("error:")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--temprature", "0"], "did you mean '--temperature'?"),
        (["generate", "--temp", "0"], "unknown option '--temp'"),  # half a name is another option's
        (["serve", "--api-key", "secret"], "did you mean '--api-key-file'?"),
        (["serve", "--conf", "server.toml"], "did you mean '--config'?"),
        (["serve", "--model", "smollm2-135m"], "it is a positional argument"),
        (["serve", "--zzzz=3"], "unknown option '--zzzz': see draftproof serve --help"),
    ],
)
def test_options_that_there_are_not(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    err = capsys.readouterr().err
    assert left.value.code == 2 and says in err and f"usage: draftproof {arguments[0]}" in err


def test_a_servers_engine_is_not_chosen_here(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that would be ignored is refused."""
    assert main(["chat", "other", "--url", "http://127.0.0.1:1", "--device", "cuda"]) == 2
    assert "model and device: set by the server" in capsys.readouterr().err


def test_what_is_asked_is_checked_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "/nowhere/model", "-p", "x", "-n", "0"]) == 2
    assert "max_tokens" in capsys.readouterr().err
