"""The training loop: teacher, unrolled head, updates; cut anywhere, it goes on to the same weights."""

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
from draftproof.models.draft_head.config import DraftHeadConfig, TargetIdentity
from draftproof.models.draft_head.formats import load_draft_head
from draftproof.models.load import DTYPES, Checkpoint
from draftproof.models.weight_formats import dequantize_all, read_weights
from draftproof.ops import resolve
from draftproof.train.config import TrainPlan, write_json
from draftproof.train.data.dataset import Batch, Batches, Text, frequent_ids, usable
from draftproof.train.data.hidden_states import Lessons
from draftproof.train.evaluate import Acceptance, Examiner
from draftproof.train.export import stored, write_head
from draftproof.train.model.grad_graph import GRAINS, Found, Slopes, Task
from draftproof.train.model.head_module import HeadModule, new_weights
from draftproof.train.model.loss import Aim, Rows, unrolled_loss
from draftproof.train.model.target import Teacher
from draftproof.train.optimizer import Mover
from draftproof.train.plot import curve_png
from draftproof.train.progress import ProgressReporter

STATE = "state.pt"
SAY_EVERY = 10.0  # seconds between two lines
SAVE_EVERY = 60.0  # seconds between two saved states
MEASURE_EVERY = 10  # updates; the others go without the value of their loss


def head_config(plan: TrainPlan, checkpoint: Checkpoint, draft_vocab: int) -> DraftHeadConfig:
    """The head that a plan means for this target."""
    config = checkpoint.config
    if config.rope_scaling.kind not in ("none", "linear", "llama3"):
        raise ConfigError(
            f"a head for rope scaling {config.rope_scaling.kind!r} is not made here: "
            "default, linear and llama3 are"
        )
    return DraftHeadConfig(
        kind="eagle3",
        hidden_size=config.hidden_size,
        intermediate_size=plan.intermediate_size or config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        feature="aux",
        aux_layers=plan.aux_layers or _three_layers(config),
        draft_vocab_size=draft_vocab,
        share_lm_head=True,
        feature_norm=plan.feature_norm,
        norm_output=bool(plan.norm_output),
        target=TargetIdentity.from_weights(config, checkpoint.tensors),
    )


def begun_head(folder: str, wanted: DraftHeadConfig, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a head to go on from, weights in fp32; refused if it is not as the plan wants it.

    Its MLP may be wider than it was: what is added says nothing at first. Its draft ids may be others, since
    they are rows of the target's LM head: then there is no d2t.
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
        raise ConfigError(f"{folder}: this head cannot be gone on from: {'; '.join(other)}")
    begun = {name: t if name == "d2t" else t.float() for name, t in tensors.items()}
    generator = torch.Generator().manual_seed(seed)
    for name, (high, wide) in ((n, shape) for n, shape in wanted.tensors().items() if ".mlp." in n):
        old, whole = begun[name], torch.zeros(high, wide)
        if not name.endswith("down_proj.weight"):
            whole.normal_(std=wide**-0.5, generator=generator)
        whole[: old.shape[0], : old.shape[1]] = old
        begun[name] = whole
    return begun


def _three_layers(config: ModelConfig) -> tuple[int, ...]:
    """A low one, one in the middle, a high one; fewer if there are not so many."""
    last = config.num_layers - 1
    return tuple(sorted({min(2, last), last // 2, max(0, last - 2)}))


class Trainer:
    """One head on its way. `step` counts the updates that it has had."""

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
        begun = begun_head(plan.begin, self.config, plan.seed) if plan.begin else {}
        ids = begun.pop("d2t", None)
        if ids is None or plan.new_ids:
            ids = torch.from_numpy(frequent_ids(texts, vocab, count))
        self.d2t = ids.to(device)
        room = plan.max_len + plan.unroll + plan.drafts + 64
        self.teacher = Teacher(checkpoint.config, checkpoint.tensors, device, self.dtype, room)
        self.module = HeadModule(self.config, device, room, plan.attention)
        self.head = self.teacher.head[self.d2t]  # [draft vocab, hidden]
        self.ops = resolve("auto", device)
        self.examiner = Examiner(self.teacher, self.module, self.d2t, self.ops, plan.drafts)
        self.batches = Batches(texts, plan.batch_tokens, plan.max_len, plan.seed)
        self.steps = plan.steps or math.ceil(plan.epochs * len(self.batches.epoch(0)))
        self.lessons = Lessons(self.teacher, self.batches, self.config.aux_layers, self.ops, bool(plan.keep))
        self.aim = Aim(plan.hard, plan.overlap)
        self.decays = torch.tensor([plan.decay**j for j in range(plan.unroll)], device=device)
        self.step = self.tokens = 0
        self.curve: list[dict[str, Any]] = []
        fresh = begun or new_weights(
            self.config, self._feature_sizes(), checkpoint.tensors["model.norm.weight"], plan.seed
        )
        self.weights = {name: weight.to(device).requires_grad_() for name, weight in fresh.items()}
        self.mover = Mover(plan, self.weights, self.steps)
        self.slopes = Slopes(self._slopes, list(self.weights.values()), plan.unroll, self.ops)

    def _feature_sizes(self) -> Tensor:
        """[layers]: of a typical row; the first rows of a text can be a hundred times as large."""
        batch = next(self.batches.from_step(0))
        tokens = torch.from_numpy(batch.tokens[:8]).to(self.device)
        features = self.teacher(tokens, self.config.aux_layers).features.float()
        rows = features.view(-1, len(self.config.aux_layers), self.config.hidden_size)
        return rows.square().mean(-1).sqrt().cpu().median(dim=0).values

    # --- learning -----------------------------------------------------------------------------------

    def run(self, folder: Path, stop_at: float | None = None) -> bool:
        """Train to the end, or until the time is up (`time.monotonic()`); the state is saved either way."""
        began, said, saved = time.monotonic(), time.monotonic(), time.monotonic()
        first, before = self.step, self.tokens
        parts: Tensor | None = None
        if not self.curve:
            self.examine(folder)
        for batch in self.batches.from_step(self.step):
            if self.step >= self.steps or (stop_at is not None and time.monotonic() > stop_at):
                break
            last = self.step + 1 == self.steps or (self.step + 1) % self.plan.eval_every == 0
            measured = last or self.step % MEASURE_EVERY == 0
            found = self.learn(batch, measured)
            parts = found if measured else parts
            if last:
                self.examine(folder, parts)
            self.reporter.update("train", self.step, self.steps)
            now = time.monotonic()
            if parts is not None and (now - said > SAY_EVERY or self.step == first + 1):
                said = now
                self._report(
                    parts, (now - began) / (self.step - first), (self.tokens - before) / (now - began)
                )
            if now - saved > SAVE_EVERY:
                self.save(folder)
                saved = time.monotonic()
        self.save(folder)
        done = self.step >= self.steps
        if not done:
            self.reporter.log(f"train: stopped after step {self.step} of {self.steps}; run it again to go on")
        return done

    def learn(self, batch: Batch, measure: bool = True) -> Tensor:
        """One update; the loss of each step of a chain, [unroll], on the device."""
        slopes, parts = self.slopes(self._task(batch), measure)
        for weight, slope in zip(self.weights.values(), slopes, strict=True):
            weight.grad = slope
        self.mover.move(self.step)
        self.step += 1
        self.tokens += int(batch.lengths.sum())
        return parts / self.decays

    def _task(self, batch: Batch) -> Task:
        """What this update is computed from, on the host."""
        grain = 1
        if self.slopes.replays:
            batch = batch.filled(self.plan.batch_tokens // batch.tokens.shape[1])
            grain = -(-batch.tokens.size // GRAINS)
        if self.lessons.keep:
            self.lessons.remember()  # before anything is captured
        weight, cold = self._weight(batch)
        rows = Rows.of(weight, grain)
        stored = self.lessons.places(batch)
        tokens = torch.from_numpy(batch.tokens)
        return Task(tokens, stored, weight, cold, rows.chosen, rows.places, rows.heard, rows.compared)

    def _slopes(self, task: Task, measure: bool) -> Found:
        """Of a task on the device."""
        unroll, tokens = self.plan.unroll, task.tokens
        lesson = self.lessons(tokens, task.stored)
        embeds = F.embedding(F.pad(tokens, (0, unroll)), self.teacher.embedding)
        rounded = {name: weight.to(self.dtype) for name, weight in self.weights.items()}
        outputs = self.module.unroll(rounded, lesson.features, embeds, unroll)
        student = self.module.normed(rounded, outputs).flatten(1, 2)
        there = lesson.hidden.flatten(0, 1)
        rows = Rows(task.chosen, task.places, task.heard, task.compared)
        loss, parts = unrolled_loss(
            student, there, self.head, task.weight, task.cold, rows, self.aim, measure
        )
        return torch.autograd.grad(loss, list(self.weights.values())), parts

    def _weight(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[unroll, B * T]: chains as far as the text goes, in full where an answer begins; [B * T]: cold.

        Of a prompt's rows every so many are taken, others in the next update, and count for those between.
        """
        plan = self.plan
        row, lengths = np.arange(batch.tokens.shape[1])[None, :], batch.lengths[:, None]
        prompt = np.where((row + self.step) % plan.prompt_rows, 0.0, plan.prompt_weight * plan.prompt_rows)
        whole = np.where(row >= batch.prompt_lengths[:, None] - 1, 1.0, prompt)
        weight = np.stack(
            [whole * (row + 2 + step < lengths) * plan.decay**step for step in range(plan.unroll)]
        )
        weight = (weight / max(1.0, weight[0].sum())).astype(np.float32).reshape(plan.unroll, -1)
        cold = batch.cold.astype(np.float32).repeat(row.shape[1])
        return torch.from_numpy(weight), torch.from_numpy(cold)

    # --- looking ------------------------------------------------------------------------------------

    def rounded(self) -> dict[str, Tensor]:
        """The weights as they will be stored, for trying."""
        read = dequantize_all(read_weights(stored(self.weights, self.plan.bits)))
        return {name: weight.to(self.dtype) for name, weight in read.items()}

    def accepted(self, texts: Sequence[Text]) -> dict[str, Acceptance]:
        return self.examiner(self.rounded(), texts, self.plan.max_len)

    @property
    def sharpens(self) -> bool:
        """Not where drafts go on from behind the last norm: there it is more than the scale of the logits."""
        return bool(self.plan.sharpen) and not self.config.norm_output

    def sharpen(self) -> bool:
        """Once, at the end: as sharp as held-out texts like it best. Logits grow with the last norm.

        Whether it was done."""
        if self.plan.sharpen and not self.sharpens:
            self.reporter.log("train: not sharpened: drafts go on from the last norm (--norm-output 1)")
        if not self.sharpens:
            return False
        found = self.examiner.sharpest(self.rounded(), self.held, self.plan.max_len)
        if not found:
            return False
        best = max(found, key=lambda factor: found[factor].length)
        lengths = ", ".join(f"{factor:g}: {value.length:.3f}" for factor, value in found.items())
        self.reporter.log(f"train: acceptance length by what logits are multiplied with: {lengths}")
        with torch.no_grad():
            self.weights["norm.weight"].mul_(best)
        return True

    def examine(self, folder: Path, parts: Tensor | None = None) -> None:
        """A point of the curve: the loss now, and acceptance on held-out texts."""
        found = self.accepted(self.held[: self.plan.eval_texts])
        losses = [] if parts is None else [float(x) for x in parts.cpu()]
        if any(not math.isfinite(x) for x in losses):
            raise LoadError(f"the loss is not finite after step {self.step}: try a smaller learning rate")
        self.curve.append(
            {
                "step": self.step,
                "tokens": self.tokens,
                "loss": losses,
                "acceptance": {name: value.to_json() for name, value in found.items()},
            }
        )
        write_json(folder / "curve.json", self.curve)
        (folder / "curve.png").write_bytes(curve_png(self.curve))
        words = ", ".join(f"{name} {value.length:.3f}" for name, value in found.items())
        self.reporter.log(f"train: step {self.step}: acceptance length {words}")

    def _report(self, parts: Tensor, pace: float, rate: float) -> None:
        losses = " ".join(f"{float(x):.3f}" for x in parts.cpu())
        left = pace * (self.steps - self.step)
        self.reporter.log(
            f"train: step {self.step} of {self.steps}, loss {losses}, {rate:,.0f} tokens/s, {left:.0f} s left"
        )

    # --- stopping and going on ----------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "curve": self.curve,
            "text": {"digest": self.batches.digest, "tokens": int(self.batches.begins[-1])},
            "config": self.config.to_json(),
            "d2t": self.d2t.cpu(),
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self.mover.state(),
        }
        write_head(folder / "head", self.config, self.weights, self.d2t, self.plan.bits)
        half = folder / (STATE + ".part")
        torch.save(state, half)
        os.replace(half, folder / STATE)

    def resume(self, folder: Path) -> bool:
        """Go on from what was saved, if anything was."""
        path = folder / STATE
        if not path.exists():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        text = state.get("text")
        if text is not None and text["digest"] != self.batches.digest:
            raise LoadError(
                f"{path}: begun with other text, {text['tokens']:,} tokens and now "
                f"{int(self.batches.begins[-1]):,}: use another work folder, or remove {folder} to begin anew"
            )
        if DraftHeadConfig.from_json(state["config"]) != self.config or not torch.equal(
            state["d2t"].to(self.device), self.d2t
        ):
            raise LoadError(f"{path}: of another head or another text: use another work folder")
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self.mover.resume(state["optimizer"])
        self.step, self.tokens, self.curve = state["step"], state["tokens"], state["curve"]
        self.reporter.log(f"train: going on after step {self.step} of {self.steps}")
        return True
