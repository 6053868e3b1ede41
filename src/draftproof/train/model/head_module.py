"""The head as it is trained: weights in fp32, its step over whole texts, unrolled as it drafts.

Row p of step j is what the engine computes j steps after row p of the target: it takes the output of step
j - 1 at row p as its feature, the embedding of token p + 1 + j, rope position p + j, and attends to the keys
that would then be stored: those of step 0 up to row p, made of the target's own features, and its own of
steps 1 to j.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.models.draft_head.config import DraftHeadConfig
from draftproof.models.rope import rope_table
from draftproof.train.model.attention import causal
from draftproof.train.model.compile import compiled
from draftproof.train.model.target import gated, rotate, rotation

Weights = Mapping[str, Tensor]
Keys = tuple[Tensor, Tensor]  # K and V [B, kv heads, T, dim] of one step


def new_weights(config: DraftHeadConfig, feature_rms: Tensor, norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Weights to begin with, fp32 on the CPU. feature_rms [layers]: how large the features of each layer are.

    `fc` begins as the mean of the layers, each brought to the size of one: the head then starts from what the
    target already knows, and what attention and MLP add starts small. norm [hidden]: the target's last one,
    which its LM head is used to.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.tensors().items():
        if name == "d2t":
            continue
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        std = 1 / math.sqrt(shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std *= 0.1
        weights[name] = torch.randn(shape, generator=generator) * std
    layers, hidden = len(config.aux_layers), config.hidden_size
    fc = weights["fc.weight"].view(hidden, layers, hidden).mul_(0.1)
    fc += torch.eye(hidden)[:, None] / math.sqrt(layers)
    if config.feature_norm == "none":
        fc /= feature_rms.view(1, layers, 1).clamp(min=1e-6)
    weights["norm.weight"] = norm.detach().cpu().float().clone()
    return weights


class HeadModule:
    """Computes a head's steps. Weights are given with every call: fp32 to train, rounded to try."""

    def __init__(
        self, config: DraftHeadConfig, device: torch.device, max_len: int, attention: str = "written"
    ) -> None:
        self.config = config
        self.attend = {"joined": attend_joined, "written": attend}[attention]
        self.rope = rope_table(config.decoder(), max_len).to(device)  # [max_len, head_dim] fp32

    def unroll(self, weights: Weights, features: Tensor, embeds: Tensor, steps: int) -> Tensor:
        """Outputs of every step, before the norm: [steps, B, T, hidden].

        features [B, T, layers * hidden]: of the target's rows. embeds [B, T + steps, hidden]: of the tokens,
        with anything after the text: rows whose token is not there mean nothing.
        """
        length = features.shape[1]
        feature = self.feature(weights, features)
        stored: list[Keys] = []
        outputs = []
        for step in range(steps):
            token = embeds[:, 1 + step : 1 + step + length]
            rope = rotation(self.rope[step : step + length])
            feature = self.step(weights, feature, token, rope, stored)
            outputs.append(feature)
            feature = self.normed(weights, feature) if self.config.norm_output else feature
        return torch.stack(outputs)

    def feature(self, weights: Weights, features: Tensor) -> Tensor:
        """What the head makes of the target's rows: [..., layers * hidden] -> [..., hidden]."""
        config = self.config
        if config.feature_norm == "each":
            rows = features.chunk(len(config.aux_layers), dim=-1)
            features = torch.cat(
                [
                    F.rms_norm(row, row.shape[-1:], weights[f"feature_norm.{i}.weight"], config.rms_norm_eps)
                    for i, row in enumerate(rows)
                ],
                dim=-1,
            )
        return F.linear(features, weights["fc.weight"])

    def step(
        self,
        weights: Weights,
        feature: Tensor,  # [B, T, hidden]
        token: Tensor,  # [B, T, hidden]: embedding of the token that came after
        rope: tuple[Tensor, Tensor],
        stored: list[Keys],  # of the steps before; this one's are added
    ) -> Tensor:
        """One step of every row: its output before the norm, [B, T, hidden]."""
        config, at = self.config, "layers.0."
        batch, length, hidden = feature.shape
        eps = config.rms_norm_eps
        x = torch.cat(
            [
                F.rms_norm(token, (hidden,), weights[at + "input_layernorm.weight"], eps),
                F.rms_norm(feature, (hidden,), weights[at + "hidden_norm.weight"], eps),
            ],
            dim=-1,
        )
        q, k, v = (
            F.linear(x, weights[f"{at}self_attn.{name}_proj.weight"])
            .view(batch, length, -1, config.head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        rotate_rows = compiled(rotate, x.device)
        stored.append((rotate_rows(k, rope), v))
        y = self.attend(rotate_rows(q, rope), stored)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        x = feature + F.linear(y, weights[at + "self_attn.o_proj.weight"])
        y = F.rms_norm(x, (hidden,), weights[at + "post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(y, weights[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        y = compiled(gated, x.device)(gate, up)
        return x + F.linear(y, weights[at + "mlp.down_proj.weight"])

    def normed(self, weights: Weights, outputs: Tensor) -> Tensor:
        """What the LM head is given."""
        config = self.config
        return F.rms_norm(outputs, (config.hidden_size,), weights["norm.weight"], config.rms_norm_eps)


def attend_joined(q: Tensor, stored: list[Keys]) -> Tensor:
    """As `attend`, with the library's attention over step 0's keys: nothing here is of size T * T."""
    if q.is_cuda and q.dtype == torch.float32:  # for which the library has no kernel
        return attend(q, stored)
    (keys, values), own = stored[0], stored[1:]
    batch, heads, length, dim = q.shape
    groups = heads // keys.shape[1]
    first, total = causal(q, _for_each(keys, groups), _for_each(values, groups))
    if not own:
        return first
    q = q.view(batch, -1, groups, length, dim)
    alone = [(q.float() * k[:, :, None].float()).sum(-1).flatten(1, 2) * dim**-0.5 for k, _ in own]
    shares = torch.softmax(torch.stack([total, *alone], dim=-1), dim=-1).to(q.dtype)  # [B, heads, T, steps]
    out = shares[..., :1] * first
    for index, (_, v) in enumerate(own):
        out = out + shares[..., index + 1, None] * _for_each(v, groups)
    return out


def _for_each(rows: Tensor, groups: int) -> Tensor:
    """[B, kv heads, T, dim] -> [B, heads, T, dim]."""
    return rows[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def visible(length: int, device: torch.device) -> Tensor:
    """[T, T] bool: row p sees the keys of step 0 up to p."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def attend(q: Tensor, stored: list[Keys]) -> Tensor:
    """Row p over step 0's keys up to p, and over its own of the later steps: [B, heads, T, dim].

    Written out, because a library's attention would need the later steps' keys as T columns each, all but one
    of them masked. Scores are the only thing of size T * T here.
    """
    (keys, values), own = stored[0], stored[1:]
    batch, heads, length, dim = q.shape
    groups = heads // keys.shape[1]
    q = (q * dim**-0.5).reshape(batch, -1, groups * length, dim)  # heads that share keys, one after another
    scores = q @ keys.transpose(-1, -2)  # [B, kv heads, groups * T, T]
    scores = scores.view(batch, -1, groups, length, length)
    hidden = ~visible(length, q.device)
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    q = q.view(batch, -1, groups, length, dim)
    if own:
        alone = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        scores = torch.cat([scores, *alone], dim=-1)
    shares = torch.softmax(scores, dim=-1)  # [B, kv heads, groups, T, T + later steps]
    first = shares[..., :length].reshape(batch, -1, groups * length, length)
    out = (first @ values).view(batch, -1, groups, length, dim)
    for index, (_, v) in enumerate(own):
        out = out + shares[..., length + index, None] * v[:, :, None]
    return out.reshape(batch, heads, length, dim)
