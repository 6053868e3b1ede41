"""Training run: the phases `generate`, `train`, `eval` over one work folder, each resumable.

work/text.json train.json    plans
work/text/                   shards of token ids; text/held: held-out texts
work/train/                  state.pt, curve.json; head/: the head as saved last
work/head/                   the trained head in this project's format
work/speculators/            the trained head for other engines
work/model/                  --kind mtp, in its place: copy of the checkpoint with the trained MTP layer
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
from draftproof.train.checkpoint_copy import write_checkpoint
from draftproof.train.config import KINDS, TextPlan, TrainPlan, check_plan, write_json
from draftproof.train.data.dataset import Text, coverage, frequent_ids, read_texts, shard_tokens
from draftproof.train.data.generate_text import Generator
from draftproof.train.export import write_head, write_speculators
from draftproof.train.progress import ProgressReporter
from draftproof.train.time_budget import measured
from draftproof.train.trainer import Trainer

TIMED_TEXT_UPDATES = 32  # text for this many updates is read to time one


class Run:
    """Phases over one work folder."""

    def __init__(self, work: Path, reporter: ProgressReporter, device: str = "auto") -> None:
        # cuBLAS is deterministic only with a fixed workspace, and reads this at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.work = work
        self.reporter = reporter
        self.device = device

    def generate(
        self, plan: TextPlan, stop_at: float | None = None, engine: Mapping[str, Any] | None = None
    ) -> bool:
        """Generate text until the plan is fulfilled; return False if `stop_at` came first."""
        check_plan(self.work / "text.json", plan, begin=False)
        folder = self.work / "text"
        held = plan.held_out == 0 or bool(shard_tokens(folder / "held"))
        if held and sum(shard_tokens(folder)) >= plan.tokens:
            self.reporter.log(f"generate: {sum(shard_tokens(folder)):,} tokens are complete")
            return True
        room = 2 * plan.prompt_tokens + plan.output_tokens + 64
        limit = load_config(plan.model)[0].max_position
        if room > limit:
            raise ConfigError(
                f"--prompt-tokens {plan.prompt_tokens} and --output-tokens {plan.output_tokens} need {room} "
                f"positions (twice the one, the other and 64), {plan.model} has {limit}: lower them"
            )
        options = {"device": self.device, "max_model_len": room, "max_num_seqs": 256, **(engine or {})}
        # No more KV than is used: training follows in the same process.
        options.setdefault("kv_cache_tokens", room * options["max_num_seqs"])
        llm = LLM(plan.model, **options)
        self.reporter.log(f"generate: {llm.engine.describe()}")
        try:
            begin = partial(check_plan, self.work / "text.json", plan)
            done = Generator(llm, plan, self.reporter, begin).run(folder, stop_at)
        finally:
            llm.close()
        if done and plan.held_out:
            self._report_coverage(folder, llm.engine.limits.vocab_size)
        return done

    def _report_coverage(self, folder: Path, vocab_size: int) -> None:
        texts, held = read_texts(folder), read_texts(folder / "held")
        shares = [
            f"{size:,}: {100 * coverage(held, frequent_ids(texts, vocab_size, size), vocab_size):.2f} %"
            for size in (4096, 8192, 16384, 32768)
            if size < vocab_size
        ]
        if shares:
            self.reporter.log(f"generate: held-out outputs covered by draft vocabulary: {', '.join(shares)}")

    def steps_for(self, plan: TrainPlan, seconds: float) -> int:
        """Return the number of updates that fit into `seconds` here; a resumed run keeps its number."""
        path = self.work / "train.json"
        if path.exists():
            steps = int(json.loads(path.read_text())["steps"])
            self.reporter.log(f"train: {steps} updates, as before: --seconds counts once per work folder")
            return steps
        began = time.monotonic()
        tokens = sum(shard_tokens(self.work / "text"))
        with repeatable():
            pace = measured(self._trainer(plan, TIMED_TEXT_UPDATES * plan.batch_tokens), began, tokens)
        steps = pace.steps(seconds, plan.eval_every)
        overhead = pace.overhead(steps, seconds, plan.eval_every)
        self.reporter.log(
            f"train: an update takes {1000 * pace.update:.0f} ms, everything else {overhead:.0f} s: "
            f"{steps} updates in {seconds:.0f} s"
        )
        return steps

    def train(self, plan: TrainPlan, stop_at: float | None = None, verifier: str | None = None) -> bool:
        """Train the head; return False if `stop_at` came first. `verifier`: the target's name elsewhere."""
        check_plan(self.work / "train.json", plan, begin=False)
        with repeatable():
            trainer = self._trainer(plan)
            check_plan(self.work / "train.json", plan)
            trainer.resume(self.work / "train")
            began = time.monotonic()
            if not trainer.run(self.work / "train", stop_at):
                return False
        spent = time.monotonic() - began
        self.reporter.log(f"train: {trainer.tokens:,} tokens in {trainer.step} steps; {spent:.0f} s now")
        self._write(trainer, verifier)  # before the logits are scaled, which may be interrupted
        if trainer.scale_logits():
            self._write(trainer, verifier)
        return True

    def evaluate(self, plan: TrainPlan, verifier: str | None = None) -> dict[str, Any]:
        """Measure acceptance on every held-out text, as training counts it and in the engine."""
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
            self.reporter.log(f"eval: {name}: acceptance length {value.length:.3f}, by position: {rates}")
        held = trainer.held
        del trainer
        gc.collect()  # frees memory for the engine
        if held:
            found["engine"] = self._in_engine(plan, held)
        write_json(self.work / "eval.json", found)
        return found

    def _in_engine(self, plan: TrainPlan, held: Sequence[Text]) -> dict[str, Any]:
        """Generate the held-out texts again with drafts, and count those that are equal."""
        room = max(len(text.tokens) for text in held) + plan.drafts + 1
        speculation: dict[str, Any] = {"method": plan.kind}
        speculation |= {"num_speculative_tokens": plan.drafts, "adaptive": False}
        model = str(self.work / "model")
        if not KINDS[plan.kind].is_layer_of_target:
            model, speculation["model"] = plan.model, str(self.work / "head")
        seqs = min(32, len(held))
        llm = LLM(
            model,
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
            expected = [text.tokens[text.prompt_length :].tolist() for text in some]
            params = [
                SamplingParams(temperature=temperature, seed=text.seed, max_tokens=len(tokens))
                for text, tokens in zip(some, expected, strict=True)
            ]
            outputs = llm.generate(requests, params, use_tqdm=False)
            pairs = zip(outputs, expected, strict=True)
            same = sum(output.outputs[0].token_ids == tokens for output, tokens in pairs)
            length = llm.stats.acceptance_length
            found[f"{temperature:g}"] = {"length": length, "texts": len(some), "same": same}
            self.reporter.log(
                f"eval: in the engine at temperature {temperature:g}: acceptance length {length:.3f}; "
                f"{same} of {len(some)} outputs equal those without drafts"
            )
        llm.close()
        return found

    def _write(self, trainer: Trainer, verifier: str | None) -> None:
        write_head(self.work / "head", trainer.config, trainer.weights, trainer.d2t, trainer.plan.bits)
        if KINDS[trainer.plan.kind].is_layer_of_target:
            write_checkpoint(self.work / "model", load_checkpoint(trainer.plan.model), trainer.weights)
            self.reporter.log(f"written: {self.work / 'head'} and {self.work / 'model'}")
            return
        target = trainer.target_model.config, trainer.target_model.head
        self._write_speculators(target, verifier, trainer.plan.drafts)

    def write(self, plan: TrainPlan, verifier: str | None = None) -> None:
        """Export the head of the work folder again; needs the model and no text."""
        head = self.work / "head"
        if not (head / "config.json").is_file():
            raise ConfigError(f"{head}: there is no head here: run the phase `train` first")
        checkpoint = load_checkpoint(plan.model)
        tensors, config = checkpoint.tensors, checkpoint.config
        # refuses that of another model
        _, stored = load_draft_head(head, TargetIdentity.from_weights(config, tensors))
        if KINDS[plan.kind].is_layer_of_target:
            write_checkpoint(self.work / "model", checkpoint, dequantize_all(stored))
            self.reporter.log(f"written: {self.work / 'model'}")
            return
        rows = tensors["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
        self._write_speculators((config, rows), verifier, plan.drafts)

    def _write_speculators(
        self, target: tuple[ModelConfig, Tensor], verifier: str | None, drafts: int
    ) -> None:
        """Export the head; `target`: configuration and LM head [vocab, hidden]."""
        config, stored = read_draft_head(self.work / "head", target[0].num_layers)
        weights = dequantize_all(stored)
        ids = weights.pop("d2t") if config.has_reduced_vocab else torch.arange(config.draft_vocab_size)
        other, rows = self.work / "speculators", target[1][ids.to(target[1].device)]
        write_speculators(other, config, weights, ids, target[0], rows, verifier=verifier, drafts=drafts)
        self.reporter.log(f"written: {self.work / 'head'} and {other}")

    def _trainer(self, plan: TrainPlan, enough: int | None = None) -> Trainer:
        """Build a trainer on all of the text, or on a sample of about `enough` tokens."""
        gc.collect()  # frees the tensors and graphs of an earlier trainer
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
            f"{trainer.steps:,} steps, {len(trainer.batches.epoch(0)):,} per epoch; "
            f"layers {list(trainer.config.aux_layers)}, {size:.1f} MB; "
            f"{len(trainer.d2t):,} ids cover {100 * share:.2f} % of held-out outputs"
        )
        if left_out := len(held) - len(trainer.held):
            self.reporter.log(
                f"train: {left_out} of {len(held)} held-out texts are left out: their prompts are not "
                f"shorter than --max-len {plan.max_len}"
            )
        return trainer

    def _incomplete(self, tokens: int) -> str:
        """Return a note if the text is not complete; training may begin before, and keeps what it has."""
        path = self.work / "text.json"
        wanted = int(json.loads(path.read_text())["tokens"]) if path.exists() else 0
        return f" of {wanted:,}: the text is not complete" if tokens < wanted else ""


@contextmanager
def repeatable() -> Iterator[None]:
    """Make ops deterministic; one without a deterministic implementation raises."""
    deterministic: Any = utils.deterministic
    modes = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # memory is written before it is read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(modes[0])
        deterministic.fill_uninitialized_memory = modes[1]
