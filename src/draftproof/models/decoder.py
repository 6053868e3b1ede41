"""Dense decoder: token embedding, layers of attention and MLP, final norm, LM head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.expected_tensors import dense_tensor_shapes
from draftproof.models.hf_config import dense_config_from_hf
from draftproof.models.layers import run_layers
from draftproof.models.rope import rope_table
from draftproof.models.weight_formats import FloatWeight, PackedStore, WeightPacker, WeightTensor, pack_weight
from draftproof.ops import Attention, AttentionShape, KVLayout, Layer, Mlp, Ops, QuantizedTable, Rows


class DenseDecoder:
    """Model of every dense family; see `registry.Model`. The caller owns the storage of K and V."""

    config_from_hf = staticmethod(dense_config_from_hf)
    expected_tensors = staticmethod(dense_tensor_shapes)

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, WeightTensor],
        ops: Ops,
        max_len: int,
        store: PackedStore | None = None,
    ) -> None:
        """Pack `weights` for the backend, or take them from `store`; each is removed once packed."""
        self.config = config
        self.ops = ops
        self.rope = rope_table(config, max_len).to(ops.device)
        dtype = weights["model.norm.weight"].dequantize().dtype
        packer = WeightPacker(weights, ops, dtype, store=store)
        table = weights["model.embed_tokens.weight"]
        self.embedding: Tensor | QuantizedTable
        if table.format in ops.forward.table_formats:
            packed = packer.packed(["model.embed_tokens"], bias=False)
            self.embedding = QuantizedTable(packed, (config.vocab_size, config.hidden_size), dtype)
        else:
            self.embedding = packer.tensor("model.embed_tokens.weight")
        self.layers = [
            decoder_layer(packer, f"model.layers.{i}.", config, i) for i in range(config.num_layers)
        ]
        self.norm = packer.tensor("model.norm.weight")
        if not config.tie_embeddings:
            self.lm_head = packer.packed(["lm_head"], bias=False)
        elif isinstance(self.embedding, QuantizedTable):
            self.lm_head = self.embedding.packed
        else:
            is_packed = table.format in ops.forward.weight_formats
            weight = table.to(ops.device) if is_packed else FloatWeight(self.embedding)
            self.lm_head = pack_weight(ops, weight)

    @staticmethod
    def kv_layout(config: ModelConfig, dtype: torch.dtype) -> KVLayout:
        """Return the storage of K and V that a model of this configuration needs."""
        return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)

    def forward(
        self,
        rows: Rows,
        caches: Sequence[Tensor],
        taps: Sequence[int] = (),
        output_rows: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Store K and V of every row and return the hidden rows after the last norm, [rows, hidden].

        The residual rows after each layer of `taps` follow. With `output_rows` [W] only those rows pass
        through the MLP of the last layer and are returned.
        """
        ops, eps = self.ops, self.config.norm_eps
        ops.forward.begin_pass(rows)
        embedded = ops.forward.embed(rows.tokens, self.embedding)
        hidden, _, *tapped = run_layers(
            ops, embedded, self.layers, self.norm, rows, self.rope, caches, eps, taps, output_rows=output_rows
        )
        return hidden, *tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocab] of hidden rows [rows, hidden]."""
        return self.ops.forward.linear(hidden, self.lm_head, torch.float32)


def decoder_layer(
    packer: WeightPacker,
    prefix: str,
    config: ModelConfig,
    index: int,
    input_norm: str | None = "input_layernorm",
) -> Layer:
    """Pack layer `index`, whose tensor names begin with `prefix`; `input_norm` None: without that norm."""
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return Layer(
        attention_norm=None if input_norm is None else packer.tensor(f"{prefix}{input_norm}.weight"),
        attention=Attention(
            heads=AttentionShape(
                num_q=config.num_heads,
                num_kv=config.num_kv_heads,
                dim=config.head_dim,
                scale=config.head_dim**-0.5,
                window=config.windows[index],
            ),
            qkv=packer.packed([attention + f"{x}_proj" for x in "qkv"], config.qkv_bias),
            q_norm=packer.tensor(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=packer.tensor(attention + "k_norm.weight") if config.qk_norm else None,
            out=packer.packed([attention + "o_proj"], config.o_bias),
        ),
        mlp_norm=packer.tensor(prefix + "post_attention_layernorm.weight"),
        mlp=Mlp(
            gate_up=packer.packed([mlp + "gate_proj", mlp + "up_proj"], config.mlp_bias),
            down=packer.packed([mlp + "down_proj"], config.mlp_bias),
        ),
    )
