"""Dense decoder: token embedding, layers of attention and MLP, final norm, LM head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.models.config import ModelConfig, MoeConfig
from draftproof.models.expected_tensors import dense_tensor_shapes
from draftproof.models.families.latent import latent_attention, latent_kv_layout
from draftproof.models.hf_config import dense_config_from_hf
from draftproof.models.layers import run_layers
from draftproof.models.rope import layer_rope_tables
from draftproof.models.weight_formats import FloatWeight, PackedStore, WeightPacker, WeightTensor, pack_weight
from draftproof.ops import (
    Attention,
    AttentionShape,
    ExpertPart,
    KVLayout,
    Layer,
    Mlp,
    Moe,
    Ops,
    QuantizedTable,
    Rows,
)


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
        self.ropes = layer_rope_tables(config, max_len, ops.device)
        dtype = weights["model.norm.weight"].dequantize().dtype
        packer = WeightPacker(weights, ops, dtype, store=store)
        table = weights["model.embed_tokens.weight"]
        self.embedding: Tensor | QuantizedTable
        if table.format in ops.forward.table_formats:
            packed = packer.packed(["model.embed_tokens"], bias=False)
            shape = config.vocab_size, config.hidden_size
            lm_head_dtype = dtype if config.tie_embeddings else None
            self.embedding = QuantizedTable(packed, shape, dtype, lm_head_dtype)
        else:
            self.embedding = packer.tensor("model.embed_tokens.weight")
        self.layers = [
            decoder_layer(packer, f"model.layers.{i}.", config, i, config.norms.attention or None)
            for i in range(config.num_layers)
        ]
        self.norm = packer.tensor("model.norm.weight")
        if not config.tie_embeddings:
            self.lm_head = packer.packed(["lm_head"], bias=False)
        elif isinstance(self.embedding, QuantizedTable):
            self.lm_head = self.embedding.packed
        else:
            name = "model.embed_tokens.weight"
            is_packed = table.format in ops.forward.weight_formats
            weight = table.to(ops.device) if is_packed else FloatWeight(self.embedding)

            def pack_table(weights: Mapping[str, WeightTensor]) -> Any:
                new = weights[name] if is_packed else FloatWeight(weights[name].dequantize(dtype))
                return pack_weight(ops, new.to(ops.device))

            self.lm_head = packer.record({name: table}, pack_table, pack_weight(ops, weight))
        self.entries = packer.entries

    @staticmethod
    def kv_layout(config: ModelConfig, dtype: torch.dtype) -> KVLayout:
        """Return the storage of K and V that a model of this configuration needs."""
        if config.latent is not None:
            return latent_kv_layout(config, config.latent, dtype)
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
        norms = self.config.norms
        # weights read the residual through norms, which round it to the model's dtype
        is_normed = bool(norms.attention and norms.mlp)
        embed = ops.forward.embed_unrounded if is_normed else ops.forward.embed
        embedded = embed(rows.tokens, self.embedding)
        if self.config.embedding_scale != 1.0:  # rounded to the model's dtype, as in transformers
            scale = torch.tensor(self.config.embedding_scale, dtype=self.embedding.dtype)
            embedded = ops.forward.scale(embedded, float(scale))
        hidden, _, *tapped = run_layers(
            ops,
            embedded,
            self.layers,
            self.norm,
            rows,
            self.ropes,
            caches,
            eps,
            taps,
            output_rows=output_rows,
        )
        return hidden, *tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocab] of hidden rows [rows, hidden]."""
        if self.config.logit_scale != 1.0:
            hidden = self.ops.forward.scale(hidden, self.config.logit_scale)
        return self.ops.forward.linear(hidden, self.lm_head, torch.float32)


def decoder_layer(
    packer: WeightPacker,
    prefix: str,
    config: ModelConfig,
    index: int,
    input_norm: str | None = "input_layernorm",
) -> Layer:
    """Pack layer `index`, whose tensor names begin with `prefix`; `input_norm` None: without that norm."""

    def norm(name: str | None) -> Tensor | None:
        return packer.tensor(f"{prefix}{name}.weight") if name else None

    norms = config.norms
    return Layer(
        attention_norm=norm(input_norm),
        attention=_attention(packer, prefix + "self_attn.", config, index)
        if config.latent is None
        else latent_attention(packer, prefix, config, config.latent),
        mlp_norm=norm(norms.mlp),
        mlp=_moe(packer, prefix, config.moe, config)
        if config.moe is not None and config.has_experts(index)
        else _mlp(packer, prefix + "mlp.", config),
        attention_output_norm=norm(norms.attention_output),
        mlp_output_norm=norm(norms.mlp_output),
        residual_scale=config.residual_scale,
    )


def _mlp(packer: WeightPacker, prefix: str, config: ModelConfig) -> Mlp:
    """Pack a gated MLP."""
    return Mlp(
        gate_up=packer.packed([prefix + "gate_proj", prefix + "up_proj"], config.mlp_bias),
        down=packer.packed([prefix + "down_proj"], config.mlp_bias),
        activation=config.activation,
    )


def _moe(packer: WeightPacker, prefix: str, moe: MoeConfig, config: ModelConfig) -> Moe:
    """Pack a mixture of experts."""
    bias = config.mlp_bias
    gate, up, down = moe.projections
    own, shared, device = moe.own_experts, f"{prefix}{moe.shared}", packer.ops.device
    names = [f"{prefix}{moe.experts}.{expert}." for expert in own]
    return Moe(
        routing=moe.routing,
        router=packer.router(f"{prefix}{moe.router}", moe.has_router_bias),
        gate_up=packer.experts([[name + gate, name + up] for name in names], bias),
        down=packer.experts([[name + down] for name in names], bias),
        correction=packer.fp32(prefix + moe.correction).flatten() if moe.correction else None,
        shared=_mlp(packer, shared + ".", config) if moe.shared_intermediate_size else None,
        shared_gate=packer.router(f"{shared}_gate") if moe.has_shared_gate else None,
        activation=config.activation,
        part=ExpertPart(own.start, len(own), torch.tensor(moe.owners, device=device)) if moe.owners else None,
    )


def _attention(packer: WeightPacker, prefix: str, config: ModelConfig, index: int) -> Attention:
    """Pack an attention block of layer `index`."""
    norms = {}
    if config.qk_norm or config.qk_row_norm:
        kind = "row_norm" if config.qk_row_norm else "norm"
        norms = {f"{x}_{kind}": packer.norm(f"{prefix}{x}_norm.weight") for x in "qk"}
    return Attention(
        heads=AttentionShape(
            num_q=config.num_heads,
            num_kv=config.num_kv_heads,
            dim=config.head_dim,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            window=config.windows[index],
        ),
        qkv=packer.packed([prefix + f"{x}_proj" for x in "qkv"], config.qkv_bias),
        out=packer.packed([prefix + "o_proj"], config.o_bias),
        sinks=packer.fp32(prefix + "sinks") if config.has_sinks else None,
        **norms,
    )
