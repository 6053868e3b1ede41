"""A run: the phases `generate`, `train`, `eval` over one work folder, each resumable.

work/text.json train.json    the plans
work/text/                   shards of token ids; text/held: those never trained on
work/train/                  state.pt, curve.json, curve.png
work/head/                   the head in our format
work/speculators/            the same for other engines
work/eval.json               acceptance on all held-out texts
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftproof.llm import LLM
from draftproof.models.load import load_checkpoint
from draftproof.ops import resolve_device
from draftproof.train.config import TextPlan, TrainPlan, settle, write_json
from draftproof.train.generate import Generator
from draftproof.train.loop import Trainer
from draftproof.train.telling import Telling
from draftproof.train.texts import Text, read_texts, shard_tokens
from draftproof.train.write import write_head, write_speculators


class Run:
    """One work folder."""

    def __init__(self, work: Path, telling: Telling, device: str = "auto") -> None:
        self.work = work
        self.telling = telling
        self.device = device

    def generate(
        self, plan: TextPlan, stop_at: float | None = None, engine: Mapping[str, Any] | None = None
    ) -> bool:
        """Text until there is as much as the plan wants; whether there is."""
        settle(self.work / "text.json", plan)
        folder = self.work / "text"
        held = plan.held_out == 0 or bool(shard_tokens(folder / "held"))
        if held and sum(shard_tokens(folder)) >= plan.tokens:
            self.telling.say(f"generate: {sum(shard_tokens(folder)):,} tokens are there")
            return True
        room = 2 * plan.prompt_tokens + plan.answer_tokens + 64
        options = {"device": self.device, "max_model_len": room, "max_num_seqs": 256, **(engine or {})}
        # no more KV than is used: in the same process the training comes next
        options.setdefault("kv_cache_tokens", room * options["max_num_seqs"])
        llm = LLM(plan.model, **options)
        self.telling.say(f"generate: {llm.engine.describe()}")
        try:
            return Generator(llm, plan, self.telling).run(folder, stop_at)
        finally:
            llm.close()

    def train(
        self,
        plan: TrainPlan,
        stop_at: float | None = None,
        verifier: str | None = None,
        load: Mapping[str, Any] | None = None,
    ) -> bool:
        """The head, written when it is done; whether it is. `verifier`: the target's name elsewhere."""
        settle(self.work / "train.json", plan)
        trainer = self._trainer(plan, load or {})
        trainer.resume(self.work / "train")
        began = time.monotonic()
        if not trainer.run(self.work / "train", stop_at):
            return False
        self.telling.say(
            f"train: {trainer.tokens:,} tokens in {trainer.step} steps, {time.monotonic() - began:.0f} s"
        )
        config = trainer.teacher.config
        write_head(self.work / "head", trainer.config, trainer.weights, trainer.d2t)
        write_speculators(
            self.work / "speculators",
            trainer.config,
            trainer.weights,
            trainer.d2t,
            config,
            trainer.head,
            verifier=verifier,
            drafts=plan.unroll,
        )
        self.telling.say(f"train: written to {self.work / 'head'} and {self.work / 'speculators'}")
        return True

    def evaluate(self, plan: TrainPlan, load: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Acceptance of the trained weights, cut short or not, on every held-out text."""
        settle(self.work / "train.json", plan)
        trainer = self._trainer(plan, load or {})
        trainer.resume(self.work / "train")
        found = {name: value.to_json() for name, value in trainer.accepted(trainer.held).items()}
        for name, value in found.items():
            rates = " ".join(f"{rate:.3f}" for rate in value["rates"])
            self.telling.say(f"eval: {name}: acceptance length {value['length']:.3f}, drafts stood: {rates}")
        write_json(self.work / "eval.json", {"step": trainer.step, **found})
        return found

    def _trainer(self, plan: TrainPlan, load: Mapping[str, Any]) -> Trainer:
        # cuBLAS repeats its bits only with a workspace of its own; it reads this when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        folder = self.work / "text"
        texts = read_texts(folder)
        held: list[Text] = read_texts(folder / "held") if shard_tokens(folder / "held") else []
        checkpoint = load_checkpoint(plan.model, **load)
        device = resolve_device(self.device)
        trainer = Trainer(plan, checkpoint, texts, held, device, self.telling)
        tokens = sum(len(text.tokens) for text in texts)
        size = 2 * sum(weight.numel() for weight in trainer.weights.values()) / 1e6
        self.telling.say(
            f"train: {len(texts):,} texts, {tokens:,} tokens; {trainer.steps:,} steps, "
            f"{len(trainer.batches.epoch(0)):,} see all of it; "
            f"layers {list(trainer.config.aux_layers)}, {len(trainer.d2t):,} ids, {size:.1f} MB"
        )
        return trainer
