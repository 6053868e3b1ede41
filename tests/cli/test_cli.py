"""Commands of the command line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from safetensors.torch import save_file

from draftproof import LLM, TokenEvent, __version__
from draftproof.cli.main import main
from draftproof.models.expected_tensors import dummy_tensors
from draftproof.models.registry import config_from_hf
from draftproof.text.tokenizer import Tokenizer
from text_pieces import CONFIG

COPY = "one two three four five six seven one two three four five six seven one two"


def test_generate_prints_output_and_figures(smollm2_path: object, capsys: CaptureFixture[str]) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 7, "adaptive": false}'
    assert main(["generate", "--raw", "-p", COPY, "-n", "20", "--speculative-config", drafts]) == 0
    out = capsys.readouterr().out
    assert "six seven one two" in out
    assert "20 tokens in" in out and "acceptance length" in out and "tok/s" in out


def test_compare_prints_that_outputs_are_identical(
    smollm2_path: object, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(COPY))
    assert main(["generate", "--raw", "--compare", "-n", "16", "-t", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "tokens identical:   yes" in out and "logprobs identical: yes" in out


def test_chat_responds_and_exits(
    smollm2_path: object, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n/reset\n/exit\n"))
    assert main(["chat", "-n", "8"]) == 0
    assert "tok/s" in capsys.readouterr().out


def test_info_prints_the_size_of_a_model(smollm2_path: object, capsys: CaptureFixture[str]) -> None:
    assert main(["info", "smollm2-135m"]) == 0
    out = capsys.readouterr().out
    assert "134,515,008" in out and "chat template" in out
    assert "memory floor" in out and re.search(r"mlp.up_proj +30 +Q4_1 +16.6 +16.6", out)


def test_info_of_a_folder_lists_its_tensors(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = dummy_tensors(config_from_hf(CONFIG), torch.bfloat16, 0)
    save_file(tensors, tmp_path / "model.safetensors")
    assert main(["info", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"mlp.up_proj +1 +bfloat16", out) and "memory floor" in out


def test_interrupted_comparison_exits_without_a_result(
    smollm2_path: object, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    whole = LLM.stream

    def interrupted(*arguments: Any) -> Iterator[TokenEvent]:
        yield from islice(whole(*arguments), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert main(["generate", "--raw", "--compare", "-p", COPY, "-n", "9", "--device", "cpu"]) == 130
    assert "identical" not in capsys.readouterr().out


def test_model_without_chat_template_suggests_raw(
    smollm2_path: object, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    plain = Tokenizer.__init__

    def bare(self: Tokenizer, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{**options, "chat_template": None})

    monkeypatch.setattr(Tokenizer, "__init__", bare)
    assert main(["generate", "-p", "x", "-n", "2"]) == 2
    assert "--raw" in capsys.readouterr().err


def test_version_is_printed(capsys: CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0 and __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "no-such-model-at-all"], "error:"),
        (["info", "/nowhere/model"], "error:"),
        (["generate", "-p", "x", "--speculative-config", "{"], "not JSON"),
        # an option that --url would ignore
        (
            ["chat", "other", "--url", "http://127.0.0.1:1", "--device", "cuda"],
            "model and device: set by the server",
        ),
        # rejected before a model is loaded
        (["generate", "/nowhere/model", "-p", "x", "-n", "0"], "max_tokens"),
    ],
)
def test_error_is_one_line(arguments: list[str], message: str, capsys: CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("error:")
    assert err.count("\n") == 1  # also where it is longer than a terminal is wide


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--temprature", "0"], "did you mean '--temperature'?"),
        (["generate", "--temp", "0"], "unknown option '--temp'"),  # no abbreviations
        (["serve", "--api-key", "secret"], "did you mean '--api-key-file'?"),
        (["serve", "--conf", "server.toml"], "did you mean '--config'?"),
        (["serve", "--model", "smollm2-135m"], "it is a positional argument"),
        (["serve", "--zzzz=3"], "unknown option '--zzzz': see draftproof serve --help"),
    ],
)
def test_unknown_option_is_rejected_with_a_hint(
    arguments: list[str], message: str, capsys: CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    err = capsys.readouterr().err
    assert exited.value.code == 2 and message in err and f"usage: draftproof {arguments[0]}" in err
