"""Optimizer: Muon for matrices and AdamW for the rest, or AdamW for all; learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftproof.train.config import TrainPlan


class HeadOptimizer:
    """Optimizer with linear warm-up and cosine decay."""

    def __init__(self, plan: TrainPlan, weights: Mapping[str, Tensor], steps: int) -> None:
        self.plan = plan
        self.steps = steps
        self.weights = list(weights.values())
        muon = plan.optimizer == "muon"
        matrices = [weight for weight in self.weights if muon and weight.dim() == 2]
        others = [weight for weight in self.weights if not (muon and weight.dim() == 2)]
        decay = plan.weight_decay
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=decay)
        ]
        if matrices:  # sized so that one rate fits both
            self.parts.append(
                torch.optim.Muon(matrices, lr=0.0, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )

    def apply(self, step: int) -> None:
        """Apply update number `step`; gradients are read from the weights and cleared."""
        torch.nn.utils.clip_grad_norm_(self.weights, self.plan.clip)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.rate(step)
            part.step()
            part.zero_grad()

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, cosine decay to 1 %."""
        plan = self.plan
        if step < plan.warmup:
            return plan.learning_rate * (step + 1) / plan.warmup
        share = (step - plan.warmup) / max(1, self.steps - plan.warmup)
        return plan.learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, share))) / 2)

    def state(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def resume(self, state: list[dict[str, Any]]) -> None:
        for part, kept in zip(self.parts, state, strict=True):
            part.load_state_dict(kept)
