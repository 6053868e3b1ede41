"""The teacher: the target's forward pass over whole texts, in plain torch, for the rows a head learns from.

The engine computes rows of many requests with bits that depend on nothing else. Here whole batches of texts
of one length are wanted, as quickly as libraries can, and nobody compares bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.rope import rope_table
from draftproof.train.model.compile import fused


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target says about texts [B, T]."""

    features: Tensor  # [B, T, layers * hidden]: residual rows after the layers asked for
    hidden: Tensor  # [B, T, hidden]: after the last norm; its LM head gives the logits


class Teacher:
    """The target's weights on a device. No gradients."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        self.embedding = self.tensors["model.embed_tokens.weight"]  # [vocab, hidden]
        self.head = self.embedding if config.tie_embeddings else self.tensors["lm_head.weight"]
        self.rope = rope_table(config, max_len).to(device)  # [max_len, head_dim] fp32

    @torch.no_grad()
    def __call__(self, tokens: Tensor, layers: Sequence[int]) -> Lesson:
        """tokens [B, T]: padding comes after a text, where causal attention does not see it."""
        config, kept = self.config, []
        length = tokens.shape[1]
        x = F.embedding(tokens, self.embedding)
        rope = rotation(self.rope[:length])
        for index in range(config.num_layers):
            x = self._block(x, index, rope)
            if index in layers:
                kept.append(x)
        hidden = F.rms_norm(x, (config.hidden_size,), self.tensors["model.norm.weight"], config.norm_eps)
        return Lesson(torch.cat(kept, dim=-1) if kept else hidden[..., :0], hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]."""
        return F.linear(hidden, self.head)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _block(self, x: Tensor, index: int, rope: tuple[Tensor, Tensor]) -> Tensor:
        config, at = self.config, f"model.layers.{index}."
        tensors, eps = self.tensors, config.norm_eps
        batch, length, hidden = x.shape
        y = F.rms_norm(x, (hidden,), tensors[at + "input_layernorm.weight"], eps)
        q, k, v = (
            self._linear(y, f"{at}self_attn.{name}_proj").view(batch, length, -1, config.head_dim)
            for name in "qkv"
        )
        if config.qk_norm:
            q = F.rms_norm(q, (config.head_dim,), tensors[at + "self_attn.q_norm.weight"], eps)
            k = F.rms_norm(k, (config.head_dim,), tensors[at + "self_attn.k_norm.weight"], eps)
        turn = fused(rotate, x.device)
        q, k, v = turn(q.transpose(1, 2), rope), turn(k.transpose(1, 2), rope), v.transpose(1, 2)
        window = config.windows[index]
        mask = _banded(length, window, x.device) if 0 < window < length else None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self._linear(y.transpose(1, 2).reshape(batch, length, -1), at + "self_attn.o_proj")
        y = F.rms_norm(x, (hidden,), tensors[at + "post_attention_layernorm.weight"], eps)
        gate, up = self._linear(y, at + "mlp.gate_proj"), self._linear(y, at + "mlp.up_proj")
        return x + self._linear(fused(gated, x.device)(gate, up), at + "mlp.down_proj")


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotation(table: Tensor) -> tuple[Tensor, Tensor]:
    """table [T, dim] fp32 (cosines, then sines) -> what `rotate` multiplies by: two of [T, dim] fp32."""
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [..., T, dim] turned by its position, in fp32 as the engine does it; halves convention."""
    low, high = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat([high, low], dim=-1) * rope[1]).to(x.dtype)


def _banded(length: int, window: int, device: torch.device) -> Tensor:
    """[T, T] bool: the row's own key and the window - 1 before it."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)
