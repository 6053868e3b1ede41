"""What a training run is made of: two frozen plans, kept in the work folder, so that a run resumes as itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """The text to train on. The same plan gives the same text, whatever the batch and wherever it was cut."""

    model: str
    prompts: tuple[str, ...] = ()  # JSONL files
    prompts_digest: str = ""  # of their contents
    seed: int = 0
    tokens: int = 1_000_000  # at least so many, prompts included
    held_out: int = 64  # prompts of the files, and as many written ones, that are never trained on
    shard: int = 1024  # texts that are written together
    written: float = 0.8  # share of the prompts that the model writes itself; the others are the files'
    systems: float = 0.3  # of those, the share that begin with a system message of the model's own
    greedy: float = 0.5  # share of the answers at temperature 0; the others are at `temperature`
    temperature: float = 1.0
    prompt_tokens: int = 384  # longer prompts are left out
    answer_tokens: int = 512  # longer answers are cut

    def __post_init__(self) -> None:
        for name in ("written", "systems", "greedy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share in 0..1, got {getattr(self, name)}")
        for name in ("tokens", "shard", "prompt_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.prompts and self.written < 1:
            raise ConfigError("give a file of --prompts, or --written 1: the model then writes all of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """The head and how it learns."""

    model: str
    seed: int = 0
    aux_layers: tuple[int, ...] = ()  # (): one low, one in the middle, one high
    intermediate_size: int = 0  # 0: as the target has it
    draft_vocab: int = 16384  # at most so many ids; 0: all
    unroll: int = 5  # steps of a chain that are trained
    steps: int = 1000
    batch_tokens: int = 32768
    max_len: int = 1024
    learning_rate: float = 1e-3
    warmup: int = 100
    decay: float = 0.8  # of the weight of each further step of a chain
    clip: float = 1.0
    weight_decay: float = 0.0
    hard: float = 0.1  # share of the target's law that is put on its best token
    overlap: float = 0.0  # weight of the draws that differ, beside divergence
    dtype: str = "bfloat16"  # of activations; weights are kept and updated in fp32
    eval_every: int = 250
    eval_texts: int = 48

    def __post_init__(self) -> None:
        for name in ("unroll", "steps", "batch_tokens", "max_len", "eval_every", "eval_texts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype must be bfloat16 or float32, got {self.dtype!r}")
        if not 0 <= self.hard < 1 or self.overlap < 0:
            raise ConfigError("hard is a share in 0..1, overlap a weight from 0 up")


def settle(path: Path, plan: TextPlan | TrainPlan) -> None:
    """Write the plan down, or compare with what was begun under it."""
    now: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    if path.exists():
        before = json.loads(path.read_text())
        other = [key for key in now if before.get(key) != now[key]]
        if other:
            said = ", ".join(f"{key} was {before.get(key)} and is {now[key]}" for key in other)
            raise ConfigError(f"{path} was begun with other settings ({said}): use another work folder")
        return
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
