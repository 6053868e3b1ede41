"""Weights as vLLM's `load_format="dummy"` draws them: uniform within ±1e-3, from one seed for every tensor.

With such weights the layers add little to the embedding, and tensors of equal size are equal. So rows with
the same newest token select the same experts in every layer, and greedy outputs of different prompts soon
have tokens in common. A mixture of experts then reads far fewer experts in a step than with weights that are
drawn independently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof import LLM

MAX_ABSOLUTE_WEIGHT = 1e-3
SEED = 1234


def float_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a tensor, a dataclass, a list or a tuple."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from float_tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from float_tensors(getattr(value, field.name))


@torch.inference_mode()
def draw_uniform_weights(llm: LLM) -> None:
    """Replace the weights of an unquantised model in place."""
    model = llm.engine.runner.model
    for tensor in float_tensors([model.embedding, model.layers, model.norm, model.lm_head]):
        generator = torch.Generator(device=tensor.device).manual_seed(SEED)
        drawn = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
        tensor.copy_(drawn.uniform_(-MAX_ABSOLUTE_WEIGHT, MAX_ABSOLUTE_WEIGHT, generator=generator))
