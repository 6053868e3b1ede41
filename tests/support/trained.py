"""Training data, a short plan and a trainer for tiny models, and a head computed row by row."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import heads
import tiny
from draftproof.models.draft_head.config import DraftHeadConfig
from draftproof.models.rope import rope_table
from draftproof.sampling_params import SamplingParams
from draftproof.train.config import TrainPlan
from draftproof.train.data.dataset import Text
from draftproof.train.progress import ProgressReporter
from draftproof.train.trainer import Trainer


def write_model(folder: Path) -> None:
    """Write the tiny model as a checkpoint."""
    made = tiny.checkpoint("llama")
    heads.write_model(folder, made.config, made.tensors)


@cache
def texts(name: str = "llama", count: int = 48, length: int = 40) -> tuple[Text, ...]:
    """Return outputs of the tiny model, every second one at temperature 1."""
    requests = [
        tiny.request(i, SamplingParams(temperature=float(i % 2), max_tokens=length, ignore_eos=True))
        for i in range(count)
    ]
    records = tiny.run(tiny.engine(name), requests)
    made = []
    for request in requests:
        ids = [*request.prompt_token_ids, *records[request.id].token_ids]
        temperature = request.params.temperature
        made.append(
            Text(np.asarray(ids, np.uint16), len(request.prompt_token_ids), temperature, request.seed)
        )
    return tuple(made)


def plan(**changes: Any) -> TrainPlan:
    values = {
        "model": "tiny",
        "draft_vocab": 80,
        "unroll": 3,
        "steps": 12,
        "batch_tokens": 512,
        "max_len": 64,
        "warmup": 2,
        "learning_rate": 3e-2,
        "optimizer": "adamw",  # muon multiplies in bf16, which is slow on most CPUs
        "dtype": "float32",
        "eval_every": 6,
        "eval_texts": 8,
    }
    return TrainPlan(**{**values, **changes})


def trainer(name: str = "llama", device: str = "cpu", **changes: Any) -> Trainer:
    every = texts(name)
    where = torch.device(device)
    return Trainer(plan(**changes), tiny.checkpoint(name), every[8:], every[:8], where, ProgressReporter())


def drafted_outputs(
    config: DraftHeadConfig,
    weights: dict[str, Tensor],
    features: Tensor,  # [T, layers * hidden]
    embeds: Tensor,  # [T + 1 + steps, hidden]: of the tokens
    row: int,
    steps: int,
) -> list[Tensor]:
    """Return outputs of a head after row `row`, computed row by row with one list of stored keys.

    Rows up to `row` have features of the target, each further row that of the row before.
    """
    at, dim = "layers.0.", config.head_dim
    table = rope_table(tiny.model_config("llama"), 256)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    for position in range(row + steps):
        feature = weights["fc.weight"] @ features[position] if position <= row else outputs[-1]
        token = embeds[position + 1]
        eps, hidden = config.rms_norm_eps, (config.hidden_size,)
        x = torch.cat(
            [
                F.rms_norm(token, hidden, weights[at + "input_layernorm.weight"], eps),
                F.rms_norm(feature, hidden, weights[at + "hidden_norm.weight"], eps),
            ]
        )
        q, k, v = (weights[f"{at}self_attn.{n}_proj.weight"] @ x for n in "qkv")
        keys.append(_turned(k.view(-1, dim), table[position]))
        values.append(v.view(-1, dim))
        q = _turned(q.view(-1, dim), table[position])
        y = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            scores = torch.stack([q[head] @ key[shared] for key in keys]) / dim**0.5
            seen = torch.stack([value[shared] for value in values])
            y.append(torch.softmax(scores, 0) @ seen)
        x = feature + weights[at + "self_attn.o_proj.weight"] @ torch.cat(y)
        y = F.rms_norm(x, hidden, weights[at + "post_attention_layernorm.weight"], eps)
        gate = F.silu(weights[at + "mlp.gate_proj.weight"] @ y)
        y = gate * (weights[at + "mlp.up_proj.weight"] @ y)
        outputs.append(x + weights[at + "mlp.down_proj.weight"] @ y)
    return outputs[row:]


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x [heads, dim] in the halves convention."""
    cos, sin = angles.chunk(2)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
