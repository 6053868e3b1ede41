"""Training loop of a draft head. A run that is stopped and resumed gives the same weights."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.errors import ConfigError, LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.draft_head.checkpoint_mtp import has_mtp_tensors
from draftproof.models.draft_head.config import LAYER_FLAGS, LAYER_SIZES, DraftHeadConfig, TargetIdentity
from draftproof.models.draft_head.formats import load_draft_head
from draftproof.models.load import DTYPES, Checkpoint
from draftproof.models.weight_formats import dequantize_all, read_weights
from draftproof.ops import resolve
from draftproof.train.config import KINDS, TrainPlan, write_json
from draftproof.train.data.dataset import Batch, Batches, Text, frequent_ids, usable
from draftproof.train.data.hidden_states import TargetStateCache
from draftproof.train.evaluate import Acceptance, Evaluator
from draftproof.train.export import stored, write_head
from draftproof.train.model.grad_graph import MAX_ROW_COUNTS, BatchTensors, GradientGraph, GradientsAndLoss
from draftproof.train.model.head_module import HeadModule, new_weights
from draftproof.train.model.loss import LossWeights, Rows, unrolled_loss
from draftproof.train.model.target_forward import TargetModel
from draftproof.train.optimizer import HeadOptimizer
from draftproof.train.progress import ProgressReporter

STATE = "state.pt"
LOG_INTERVAL_SECONDS = 10.0  # seconds between two lines
SAVE_INTERVAL_SECONDS = 60.0  # seconds between two saved states
LOSS_INTERVAL_STEPS = 10  # updates; the others go without the value of their loss


def head_config(plan: TrainPlan, checkpoint: Checkpoint, draft_vocab: int) -> DraftHeadConfig:
    """Return the configuration of the head that a plan describes for this target."""
    config = checkpoint.config
    if config.rope_scaling.kind not in ("none", "linear", "llama3"):
        raise ConfigError(
            f"a head for rope scaling {config.rope_scaling.kind!r} is not supported: "
            "default, linear and llama3 are"
        )
    kind = KINDS[plan.kind]
    flags = {name: getattr(config, name) for name in LAYER_FLAGS} if kind.is_layer_of_target else {}
    made = DraftHeadConfig(
        kind=plan.kind,
        **{name: getattr(config, name) for name in LAYER_SIZES},
        **flags,
        intermediate_size=plan.intermediate_size or config.intermediate_size,
        rms_norm_eps=config.norm_eps,
        feature=kind.feature,
        aux_layers=(plan.aux_layers or _three_layers(config)) if kind.feature == "aux" else (),
        draft_vocab_size=config.vocab_size if kind.is_layer_of_target else draft_vocab,
        share_lm_head=True,
        feature_norm=plan.feature_norm,
        norm_output=bool(plan.norm_output),
        target=TargetIdentity.from_weights(config, checkpoint.tensors),
    )
    if kind.is_layer_of_target:
        _check_layer(checkpoint)
    return made


def _check_layer(checkpoint: Checkpoint) -> None:
    """Raise ConfigError if the layers of the target are not those that training computes."""
    config = checkpoint.config
    if not config.has_plain_layers or any(config.windows):
        raise ConfigError(
            f"an MTP layer for {config.architecture} cannot be trained: training computes dense layers as "
            "those of Llama and Qwen, without attention windows"
        )
    if checkpoint.source is not None and has_mtp_tensors(checkpoint.source):
        raise ConfigError(f"{checkpoint.source} has an MTP layer: draft with it, method 'mtp' needs no model")


def load_initial_head(folder: str, wanted: DraftHeadConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a head to continue from, weights in fp32.

    Raise ConfigError if the head differs from the plan. Its MLP may become wider: added down-projection
    columns are zero, so outputs do not change at first. Its draft ids may change, since they are rows of the
    target's LM head; the result then has no d2t.
    """
    config, weights = load_draft_head(folder, wanted.target)
    tensors = dequantize_all(weights)
    ours, theirs = wanted.to_json(), config.to_json()
    if config.intermediate_size < wanted.intermediate_size:
        theirs["intermediate_size"] = wanted.intermediate_size
    if config.draft_vocab_size != wanted.draft_vocab_size:
        theirs["draft_vocab_size"] = wanted.draft_vocab_size
        tensors.pop("d2t", None)
    if other := [
        f"{key} is {theirs[key]}, wanted is {ours[key]}" for key in ours if ours[key] != theirs[key]
    ]:
        raise ConfigError(f"{folder}: training cannot continue from this head: {'; '.join(other)}")
    initial = {name: t if name == "d2t" else t.float() for name, t in tensors.items()}
    generator = torch.Generator().manual_seed(seed)
    for name, (high, wide) in ((n, shape) for n, shape in wanted.tensors().items() if ".mlp." in n):
        old, whole = initial[name], torch.zeros(high, wide)
        if not name.endswith("down_proj.weight"):
            whole.normal_(std=wide**-0.5, generator=generator)
        whole[: old.shape[0], : old.shape[1]] = old
        initial[name] = whole
    return initial


def _three_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return a low, a middle and a high layer; fewer for a model with fewer layers."""
    last = config.num_layers - 1
    return tuple(sorted({min(2, last), last // 2, max(0, last - 2)}))


def loss_weight(batch: Batch, plan: TrainPlan, step: int) -> tuple[Tensor, Tensor]:
    """Return the loss weight [unroll, B * T] of each draft position and the greedy-text flag [B * T]."""
    row, lengths = np.arange(batch.tokens.shape[1])[None, :], batch.lengths[:, None]
    # Every `prompt_rows`-th row of a prompt, with the weight of those skipped; the next update uses others.
    prompt = np.where((row + step) % plan.prompt_rows, 0.0, plan.prompt_weight * plan.prompt_rows)
    whole = np.where(row >= batch.prompt_lengths[:, None] - 1, 1.0, prompt)
    weight = np.stack([whole * (row + 2 + j < lengths) * plan.decay**j for j in range(plan.unroll)])
    weight = (weight / max(1.0, weight[0].sum())).astype(np.float32).reshape(plan.unroll, -1)
    greedy_rows = batch.greedy_rows.astype(np.float32).repeat(row.shape[1])
    return torch.from_numpy(weight), torch.from_numpy(greedy_rows)


class Trainer:
    """Training state of one head. `step` counts its updates."""

    def __init__(
        self,
        plan: TrainPlan,
        checkpoint: Checkpoint,
        texts: Sequence[Text],
        held: Sequence[Text],
        device: torch.device,
        reporter: ProgressReporter,
    ) -> None:
        self.plan, self.reporter, self.device = plan, reporter, device
        self.held = usable(held, plan.max_len)
        self.dtype = DTYPES[plan.dtype]
        vocab = checkpoint.config.vocab_size
        count = min(plan.draft_vocab or vocab, vocab)
        self.config = head_config(plan, checkpoint, count)
        initial = load_initial_head(plan.begin, self.config, plan.seed) if plan.begin else {}
        ids = initial.pop("d2t", None)
        if ids is None or plan.new_ids:
            ids = torch.from_numpy(frequent_ids(texts, vocab, count))
        self.d2t = ids.to(device)  # ids that the loss compares
        drafted = self.d2t if self.config.has_reduced_vocab else torch.arange(vocab, device=device)
        room = plan.max_len + plan.unroll + plan.drafts + 64
        self.target_model = TargetModel(checkpoint.config, checkpoint.tensors, device, self.dtype, room)
        self.module = HeadModule(self.config, device, room)
        self.head = self.target_model.head[self.d2t]  # [draft vocab, hidden]
        self.ops = resolve("auto", device)
        self.evaluator = Evaluator(self.target_model, self.module, drafted, self.ops, plan.drafts)
        self.batches = Batches(texts, plan.batch_tokens, plan.max_len, plan.seed)
        self.steps = plan.steps or math.ceil(plan.epochs * len(self.batches.epoch(0)))
        self.target_states = TargetStateCache(
            self.target_model, self.batches, self.config.aux_layers, self.ops, bool(plan.keep)
        )
        self.loss_weights = LossWeights(plan.hard, plan.overlap)
        self.decays = torch.tensor([plan.decay**j for j in range(plan.unroll)], device=device)
        self.step = self.tokens = 0
        self.curve: list[dict[str, Any]] = []
        fresh = initial or new_weights(
            self.config, self._feature_sizes(), checkpoint.tensors["model.norm.weight"], plan.seed
        )
        self.weights = {name: weight.to(device).requires_grad_() for name, weight in fresh.items()}
        self.optimizer = HeadOptimizer(plan, self.weights, self.steps)
        self.gradients = GradientGraph(self._gradients, list(self.weights.values()), plan.unroll, self.ops)

    def _feature_sizes(self) -> Tensor:
        """Return the median row size [layers]; the first rows of a text can be a hundred times as large."""
        if not self.config.aux_layers:
            return torch.ones(1)
        batch = next(self.batches.from_step(0))
        tokens = torch.from_numpy(batch.tokens[:8]).to(self.device)
        features = self.target_model(tokens, self.config.aux_layers).features.float()
        rows = features.view(-1, len(self.config.aux_layers), self.config.hidden_size)
        return rows.square().mean(-1).sqrt().cpu().median(dim=0).values

    # --- updates -----------------------------------------------------------------------------------

    def run(self, folder: Path, stop_at: float | None = None) -> bool:
        """Train to the end or until `stop_at` (`time.monotonic()`); return whether training is done."""
        began, last_log, saved = time.monotonic(), time.monotonic(), time.monotonic()
        first, before = self.step, self.tokens
        parts: Tensor | None = None
        if not self.curve:
            self.record_curve_point(folder)
        for batch in self.batches.from_step(self.step):
            if self.step >= self.steps or (stop_at is not None and time.monotonic() > stop_at):
                break
            last = self.step + 1 == self.steps or (self.step + 1) % self.plan.eval_every == 0
            measured = last or self.step % LOSS_INTERVAL_STEPS == 0
            found = self.learn(batch, measured)
            parts = found if measured else parts
            if last:
                self.record_curve_point(folder, parts)
            self.reporter.update("train", self.step, self.steps)
            now = time.monotonic()
            if parts is not None and (now - last_log > LOG_INTERVAL_SECONDS or self.step == first + 1):
                last_log = now
                self._report(
                    parts, (now - began) / (self.step - first), (self.tokens - before) / (now - began)
                )
            if now - saved > SAVE_INTERVAL_SECONDS:
                self.save(folder)
                saved = time.monotonic()
        self.save(folder)
        done = self.step >= self.steps
        if not done:
            self.reporter.log(f"train: stopped at step {self.step} of {self.steps}; the same command resumes")
        return done

    def learn(self, batch: Batch, measure: bool = True) -> Tensor:
        """Apply one update; return the loss of each draft position [unroll] on the device."""
        gradients, parts = self.gradients(self._batch_tensors(batch), measure)
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.grad = gradient
        self.optimizer.apply(self.step)
        self.step += 1
        self.tokens += int(batch.lengths.sum())
        return parts / self.decays

    def _batch_tensors(self, batch: Batch) -> BatchTensors:
        grain = 1
        if self.gradients.replays:
            batch = batch.padded_to(self.plan.batch_tokens // batch.tokens.shape[1])
            grain = -(-batch.tokens.size // MAX_ROW_COUNTS)
        if self.target_states.keep:
            self.target_states.compute_all()  # before anything is captured
        weight, greedy_rows = loss_weight(batch, self.plan, self.step)
        rows = Rows.from_weights(weight, grain)
        stored = self.target_states.places(batch)
        tokens = torch.from_numpy(batch.tokens)
        return BatchTensors(tokens, stored, weight, greedy_rows, *rows)

    def _gradients(self, batch_tensors: BatchTensors, measure: bool) -> GradientsAndLoss:
        """Compute gradients and losses from tensors on the device."""
        unroll, tokens = self.plan.unroll, batch_tensors.tokens
        states = self.target_states(tokens, batch_tensors.stored)
        embeds = F.embedding(F.pad(tokens, (0, unroll)), self.target_model.embedding)
        rounded = {name: weight.to(self.dtype) for name, weight in self.weights.items()}
        outputs = self.module.unroll(rounded, self.module.rows(states), embeds, unroll)
        student = self.module.normed(rounded, outputs).flatten(1, 2)
        there = states.hidden.flatten(0, 1)
        weight, greedy_rows, *rows = batch_tensors[2:]
        loss, parts = unrolled_loss(
            student, there, self.head, weight, greedy_rows, Rows(*rows), self.loss_weights, measure
        )
        return torch.autograd.grad(loss, list(self.weights.values())), parts

    # --- evaluation ------------------------------------------------------------------------------------

    def rounded(self) -> dict[str, Tensor]:
        """Return the weights as they will be stored, for evaluation."""
        read = dequantize_all(read_weights(stored(self.weights, self.plan.bits)))
        return {name: weight.to(self.dtype) for name, weight in read.items()}

    def accepted(self, texts: Sequence[Text]) -> dict[str, Acceptance]:
        """Return the acceptance on texts with the weights as they will be stored."""
        return self.evaluator(self.rounded(), texts, self.plan.max_len)

    @property
    def scales_logits(self) -> bool:
        """Whether logits are scaled at the end; not where the last norm feeds the next draft."""
        return bool(self.plan.scale_logits) and not self.config.norm_output

    def scale_logits(self) -> bool:
        """Scale the last norm by the factor with the best held-out acceptance; return whether it was done."""
        if self.plan.scale_logits and not self.scales_logits:
            self.reporter.log("train: logits not scaled: with --norm-output 1 the norm feeds the next draft")
        if not self.scales_logits:
            return False
        found = self.evaluator.acceptance_by_logit_scale(self.rounded(), self.held, self.plan.max_len)
        if not found:
            return False
        best = max(found, key=lambda factor: found[factor].length)
        lengths = ", ".join(f"{factor:g}: {value.length:.3f}" for factor, value in found.items())
        self.reporter.log(f"train: acceptance length by logit scale: {lengths}")
        with torch.no_grad():
            self.weights["norm.weight"].mul_(best)
        return True

    def record_curve_point(self, folder: Path, parts: Tensor | None = None) -> None:
        """Add a point to the curve: the loss and the acceptance on held-out texts."""
        found = self.accepted(self.held[: self.plan.eval_texts])
        losses = [] if parts is None else [float(x) for x in parts.cpu()]
        if any(not math.isfinite(x) for x in losses):
            raise LoadError(f"the loss is not finite after step {self.step}: try a smaller learning rate")
        acceptance = {name: value.to_json() for name, value in found.items()}
        point = {"step": self.step, "tokens": self.tokens, "loss": losses, "acceptance": acceptance}
        self.curve.append(point)
        write_json(folder / "curve.json", self.curve)
        lengths = ", ".join(f"{name} {value.length:.3f}" for name, value in found.items())
        self.reporter.log(f"train: step {self.step}: acceptance length {lengths}")

    def _report(self, parts: Tensor, pace: float, rate: float) -> None:
        losses = " ".join(f"{float(x):.3f}" for x in parts.cpu())
        left = pace * (self.steps - self.step)
        self.reporter.log(
            f"train: step {self.step} of {self.steps}, loss {losses}, {rate:,.0f} tokens/s, {left:.0f} s left"
        )

    # --- checkpoints ----------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the head and the training state."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "curve": self.curve,
            "text": {"digest": self.batches.digest, "tokens": int(self.batches.begins[-1])},
            "config": self.config.to_json(),
            "d2t": self.d2t.cpu(),
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state(),
        }
        write_head(folder / "head", self.config, self.weights, self.d2t, self.plan.bits)
        half = folder / (STATE + ".part")
        torch.save(state, half)
        os.replace(half, folder / STATE)

    def resume(self, folder: Path) -> bool:
        """Load the saved state, if there is one."""
        path = folder / STATE
        if not path.exists():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        text = state.get("text")
        if text is not None and text["digest"] != self.batches.digest:
            raise LoadError(
                f"{path}: started with other text, {text['tokens']:,} tokens and now "
                f"{int(self.batches.begins[-1]):,}: use another work folder, or remove {folder} to start over"
            )
        if DraftHeadConfig.from_json(state["config"]) != self.config or not torch.equal(
            state["d2t"].to(self.device), self.d2t
        ):
            raise LoadError(f"{path}: saved for another head or text: use another work folder")
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self.optimizer.resume(state["optimizer"])
        self.step, self.tokens, self.curve = state["step"], state["tokens"], state["curve"]
        self.reporter.log(f"train: resuming after step {self.step} of {self.steps}")
        return True
