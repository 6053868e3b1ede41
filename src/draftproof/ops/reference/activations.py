"""Reference definition of the gated activations, on tensors of any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

GELU_SLOPE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
SWIGLU_SLOPE = 1.702
SWIGLU_LIMIT = 7.0


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1 + torch.tanh(GELU_SLOPE * (gate + GELU_CUBIC * gate**3))) * up


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the SwiGLU of gpt-oss: both parts clamped, a steeper sigmoid, and one added to `up`."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate / (1 + torch.exp(-SWIGLU_SLOPE * gate)) * (up + 1)


# name, one of `ACTIVATIONS` -> function of gate and up
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "swiglu_oai": _swiglu_oai,
}
