"""Plans of a training run: text and training, frozen and stored in the work folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftproof.errors import ConfigError


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """Plan of the text. A plan determines the text, whatever the batch and wherever a run stopped."""

    model: str
    prompts: tuple[str, ...] = ()  # JSONL files
    prompts_digest: str = ""  # of their contents
    seed: int = 0
    tokens: int = _option(1_000_000, "minimum number of tokens, prompts included")
    held_out: int = _option(64, "prompts of the files, and as many self-written ones, that are held out")
    shard: int = _option(1024, "texts per shard")
    written: float = _option(0.8, "share of prompts that the model writes; the others come from the files")
    systems: float = _option(0.2, "share of the written prompts with a written system message")
    opened: float = _option(0.5, "share of the other written prompts that start from a common opening")
    shown: float = _option(0.3, "share of the written prompts that are about a text written before")
    greedy: float = _option(0.5, "share of outputs at temperature 0")
    temperature: float = _option(1.0, "temperature of the other outputs")
    follow: float = _option(0.3, "share of conversations that continue with another turn")
    prompt_tokens: int = _option(640, "maximum prompt length; longer prompts are left out")
    output_tokens: int = _option(384, "maximum output length")

    def __post_init__(self) -> None:
        for name in ("written", "systems", "opened", "shown", "greedy", "follow"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share in 0..1, got {getattr(self, name)}")
        _positive(self, ("tokens", "shard", "prompt_tokens", "output_tokens", "temperature"))
        if self.held_out < 0:
            raise ConfigError(f"held_out is not negative, got {self.held_out}")
        if abs(1000 * self.temperature - round(1000 * self.temperature)) > 1e-9:
            raise ConfigError(f"temperature is kept in thousandths, got {self.temperature}: round it")
        if not self.prompts and self.written < 1:
            raise ConfigError("give a file of --prompts, or --written 1: the model then writes all of them")


@dataclass(frozen=True, slots=True)
class TrainedKind:
    """Kind of draft head that can be trained."""

    feature: str  # one of `draft_head.config.FEATURES`
    is_layer_of_target: bool  # has the tensors of a layer, and is written into a copy of the checkpoint


KINDS = {
    "eagle3": TrainedKind(feature="aux", is_layer_of_target=False),
    "mtp": TrainedKind(feature="last_normed", is_layer_of_target=True),
}
# Options of heads that are not a layer of the target, with the values that a layer of the target has.
_HEAD_OPTIONS: dict[str, Any] = {
    "aux_layers": (),
    "intermediate_size": 0,
    "feature_norm": "none",
    "norm_output": 0,
    "bits": 16,
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    **dict.fromkeys(("norm_output", "keep", "new_ids", "scale_logits"), (0, 1)),
    "feature_norm": ("none", "each"),
    "bits": (8, 16),
    "optimizer": ("adamw", "muon"),
    "dtype": ("bfloat16", "float32"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """Plan of the head and its training."""

    model: str
    seed: int = 0
    kind: str = _option("eagle3", "eagle3: a head of its own. mtp: an MTP layer in a copy of the checkpoint")
    aux_layers: tuple[int, ...] = ()  # (): one low, one in the middle, one high
    intermediate_size: int = _option(0, "MLP size of the head; 0: that of the target")
    feature_norm: str = _option(
        "none", "norm of the target states before they are concatenated: none or each"
    )
    norm_output: int = _option(0, "1: the next draft reads the row after the last norm; 0: before it")
    draft_vocab: int = _option(
        16384, "size of the draft vocabulary; 0: all ids. mtp: ids that the loss compares; all are drafted"
    )
    unroll: int = _option(4, "drafts per position that are trained")
    drafts: int = _option(4, "drafts per position whose acceptance is measured")
    epochs: float = _option(4.0, "passes over the text, unless --steps is given")
    steps: int = _option(0, "number of updates; 0: from --epochs")
    batch_tokens: int = _option(32768, "tokens per update, padding included")
    max_len: int = _option(1024, "maximum text length")
    learning_rate: float = _option(6e-3, "peak learning rate; with adamw a third of it or less")
    warmup: int = _option(100, "warm-up updates")
    decay: float = _option(0.8, "loss weight factor of each further draft")
    prompt_weight: float = _option(0.2, "loss weight of prompt rows; output rows have 1")
    prompt_rows: int = _option(1, "every n-th row of a prompt is trained, with n times the weight")
    clip: float = _option(1.0, "maximum gradient norm")
    optimizer: str = _option("muon", "optimizer of matrices: muon or adamw; adamw for the rest")
    weight_decay: float = _option(0.0, "weight decay")
    hard: float = _option(0.1, "share of the target's distribution moved to its best token, at temperature 0")
    overlap: float = _option(1.0, "weight of 1 - sum min(target_probs, draft_probs)")
    scale_logits: int = _option(1, "1: scale the logits at the end for the best held-out acceptance")
    begin: str = _option("", "folder of a head to continue from, with its draft ids; empty: a new head")
    new_ids: int = _option(0, "1: with --begin, choose the draft ids from the text again")
    keep: int = _option(0, "1: compute the target states once and keep them on the device")
    bits: int = _option(16, "bits of stored matrices: 16, or 8 with a scale per row")
    dtype: str = _option("bfloat16", "dtype of activations: bfloat16 or float32; weights are trained in fp32")
    eval_every: int = _option(250, "updates between two evaluations")
    eval_texts: int = _option(48, "held-out texts of an evaluation")

    def __post_init__(self) -> None:
        _positive(self, ("unroll", "drafts", "batch_tokens", "max_len", "eval_every", "prompt_rows"))
        _positive(self, ("learning_rate", "epochs", "clip"))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = " or ".join(map(str, choices))
                raise ConfigError(f"{name} is {known}, got {getattr(self, name)!r}")
        for name, value in _HEAD_OPTIONS.items() if KINDS[self.kind].is_layer_of_target else ():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{name} is an option of --kind eagle3: an MTP layer is a layer of the model"
                )
        if min(self.draft_vocab, self.intermediate_size, self.steps, self.eval_texts, self.warmup) < 0:
            raise ConfigError("draft_vocab, intermediate_size, steps, eval_texts and warmup are not negative")
        if not 0 <= self.hard < 1 or self.overlap < 0 or self.prompt_weight < 0:
            raise ConfigError("hard is a share in 0..1, overlap and prompt_weight are not negative")


def _positive(plan: TextPlan | TrainPlan, names: tuple[str, ...]) -> None:
    for name in names:
        if not getattr(plan, name) > 0:
            raise ConfigError(f"{name} must be positive, got {getattr(plan, name)}")


def check_plan(path: Path, plan: TextPlan | TrainPlan, begin: bool = True) -> None:
    """Compare a plan with the one stored at `path`; with `begin` store it if there is none."""
    now: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    if path.exists():
        before = json.loads(path.read_text())
        other = [key for key in now if before.get(key) != now[key]]
        if other:
            differences = ", ".join(f"{key} was {before.get(key)} and is {now[key]}" for key in other)
            raise ConfigError(
                f"{path} was started with other settings ({differences}): use another work folder"
            )
    elif begin:
        write_json(path, now)


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(half, path)


def digest_files(paths: tuple[str, ...]) -> str:
    """Return a digest of the contents of files; raise ConfigError for one that cannot be read."""
    known = hashlib.sha256()
    for path in paths:
        try:
            known.update(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return known.hexdigest()[:16]
