"""Shared parts of test_verify and the tests that reuse them."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.sampling_params import SamplingParams

V = 16

COLD = SamplingParams(temperature=0, max_tokens=20)

HOT = SamplingParams(temperature=1.0, max_tokens=20)


def ranked(*rows: list[int], gap: float = 3.0) -> Tensor:
    """Logits rows whose best tokens are those named, in that order, `gap` apart; the rest far below."""
    out = torch.full((len(rows), V), -40.0) + 0.01 * torch.arange(V)
    for line, tokens in zip(out, rows, strict=True):
        for place, token in enumerate(tokens):
            line[token] = 5.0 - gap * place
    return out


def noise(rows: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn((rows, V), generator=torch.Generator().manual_seed(seed))
