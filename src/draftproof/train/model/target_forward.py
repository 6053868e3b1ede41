"""Target over whole texts in plain torch, for training; bits need not match those of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig
from draftproof.models.rope import rope_table
from draftproof.train.model.compile import compiled


@dataclass(frozen=True, slots=True)
class TargetStates:
    """Hidden states of the target for texts [B, T]."""

    features: Tensor  # [B, T, layers * hidden]: residual rows after the requested layers
    hidden: Tensor  # [B, T, hidden]: after the last norm; its LM head gives the logits


class TargetModel:
    """Target model on a device, without gradients."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
    ) -> None:
        if not config.has_plain_layers:
            raise ConfigError(
                f"training needs a dense target with the layers of Llama or Qwen, not {config.architecture}"
            )
        self.config = config
        self.device = device
        self.dtype = dtype
        self.tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        self.embedding = self.tensors["model.embed_tokens.weight"]  # [vocab, hidden]
        self.head = self.embedding if config.tie_embeddings else self.tensors["lm_head.weight"]
        self.rope = rope_table(config, max_len).to(device)  # [max_len, head_dim] fp32

    @torch.no_grad()
    def __call__(self, tokens: Tensor, layers: Sequence[int]) -> TargetStates:
        """Run tokens [B, T]; padding follows a text, where causal attention does not see it."""
        config, kept = self.config, []
        length = tokens.shape[1]
        x = F.embedding(tokens, self.embedding)
        rope = rotation(self.rope[:length])
        for index in range(config.num_layers):
            x = self._layer(x, index, rope)
            if index in layers:
                kept.append(x)
        hidden = F.rms_norm(x, (config.hidden_size,), self.tensors["model.norm.weight"], config.norm_eps)
        return TargetStates(torch.cat(kept, dim=-1) if kept else hidden[..., :0], hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab] of hidden rows [..., hidden]."""
        return F.linear(hidden, self.head)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _layer(self, x: Tensor, index: int, rope: tuple[Tensor, Tensor]) -> Tensor:
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
        rotate_rows = compiled(rotate, x.device)
        q, k, v = (
            rotate_rows(q.transpose(1, 2), rope),
            rotate_rows(k.transpose(1, 2), rope),
            v.transpose(1, 2),
        )
        window = config.windows[index]
        mask = _banded(length, window, x.device) if 0 < window < length else None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self._linear(y.transpose(1, 2).reshape(batch, length, -1), at + "self_attn.o_proj")
        y = F.rms_norm(x, (hidden,), tensors[at + "post_attention_layernorm.weight"], eps)
        gate, up = self._linear(y, at + "mlp.gate_proj"), self._linear(y, at + "mlp.up_proj")
        return x + self._linear(compiled(gated, x.device)(gate, up), at + "mlp.down_proj")


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotation(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two factors [T, dim] fp32 of `rotate` from a table of cosines, then sines."""
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rope to x [..., T, dim] in fp32, half-split convention, as the engine does."""
    low, high = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat([high, low], dim=-1) * rope[1]).to(x.dtype)


def _banded(length: int, window: int, device: torch.device) -> Tensor:
    """Return the sliding-window mask [T, T]: the row's own key and the window - 1 before it."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)
