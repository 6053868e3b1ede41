"""Copies of tiny checkpoints for weight updates."""

from __future__ import annotations

from dataclasses import replace

import torch

import tiny
from draftproof.models.load import Checkpoint
from draftproof.models.weight_formats import FloatWeight


def copy_of(name: str, change: bool = False) -> Checkpoint:
    """Return a checkpoint of its own memory, since an update writes to it; with other values if `change`."""
    made = tiny.checkpoint(name)
    weights = {key: FloatWeight(weight.data.clone()) for key, weight in made.weights.items()}
    generator = torch.Generator().manual_seed(5)
    for weight in weights.values() if change else ():
        weight.data.mul_(0.5).add_(torch.randn(weight.shape, generator=generator) / 16)
    return replace(made, weights=dict(weights))
