"""A run: the phases `generate`, `train`, `eval` over one work folder, each resumable.

work/text.json train.json    the plans
work/text/                   shards of token ids; text/held: those never trained on
work/train/                  state.pt, curve.json; head/ as it was saved last
work/head/                   the head in our format
work/speculators/            the same for other engines
work/eval.json               acceptance on all held-out texts
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, utils

from draftproof.errors import ConfigError
from draftproof.llm import LLM
from draftproof.models.config import ModelConfig
from draftproof.models.draft_head.config import TargetIdentity
from draftproof.models.draft_head.formats import load_draft_head, read_draft_head
from draftproof.models.load import load_checkpoint, load_config
from draftproof.models.weight_formats import dequantize_all
from draftproof.ops import resolve_device
from draftproof.sampling_params import SamplingParams
from draftproof.train.config import TextPlan, TrainPlan, check_plan, write_json
from draftproof.train.data.dataset import Text, coverage, frequent_ids, read_texts, shard_tokens
from draftproof.train.data.generate_text import Generator
from draftproof.train.export import write_head, write_speculators
from draftproof.train.progress import ProgressReporter
from draftproof.train.time_budget import measured
from draftproof.train.trainer import Trainer

PACED = 32  # updates' worth of text, on which an update is timed


class Run:
    """One work folder."""

    def __init__(self, work: Path, reporter: ProgressReporter, device: str = "auto") -> None:
        # cuBLAS repeats its bits only with a workspace of its own, and reads this when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.work = work
        self.reporter = reporter
        self.device = device

    def generate(
        self, plan: TextPlan, stop_at: float | None = None, engine: Mapping[str, Any] | None = None
    ) -> bool:
        """Text until there is as much as the plan wants; whether there is."""
        check_plan(self.work / "text.json", plan, begin=False)
        folder = self.work / "text"
        held = plan.held_out == 0 or bool(shard_tokens(folder / "held"))
        if held and sum(shard_tokens(folder)) >= plan.tokens:
            self.reporter.log(f"generate: {sum(shard_tokens(folder)):,} tokens are there")
            return True
        room = 2 * plan.prompt_tokens + plan.answer_tokens + 64
        there = load_config(plan.model)[0].max_position
        if room > there:
            raise ConfigError(
                f"--prompt-tokens {plan.prompt_tokens} and --answer-tokens {plan.answer_tokens} need {room} "
                f"positions (twice the one, the other and 64), {plan.model} has {there}: lower them"
            )
        options = {"device": self.device, "max_model_len": room, "max_num_seqs": 256, **(engine or {})}
        # no more KV than is used: in the same process the training comes next
        options.setdefault("kv_cache_tokens", room * options["max_num_seqs"])
        llm = LLM(plan.model, **options)
        self.reporter.log(f"generate: {llm.engine.describe()}")
        try:
            begin = partial(check_plan, self.work / "text.json", plan)
            done = Generator(llm, plan, self.reporter, begin).run(folder, stop_at)
        finally:
            llm.close()
        if done and plan.held_out:
            self._tell_coverage(folder, llm.engine.limits.vocab_size)
        return done

    def _tell_coverage(self, folder: Path, vocab_size: int) -> None:
        """What to know before a draft vocabulary is chosen."""
        texts, held = read_texts(folder), read_texts(folder / "held")
        sizes = [size for size in (4096, 8192, 16384, 32768) if size < vocab_size]
        words = [
            f"{size:,}: {100 * coverage(held, frequent_ids(texts, vocab_size, size), vocab_size):.2f} %"
            for size in sizes
        ]
        if words:
            self.reporter.log(f"generate: share of held-out answers by draft vocabulary: {', '.join(words)}")

    def steps_for(self, plan: TrainPlan, seconds: float) -> int:
        """How many updates this machine does in so long; as they were counted before, if they were."""
        path = self.work / "train.json"
        if path.exists():
            steps = int(json.loads(path.read_text())["steps"])
            self.reporter.log(f"train: {steps} updates, as before: --seconds is asked once a work folder")
            return steps
        began = time.monotonic()
        tokens = sum(shard_tokens(self.work / "text"))
        with repeatable():
            pace = measured(self._trainer(plan, PACED * plan.batch_tokens), began, tokens)
        steps = pace.steps(seconds, plan.eval_every)
        overhead = pace.overhead(steps, seconds, plan.eval_every)
        self.reporter.log(
            f"train: an update takes {1000 * pace.update:.0f} ms here, and everything else {overhead:.0f} s: "
            f"{steps} updates in {seconds:.0f} s"
        )
        return steps

    def train(self, plan: TrainPlan, stop_at: float | None = None, verifier: str | None = None) -> bool:
        """The head, written when it is done; whether it is. `verifier`: the target's name elsewhere."""
        check_plan(self.work / "train.json", plan, begin=False)
        with repeatable():
            trainer = self._trainer(plan)
            check_plan(self.work / "train.json", plan)
            trainer.resume(self.work / "train")
            began = time.monotonic()
            done = trainer.run(self.work / "train", stop_at)
        if not done:
            return False
        spent = time.monotonic() - began
        self.reporter.log(
            f"train: {trainer.tokens:,} tokens in {trainer.step} steps; {spent:.0f} s this time"
        )
        self._write(trainer, verifier)  # whatever happens from now on, there is a head
        if trainer.scale_logits():
            self._write(trainer, verifier)
        return True

    def evaluate(self, plan: TrainPlan, verifier: str | None = None) -> dict[str, Any]:
        """Acceptance of the trained weights, cut short or not, on every held-out text, twice: as training
        counts it, and in the engine, whose answers must be the texts."""
        check_plan(self.work / "train.json", plan, begin=False)
        trainer = self._trainer(plan)
        trainer.resume(self.work / "train")
        if not trainer.step and not plan.begin:
            raise ConfigError(f"{self.work}: nothing is trained here: run the phase `train` first")
        trainer.scale_logits()
        self._write(trainer, verifier)
        found: dict[str, Any] = {}
        for name, value in trainer.accepted(trainer.held).items():
            found[name] = value.to_json()
            rates = " ".join(f"{rate:.3f}" for rate in value.rates)
            self.reporter.log(f"eval: {name}: acceptance length {value.length:.3f}, drafts stood: {rates}")
        held, kind = trainer.held, trainer.config.kind
        del trainer
        gc.collect()  # its memory: the engine comes next
        if held:
            found["engine"] = self._in_engine(plan, kind, held)
        write_json(self.work / "eval.json", found)
        return found

    def _in_engine(self, plan: TrainPlan, kind: str, held: Sequence[Text]) -> dict[str, Any]:
        """Answer the held-out prompts again, with the head: the same answers, in fewer steps."""
        room = max(len(text.tokens) for text in held) + plan.drafts + 1
        speculation = {
            "method": kind,
            "model": str(self.work / "head"),
            "num_speculative_tokens": plan.drafts,
            "adaptive": False,
        }
        seqs = min(32, len(held))
        llm = LLM(
            plan.model,
            device=self.device,
            speculative_config=speculation,
            max_model_len=room,
            max_num_seqs=seqs,
            kv_cache_tokens=room * seqs,
        )
        found = {}
        for temperature in sorted({text.temperature for text in held}):
            some = [text for text in held if text.temperature == temperature]
            llm.reset_stats()
            requests = [{"prompt_token_ids": text.tokens[: text.prompt_length].tolist()} for text in some]
            params = [
                SamplingParams(
                    temperature=temperature, seed=text.seed, max_tokens=len(text.tokens) - text.prompt_length
                )
                for text in some
            ]
            outputs = llm.generate(requests, params, use_tqdm=False)
            same = sum(
                out.outputs[0].token_ids == text.tokens[text.prompt_length :].tolist()
                for out, text in zip(outputs, some, strict=True)
            )
            length = llm.stats.acceptance_length
            found[f"{temperature:g}"] = {"length": length, "texts": len(some), "same": same}
            self.reporter.log(
                f"eval: in the engine at temperature {temperature:g}: acceptance length {length:.3f}; "
                f"{same} of {len(some)} answers are those without drafts"
            )
        llm.close()
        return found

    def _write(self, trainer: Trainer, verifier: str | None) -> None:
        write_head(self.work / "head", trainer.config, trainer.weights, trainer.d2t, trainer.plan.bits)
        target = trainer.target_model.config, trainer.target_model.head
        self._write_speculators(target, verifier, trainer.plan.drafts)

    def write(self, plan: TrainPlan, verifier: str | None = None) -> None:
        """The head of the work folder for other engines, once more; it takes the model, and no text."""
        if not (self.work / "head" / "config.json").is_file():
            raise ConfigError(f"{self.work / 'head'}: there is no head here: run the phase `train` first")
        checkpoint = load_checkpoint(plan.model)
        tensors, config = checkpoint.tensors, checkpoint.config
        load_draft_head(
            self.work / "head", TargetIdentity.from_weights(config, tensors)
        )  # is it this model's?
        rows = tensors["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
        self._write_speculators((config, rows), verifier, plan.drafts)

    def _write_speculators(
        self, target: tuple[ModelConfig, Tensor], verifier: str | None, drafts: int
    ) -> None:
        """target: its description and its LM head [vocab, hidden]."""
        config, stored = read_draft_head(self.work / "head", target[0].num_layers)
        weights = dequantize_all(stored)
        ids = weights.pop("d2t") if config.has_reduced_vocab else torch.arange(config.draft_vocab_size)
        other, rows = self.work / "speculators", target[1][ids.to(target[1].device)]
        write_speculators(other, config, weights, ids, target[0], rows, verifier=verifier, drafts=drafts)
        self.reporter.log(f"written: {self.work / 'head'} and {other}")

    def _trainer(self, plan: TrainPlan, enough: int | None = None) -> Trainer:
        """On all of the text, or on about `enough` tokens from all over it."""
        gc.collect()  # the one before, what it kept and captured: this one needs the room
        folder = self.work / "text"
        texts = read_texts(folder)
        if enough is not None:
            texts = texts[:: max(1, sum(shard_tokens(folder)) // enough)]
        held = read_texts(folder / "held") if shard_tokens(folder / "held") else []
        checkpoint = load_checkpoint(plan.model)
        trainer = Trainer(plan, checkpoint, texts, held, resolve_device(self.device), self.reporter)
        if enough is not None:
            return trainer
        tokens = sum(len(text.tokens) for text in texts)
        size = plan.bits / 8 * sum(weight.numel() for weight in trainer.weights.values()) / 1e6
        share = coverage(trainer.held, trainer.d2t.cpu().numpy(), checkpoint.config.vocab_size)
        self.reporter.log(
            f"train: {len(texts):,} texts, {tokens:,} tokens{self._incomplete(tokens)}; "
            f"{trainer.steps:,} steps, {len(trainer.batches.epoch(0)):,} see all of it; "
            f"layers {list(trainer.config.aux_layers)}, {size:.1f} MB; "
            f"{len(trainer.d2t):,} ids cover {100 * share:.2f} % of held-out answers"
        )
        if left_out := len(held) - len(trainer.held):
            said = (
                f"{left_out} of {len(held)} held-out texts are left out: their prompts are not shorter than"
            )
            self.reporter.log(f"train: {said} --max-len {plan.max_len}")
        return trainer

    def _incomplete(self, tokens: int) -> str:
        """Training may begin before the text is done; what it began with is what it goes on with."""
        path = self.work / "text.json"
        wanted = int(json.loads(path.read_text())["tokens"]) if path.exists() else 0
        return f" of {wanted:,}: the text is not complete" if tokens < wanted else ""


@contextmanager
def repeatable() -> Iterator[None]:
    """The same bits from the same run. What has no such way raises, instead of doing it another way."""
    deterministic: Any = utils.deterministic
    modes = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # nothing is read before it is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(modes[0])
        deterministic.fill_uninitialized_memory = modes[1]
