"""The decoder of the Llama family: one forward pass over ragged rows; the members differ by flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.layers import run_layers
from draftproof.models.rope import rope_table
from draftproof.ops import Attention, AttentionShape, KVLayout, Layer, Mlp, Ops, Rows


class Llama:
    """Weights and the order of the ops. Storage of K and V is the caller's."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], ops: Ops, max_len: int) -> None:
        self.config = config
        self.ops = ops
        self.rope = rope_table(config, max_len).to(ops.device)
        take = Weights(tensors, ops)
        self.embedding = take.tensor("model.embed_tokens.weight")
        self.layers = [decoder_layer(take, f"model.layers.{i}.", config, i) for i in range(config.num_layers)]
        self.norm = take.tensor("model.norm.weight")
        self.head = (
            ops.forward.pack_linear(self.embedding)
            if config.tie_embeddings
            else take.packed(["lm_head"], bias=False)
        )

    @staticmethod
    def kv_layout(config: ModelConfig, dtype: torch.dtype) -> KVLayout:
        """Return the storage of K and V that a model of this configuration needs."""
        return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)

    def forward(
        self, rows: Rows, caches: list[Tensor], taps: Sequence[int] = (), wanted: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Hidden rows after the last norm, [rows, hidden]; stores K and V of every row.

        Then the residual rows after each layer of `taps`.
        `wanted` [W]: of all rows only these are returned, and the last layer ends with them alone.
        """
        ops, eps = self.ops, self.config.norm_eps
        ops.forward.begin_pass(rows)
        embedded = ops.forward.embed(rows.tokens, self.embedding)
        hidden, _, *tapped = run_layers(
            ops, embedded, self.layers, self.norm, rows, self.rope, caches, eps, taps, output_rows=wanted
        )
        return hidden, *tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] fp32."""
        return self.ops.forward.linear(hidden, self.head, torch.float32)


def decoder_layer(
    take: Weights, at: str, config: ModelConfig, index: int, input_norm: str = "input_layernorm"
) -> Layer:
    """Layer `index`, whose names begin with `at`; `input_norm`: the name of its first norm, "": none."""
    attention, mlp = at + "self_attn.", at + "mlp."
    qk_norm = config.qk_norm
    return Layer(
        attention_norm=take.tensor(f"{at}{input_norm}.weight") if input_norm else None,
        attention=Attention(
            heads=AttentionShape(
                num_q=config.num_heads,
                num_kv=config.num_kv_heads,
                dim=config.head_dim,
                scale=config.head_dim**-0.5,
                window=config.windows[index],
            ),
            qkv=take.packed([attention + f"{x}_proj" for x in "qkv"], config.qkv_bias),
            q_norm=take.tensor(attention + "q_norm.weight") if qk_norm else None,
            k_norm=take.tensor(attention + "k_norm.weight") if qk_norm else None,
            out=take.packed([attention + "o_proj"], config.o_bias),
        ),
        mlp_norm=take.tensor(at + "post_attention_layernorm.weight"),
        mlp=Mlp(
            gate_up=take.packed([mlp + "gate_proj", mlp + "up_proj"], config.mlp_bias),
            down=take.packed([mlp + "down_proj"], config.mlp_bias),
        ),
    )


class Weights:
    """Takes tensors out of the checkpoint one by one, so that none is held twice."""

    def __init__(self, tensors: dict[str, Tensor], ops: Ops, rough: bool = False) -> None:
        """`rough`: of a model that only guesses."""
        self.tensors = tensors
        self.ops = ops
        self._pack = ops.forward.pack_draft_linear if rough else ops.forward.pack_linear

    def tensor(self, name: str) -> Tensor:
        return self.tensors.pop(name).to(self.ops.device).contiguous()

    def packed(self, names: list[str], bias: bool) -> Any:
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names])
        biases = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        return self._pack(weight, biases)
