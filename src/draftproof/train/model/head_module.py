"""Draft head for training: its step over whole texts, unrolled as it drafts.

Row p of step j is what the engine computes j steps after row p of the target. Its feature is the output of
step j - 1 at row p, its token is p + 1 + j, its rope position p + j. It attends to the keys that would then
be stored: those of step 0 up to row p, computed from the target's features, and its own of steps 1 to j.
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
from draftproof.train.model.target_forward import TargetStates, gated, rotate, rotation

Weights = Mapping[str, Tensor]
Keys = tuple[Tensor, Tensor]  # K and V [B, kv heads, T, dim] of one step


def new_weights(config: DraftHeadConfig, feature_rms: Tensor, norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Return initial weights, fp32 on the CPU. feature_rms [layers]: size of each layer's features.

    `fc` begins as the mean of the layers, each scaled to size one, and the projection of an MTP layer as the
    mean of its two rows; attention and MLP begin small. norm [hidden]: the target's last norm, which fits its
    LM head.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.tensors().items():
        if name == "d2t":
            continue
        weights[name] = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        if len(shape) > 1:
            std = 1 / math.sqrt(shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= 0.1
            weights[name] = torch.randn(shape, generator=generator) * std
    hidden = config.hidden_size
    projected = weights[f"{config.join.projection}.weight"].view(hidden, -1, hidden).mul_(0.1)
    projected += torch.eye(hidden)[:, None] / math.sqrt(projected.shape[1])
    if config.join.attends_to_pair and config.feature_norm == "none":
        projected /= feature_rms.view(1, -1, 1).clamp(min=1e-6)
    weights["norm.weight"] = norm.detach().cpu().float().clone()
    return weights


class HeadModule:
    """Steps of a head. Weights are given with every call: fp32 for training, rounded for evaluation."""

    def __init__(self, config: DraftHeadConfig, device: torch.device, max_len: int) -> None:
        self.config = config
        self.attend = attend_joined
        self.rope = rope_table(config.decoder(), max_len).to(device)  # [max_len, head_dim] fp32

    def rows(self, states: TargetStates) -> Tensor:
        """Return the target's rows that the head reads: [B, T, layers * hidden]."""
        return states.features if self.config.feature == "aux" else states.hidden

    def unroll(self, weights: Weights, features: Tensor, embeds: Tensor, steps: int) -> Tensor:
        """Return the outputs of every step before the norm: [steps, B, T, hidden].

        features [B, T, layers * hidden]: of the target's rows. embeds [B, T + steps, hidden]: of the tokens;
        rows whose token lies after the text have no meaning.
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
        """Reduce rows of the target [..., layers * hidden] to features [..., hidden]."""
        if not self.config.join.attends_to_pair:
            return features
        if self.config.feature_norm == "each":
            rows, eps = features.chunk(len(self.config.aux_layers), dim=-1), self.config.rms_norm_eps
            norms = [weights[f"feature_norm.{i}.weight"] for i in range(len(rows))]
            normed = (F.rms_norm(row, norm.shape, norm, eps) for row, norm in zip(rows, norms, strict=True))
            features = torch.cat(list(normed), dim=-1)
        return F.linear(features, weights["fc.weight"])

    def step(
        self,
        weights: Weights,
        feature: Tensor,  # [B, T, hidden]
        token: Tensor,  # [B, T, hidden]: embedding of the next token
        rope: tuple[Tensor, Tensor],
        stored: list[Keys],  # of earlier steps; those of this step are added
    ) -> Tensor:
        """Return the output of one step of every row before the norm, [B, T, hidden]."""
        config, at = self.config, "layers.0."
        batch, length, _ = feature.shape
        x, residual = self._inputs(weights, feature, token)
        q, k, v = (
            _linear(weights, f"{at}self_attn.{name}_proj", x).view(batch, length, -1, config.head_dim)
            for name in "qkv"
        )
        if config.qk_norm:
            q, k = (self._norm(weights, f"{at}self_attn.{n}_norm", y) for n, y in (("q", q), ("k", k)))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        rotate_rows = compiled(rotate, x.device)
        stored.append((rotate_rows(k, rope), v))
        y = self.attend(rotate_rows(q, rope), stored)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        x = residual + _linear(weights, at + "self_attn.o_proj", y)
        y = self._norm(weights, at + "post_attention_layernorm", x)
        gate, up = (_linear(weights, f"{at}mlp.{name}_proj", y) for name in ("gate", "up"))
        return x + _linear(weights, at + "mlp.down_proj", compiled(gated, x.device)(gate, up))

    def _inputs(self, weights: Weights, feature: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the attention reads, and the residual around it."""
        first = "layers.0.input_layernorm"
        if self.config.join.attends_to_pair:
            pair = self._norm(weights, first, token), self._norm(weights, "layers.0.hidden_norm", feature)
            return torch.cat(pair, dim=-1), feature
        pair = self._norm(weights, "enorm", token), self._norm(weights, "hnorm", feature)
        row = _linear(weights, self.config.join.projection, torch.cat(pair, dim=-1))
        return self._norm(weights, first, row), row

    def _norm(self, weights: Weights, name: str, rows: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.rms_norm(rows, weight.shape, weight, self.config.rms_norm_eps)

    def normed(self, weights: Weights, outputs: Tensor) -> Tensor:
        """Return the input of the LM head."""
        return self._norm(weights, "norm", outputs)


def _linear(weights: Weights, name: str, rows: Tensor) -> Tensor:
    return F.linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attend_joined(q: Tensor, stored: list[Keys]) -> Tensor:
    """Compute `attend` with the library's attention over step 0's keys: no tensor has size T * T."""
    if q.is_cuda and q.dtype == torch.float32:  # the library has no kernel for it
        return attend(q, stored)
    (keys, values), own = stored[0], stored[1:]
    batch, heads, length, dim = q.shape
    groups = heads // keys.shape[1]
    first, total = causal(q, _expand(keys, groups), _expand(values, groups))
    if not own:
        return first
    q = q.view(batch, -1, groups, length, dim)
    alone = [(q.float() * k[:, :, None].float()).sum(-1).flatten(1, 2) * dim**-0.5 for k, _ in own]
    shares = torch.softmax(torch.stack([total, *alone], dim=-1), dim=-1).to(q.dtype)  # [B, heads, T, steps]
    out = shares[..., :1] * first
    for index, (_, v) in enumerate(own):
        out = out + shares[..., index + 1, None] * _expand(v, groups)
    return out


def _expand(rows: Tensor, groups: int) -> Tensor:
    """Repeat [B, kv heads, T, dim] for the heads that share them: [B, heads, T, dim]."""
    return rows[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def visible(length: int, device: torch.device) -> Tensor:
    """Return the mask [T, T] of keys of step 0: row p attends to keys up to p."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def attend(q: Tensor, stored: list[Keys]) -> Tensor:
    """Attend from row p to step 0's keys up to p and to its own keys of later steps: [B, heads, T, dim]."""
    # A library's attention would need T columns for each later step, all but one masked.
    (keys, values), own = stored[0], stored[1:]
    batch, heads, length, dim = q.shape
    groups = heads // keys.shape[1]
    q = (q * dim**-0.5).reshape(batch, -1, groups * length, dim)  # heads that share keys are adjacent
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
