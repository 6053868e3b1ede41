"""`draftproof train` on a tiny model: all phases, interrupted and resumed, with equal files."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import trained
from draftproof.cli.main import main
from draftproof.cli.train import STOPPED_EXIT_STATUS as STOPPED
from draftproof.errors import ConfigError, LoadError
from draftproof.train import pipeline
from draftproof.train.data.dataset import read_texts
from draftproof.train.data.generate_text import read_prompts
from draftproof.train.trainer import Trainer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model; its 97 ids are three special ones and the printable ASCII characters."""
    folder = tmp_path_factory.mktemp("model")
    trained.write_model(folder)
    letters = ["Ġ", *map(chr, range(33, 126))]
    vocab = {letter: i for i, letter in enumerate(["<u>", "<b>", "<e>", *letters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<u>", "<b>", "<e>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<e>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"what is {i} and {i * i}?"} for i in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def train(model: Path, prompts: Path, work: Path, *more: str) -> int:
    options = {
        "--tokens": 900, "--held-out": 2, "--shard": 8, "--written": 0.5, "--prompt-tokens": 90,
        "--output-tokens": 24, "--max-num-seqs": 4, "--steps": 6, "--batch-tokens": 512, "--max-len": 128,
        "--eval-every": 3, "--eval-texts": 2, "--draft-vocab": 64, "--warmup": 1, "--unroll": 2,
        "--drafts": 2, "--optimizer": "adamw",
    }  # fmt: skip
    fixed = [str(word) for pair in options.items() for word in pair]
    where = ["--prompts", str(prompts), "--work", str(work), "--device", "cpu", "--dtype", "float32"]
    return main(["train", str(model), *fixed, *where, *more])


def files(work: Path) -> dict[str, bytes]:
    """Return the files of a run, without the state, whose bytes may differ."""
    every = [path for path in work.rglob("*") if path.is_file() and path.name != "state.pt"]
    return {str(path.relative_to(work)): path.read_bytes() for path in every}


def test_mtp_run_writes_a_checkpoint_that_drafts_without_a_model_key(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, prompts, tmp_path, "--kind", "mtp") == 0
    printed = capsys.readouterr().out
    assert printed.count("2 of 2 outputs equal those without drafts") == 2, printed
    made = files(tmp_path)
    assert {"model/mtp.safetensors", "model/tokenizer.json", "head/config.json", "eval.json"} <= set(made)
    assert train(model, prompts, tmp_path, "--kind", "mtp", "--phase", "write") == 0
    assert files(tmp_path) == made


def test_interrupted_run_writes_the_files_of_a_whole_run(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, prompts, tmp_path / "one") == 0
    printed = capsys.readouterr().out
    assert printed.count("2 of 2 outputs equal those without drafts") == 2, printed
    made = files(tmp_path / "one")
    assert {"head/model.safetensors", "speculators/config.json", "train/curve.json", "eval.json"} <= set(made)
    for phase in ("generate", "train"):
        assert train(model, prompts, tmp_path / "two", "--phase", "eval") == 2
        assert train(model, prompts, tmp_path / "two", "--phase", phase, "--stop-after", "0") == STOPPED
        assert train(model, prompts, tmp_path / "two", "--phase", phase) == 0
    assert train(model, prompts, tmp_path / "two", "--phase", "eval") == 0
    for path in (tmp_path / "two" / "speculators").iterdir():
        path.unlink()
    assert train(model, prompts, tmp_path / "two", "--phase", "write") == 0
    again = files(tmp_path / "two")
    assert made == again
    texts = read_texts(tmp_path / "one" / "text")
    assert sum(len(text.tokens) for text in texts) >= 900
    assert {text.temperature for text in texts} == {0.0, 1.0}
    # --seconds chooses the number of steps once
    timed = ("--phase", "train", "--steps", "0", "--seconds", "0.3", "--stop-after")
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "text").symlink_to(tmp_path / "one" / "text")
    assert train(model, prompts, tmp_path / "three", *timed, "0") == STOPPED
    kept = (tmp_path / "three" / "train.json").read_bytes()
    assert "1 updates in 0 s" in capsys.readouterr().out
    assert train(model, prompts, tmp_path / "three", *timed, "60") == 0
    assert "1 updates, as before" in capsys.readouterr().out
    assert (tmp_path / "three" / "train.json").read_bytes() == kept and b'"steps": 0' not in kept
    # other settings in the same folder
    assert train(model, prompts, tmp_path / "two", "--phase", "train", "--clip", "2") == 2
    assert "clip was 1.0 and is 2.0" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer", "sgd"], "optimizer is adamw or muon"),
        (["--aux-layers", "0,99"], "has layers 0.."),
        (["--aux-layers", "a"], "numbers separated by commas"),
        (["--begin", "/nowhere"], "not the folder of a head"),
        (["--device", "cuda:99"], "cannot be used here"),
        (["--seconds", "5"], "chooses --steps"),
        (["--held-out", "-1"], "held_out is not negative"),
        (["--temperature", "0.0004"], "kept in thousandths"),
        (["--prompt-tokens", "300"], "--prompt-tokens 300 and --output-tokens 24 need 688 positions"),
        (["--prompt-tokens", "5"], "raise --prompt-tokens"),
        (["--written", "1", "--held-out", "0", "--output-tokens", "1"], "does not end the prompts"),
        (["--phase", "train"], "run the phase `generate` first"),
        (["--phase", "eval"], "run the phase `generate` first"),
        (["--phase", "write"], "run the phase `train` first"),
    ],
)
def test_refused_options_leave_no_folder(
    options: list[str],
    message: str,
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(model, prompts, tmp_path / "work", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "work").exists()


def test_training_on_incomplete_text_cannot_resume_after_the_text_has_grown(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, prompts, tmp_path, "--phase", "generate", "--tokens", "300") == 0
    plan = tmp_path / "text.json"
    plan.write_text(plan.read_text().replace('"tokens": 300', '"tokens": 900'))  # as after an interruption
    learn = ("--phase", "train", "--stop-after", "0")
    assert train(model, prompts, tmp_path, *learn) == train(model, prompts, tmp_path, *learn) == STOPPED
    assert capsys.readouterr().out.count("of 900: the text is not complete") == 2
    assert train(model, prompts, tmp_path, "--phase", "generate") == 0
    assert train(model, prompts, tmp_path, "--phase", "train") == 2
    printed = capsys.readouterr()
    assert "not complete" not in printed.out and "started with other text" in " ".join(printed.err.split())


def test_held_out_prompts_that_are_too_long_are_reported(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, prompts, tmp_path, "--max-len", "22") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 of 4 held-out texts are left out: their prompts are not shorter than --max-len 22" in printed


def test_head_is_written_before_logits_are_scaled(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(trainer: Trainer) -> bool:
        raise LoadError("ended")

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "scale_logits", ended)
        assert train(model, prompts, tmp_path) == 2
    plain = files(tmp_path)
    assert {"head/config.json", "head/model.safetensors", "speculators/model.safetensors"} <= set(plain)
    monkeypatch.setattr("draftproof.train.evaluate.LOGIT_SCALES", (1.2,))
    assert train(model, prompts, tmp_path) == 0
    scaled = files(tmp_path)
    heads = [name for name in plain if name.endswith("model.safetensors") and "train" not in name]
    assert all(scaled[name] != plain[name] for name in heads)


def test_trainer_is_freed_before_the_next_trainer_or_engine_is_built(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disable the garbage collector: kept target states may fill a device."""
    made: list[weakref.ref[Trainer]] = []
    whole, engine, alive = Trainer.__init__, pipeline.LLM, []

    def count_alive(what: str) -> None:
        alive.append((what, sum(one() is not None for one in made)))

    def init(self: Trainer, *given: Any) -> None:
        count_alive("trainer")
        made.append(weakref.ref(self))
        whole(self, *given)

    def build_engine(*given: Any, **options: Any) -> Any:
        count_alive("engine")
        return engine(*given, **options)

    monkeypatch.setattr(Trainer, "__init__", init)
    assert train(model, prompts, tmp_path, "--phase", "generate") == 0
    monkeypatch.setattr(pipeline, "LLM", build_engine)
    monkeypatch.setattr(pipeline, "gc", gc)
    gc.disable()
    try:
        assert all(train(model, prompts, tmp_path, "--phase", name) == 0 for name in ("train", "eval"))
    finally:
        gc.enable()
    assert alive == [("trainer", 0), ("trainer", 0), ("engine", 0)]


def test_read_prompts_names_the_line_of_a_wrong_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = '{"prompt": "a\u2028b"}\n\n{"turns": ["c", "d"]}\n{"prompt_token_ids": [3, 4]}\n'
    path.write_text(lines, "utf-8")
    messages = [[{"role": "user", "content": text}] for text in ("a\u2028b", "c")]
    assert read_prompts([str(path)]) == [*messages, [3, 4]]
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ConfigError, match="line 2: not a prompt"):
        read_prompts([str(path)])
