"""What a training run is made of: two frozen plans, kept in the work folder: a run resumes as itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftproof.errors import ConfigError


def _option(default: Any, words: str) -> Any:
    """A setting that the command line offers too, with these words."""
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """The text to train on. The same plan gives the same text, whatever the batch and wherever it was cut."""

    model: str
    prompts: tuple[str, ...] = ()  # JSONL files
    prompts_digest: str = ""  # of their contents
    seed: int = 0
    tokens: int = _option(1_000_000, "write at least so many tokens, prompts included")
    held_out: int = _option(64, "prompts of the files, and as many written ones, that are never trained on")
    shard: int = _option(1024, "texts that are written and stored together")
    written: float = _option(0.8, "share of the prompts that the model writes itself; others are the files'")
    systems: float = _option(0.2, "of the written ones, the share with a system message of the model's own")
    opened: float = _option(0.5, "of the others, the share that begins as users' messages often do")
    shown: float = _option(0.3, "share of the written ones that are about a text the model wrote before")
    greedy: float = _option(0.5, "share of the answers at temperature 0")
    temperature: float = _option(1.0, "of the other answers")
    follow: float = _option(0.3, "share of the answers that the model, as the user, asks on after")
    prompt_tokens: int = _option(640, "longer prompts are left out")
    answer_tokens: int = _option(384, "longer answers are cut")

    def __post_init__(self) -> None:
        for name in ("written", "systems", "opened", "shown", "greedy", "follow"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share in 0..1, got {getattr(self, name)}")
        _positive(self, ("tokens", "shard", "prompt_tokens", "answer_tokens", "temperature"))
        if self.held_out < 0:
            raise ConfigError(f"held_out is not negative, got {self.held_out}")
        if abs(1000 * self.temperature - round(1000 * self.temperature)) > 1e-9:
            raise ConfigError(f"temperature is kept in thousandths, got {self.temperature}: round it")
        if not self.prompts and self.written < 1:
            raise ConfigError("give a file of --prompts, or --written 1: the model then writes all of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """The head and how it learns."""

    model: str
    seed: int = 0
    aux_layers: tuple[int, ...] = ()  # (): one low, one in the middle, one high
    intermediate_size: int = _option(0, "of the head's MLP; 0: as the target has it")
    feature_norm: str = _option("none", "of the rows of each layer before they are joined: none or each")
    norm_output: int = _option(0, "1: a draft's row goes on after the head's last norm, 0: before it")
    draft_vocab: int = _option(16384, "the head knows at most so many of the ids; 0: all")
    unroll: int = _option(4, "drafts of a chain that are trained")
    drafts: int = _option(4, "drafts of a chain whose acceptance is measured")
    epochs: float = _option(4.0, "how often all of the text is seen, unless --steps is given")
    steps: int = _option(0, "updates; 0: as many as --epochs need")
    batch_tokens: int = _option(32768, "tokens of an update, padding included")
    max_len: int = _option(1024, "longer texts are cut")
    learning_rate: float = _option(6e-3, "at its highest; with adamw take a third of it or less")
    warmup: int = _option(100, "updates until it is there")
    decay: float = _option(0.8, "of the weight of each further draft of a chain")
    prompt_weight: float = _option(0.2, "of chains that begin in a prompt; those of answers have 1")
    prompt_rows: int = _option(
        1, "of the rows of a prompt every so many are learnt from, with as much weight"
    )
    clip: float = _option(1.0, "longest gradient")
    optimizer: str = _option("muon", "of matrices: muon or adamw; of the rest it is adamw")
    weight_decay: float = _option(0.0, "of both")
    hard: float = _option(0.1, "share of the target's law that is put on its best token, at temperature 0")
    overlap: float = _option(1.0, "weight of 1 - sum min(p, q) beside divergence")
    sharpen: int = _option(1, "1: logits are scaled at the end so that most drafts of held-out texts stand")
    begin: str = _option("", "folder of a head to go on from, with its draft ids; nothing: a new one")
    new_ids: int = _option(0, "1: with --begin, draft ids are chosen anew from the text")
    attention: str = _option(
        "joined", "of the head: joined, from a library's and the own keys', or written out"
    )
    keep: int = _option(0, "1: what the target says of the texts is computed once and kept on the device")
    bits: int = _option(16, "of each number of a stored matrix: 16, or 8 with a scale a row")
    dtype: str = _option("bfloat16", "of activations: bfloat16 or float32; weights are trained in fp32")
    eval_every: int = _option(250, "updates between two points of the curve")
    eval_texts: int = _option(48, "held-out texts that a point is measured on")

    def __post_init__(self) -> None:
        _positive(self, ("unroll", "drafts", "batch_tokens", "max_len", "eval_every", "prompt_rows"))
        _positive(self, ("learning_rate", "epochs", "clip"))
        if min(self.draft_vocab, self.intermediate_size, self.steps, self.eval_texts, self.warmup) < 0:
            raise ConfigError("draft_vocab, intermediate_size, steps, eval_texts and warmup are not negative")
        if self.feature_norm not in ("none", "each") or self.norm_output not in (0, 1):
            raise ConfigError("feature_norm is none or each, norm_output 0 or 1")
        for name in ("keep", "new_ids", "sharpen"):
            if getattr(self, name) not in (0, 1):
                raise ConfigError(f"{name} is 0 or 1, got {getattr(self, name)}")
        if self.bits not in (8, 16):
            raise ConfigError(f"bits is 8 or 16, got {self.bits}")
        if self.attention not in ("joined", "written"):
            raise ConfigError(f"attention is joined or written, got {self.attention!r}")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer is adamw or muon, got {self.optimizer!r}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype must be bfloat16 or float32, got {self.dtype!r}")
        if not 0 <= self.hard < 1 or self.overlap < 0 or self.prompt_weight < 0:
            raise ConfigError("hard is a share in 0..1, overlap and prompt_weight are not negative")


def _positive(plan: TextPlan | TrainPlan, names: tuple[str, ...]) -> None:
    for name in names:
        if not getattr(plan, name) > 0:
            raise ConfigError(f"{name} must be positive, got {getattr(plan, name)}")


def settle(path: Path, plan: TextPlan | TrainPlan, begin: bool = True) -> None:
    """Compare with what was begun here, if anything was; else, with `begin`, write the plan down.

    A run that cannot even start should leave nothing that the next one would have to agree with.
    """
    now: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    if path.exists():
        before = json.loads(path.read_text())
        other = [key for key in now if before.get(key) != now[key]]
        if other:
            said = ", ".join(f"{key} was {before.get(key)} and is {now[key]}" for key in other)
            raise ConfigError(f"{path} was begun with other settings ({said}): use another work folder")
    elif begin:
        write_json(path, now)


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(half, path)


def digest_files(paths: tuple[str, ...]) -> str:
    known = hashlib.sha256()
    for path in paths:
        try:
            known.update(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return known.hexdigest()[:16]
