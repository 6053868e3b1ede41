"""Decoder layers over the ops of a backend: an attention block, an MLP, and the loop over layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from draftproof.ops import Attention, LatentAttention, Layer, Mlp, Moe, Ops, QuantizedTable, Rows


def run_layers(
    ops: Ops,
    residual: Tensor,  # [R, hidden]: embedded tokens, or features of a draft head; may be overwritten
    layers: Sequence[Layer],
    norm: Tensor | None,  # [hidden]: after the last layer; None: no norm
    rows: Rows,
    rope: Tensor | Sequence[Tensor],  # [max_len, dim]: of all layers, or one per layer
    caches: Sequence[Tensor],  # one per layer
    eps: float,
    taps: Sequence[int] = (),  # layers whose residual is returned
    embedding: Tensor | QuantizedTable | None = None,  # [V, hidden], for a first layer with `token_norm`
    output_rows: Tensor | None = None,  # [W] int64: rows to return; None: all
    fused: bool = True,  # False: op by op, which defines the bits that a fused kernel must reproduce
) -> tuple[Tensor, ...]:
    """Run all layers and the norm after them, and store K and V of every row.

    Return the normed rows and the residual (the residual twice without `norm`), then the residual after
    each layer of `taps`: [R, hidden] each, or [W, hidden] with `output_rows`.
    """
    ropes = [rope] * len(layers) if isinstance(rope, Tensor) else rope
    if fused and output_rows is None and ops.forward.fused_layers is not None:
        found = ops.forward.fused_layers(residual, layers, rows, ropes, caches, eps, taps, embedding)
        if found is not None:
            normed = found[0] if norm is None else ops.forward.rms_norm(found[0], norm, eps)
            return normed, *found
    x, residual = first_layer_input(ops, residual, layers[0], rows, embedding, eps)
    next_layers = [*layers[1:], None]
    tapped: dict[int, Tensor] = {}
    for i, (layer, cache, next_layer) in enumerate(zip(layers, caches, next_layers, strict=True)):
        x = attention_forward(ops, layer.attention, x, rows, ropes[i], cache, eps)
        if output_rows is not None and layer is layers[-1]:  # K and V are stored: other rows end here
            x, residual = x.index_select(0, output_rows), residual.index_select(0, output_rows)
        is_added = adds_output(layer, layer.attention_output_norm) and layer.mlp_norm is not None
        x = project(ops, x, layer.attention.out, is_added)
        # the router of a mixture of experts reads the rows too, so they stay as they are
        reader = None if isinstance(layer.mlp, Moe) else layer.mlp.gate_up
        x, residual = add_block(
            ops, x, residual, layer, layer.attention_output_norm, layer.mlp_norm, eps, reader
        )
        next_norm = norm if next_layer is None else next_layer.attention_norm
        next_reader = None if next_layer is None else next_layer.attention.qkv
        x, residual = mlp_block(ops, layer, x, residual, next_norm, eps, next_reader)
        if i in taps:
            tapped[i] = residual
    return x, residual, *(tapped[i] for i in taps)


def adds_output(layer: Layer, output_norm: Tensor | None) -> bool:
    """Return whether the output of a block is added to the residual as it is."""
    return output_norm is None and layer.residual_scale == 1.0


def project(ops: Ops, x: Tensor, packed: Any, is_added: bool) -> Tensor:
    """Apply the output projection of a block to rows x; `is_added`: `add_norm` with a norm follows."""
    return ops.forward.linear_sums(x, packed) if is_added else ops.forward.linear(x, packed)


def add_block(
    ops: Ops,
    x: Tensor,
    residual: Tensor,
    layer: Layer,
    output_norm: Tensor | None,
    norm: Tensor | None,
    eps: float,
    reader: Any,
) -> tuple[Any, Tensor]:
    """Add the output x of a block to the residual, normed and scaled as the layer defines; see `add_norm`."""
    if output_norm is not None and norm is not None and layer.residual_scale == 1.0:
        return ops.forward.norm_add_rms_norm(x, output_norm, residual, norm, eps, reader)
    if output_norm is not None:
        x = ops.forward.rms_norm(x, output_norm, eps)
    if layer.residual_scale != 1.0:
        x = ops.forward.scale(x, layer.residual_scale)
    return add_norm(ops, x, residual, norm, eps, reader)


def add_norm(
    ops: Ops, x: Tensor, residual: Tensor, norm: Tensor | None, eps: float, reader: Any = None
) -> tuple[Any, Tensor]:
    """Add x to the residual, [R, hidden] each; return the normed sum, or the sum without a norm, and the sum.

    If `reader` is not None, that packed weight alone reads the normed sum.
    """
    if norm is None:
        total = ops.forward.add(x, residual)
        return total, total
    return ops.forward.add_rms_norm_input(x, residual, norm, eps, reader)


def mlp_block(
    ops: Ops, layer: Layer, x: Tensor, residual: Tensor, norm: Tensor | None, eps: float, reader: Any
) -> tuple[Any, Tensor]:
    """Add the layer's MLP of rows x to the residual, [R, hidden] each, and norm the sum; see `add_norm`."""
    is_added = adds_output(layer, layer.mlp_output_norm) and norm is not None
    if isinstance(layer.mlp, Moe) and is_added:
        assert norm is not None
        return ops.forward.moe_add_rms_norm(x, layer.mlp, residual, norm, eps, reader)
    x = mlp_forward(ops, layer.mlp, x, is_added)
    return add_block(ops, x, residual, layer, layer.mlp_output_norm, norm, eps, reader)


def attention_forward(
    ops: Ops,
    attention: Attention | LatentAttention,
    x: Tensor,
    rows: Rows,
    rope: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """Store K and V of rows x [R, hidden] and attend: the input rows of the output projection."""
    q = store_kv(ops, attention, x, rows, rope, cache, eps)
    if isinstance(attention, LatentAttention):
        x = ops.forward.attention(q, rows, attention.heads, cache)
        return ops.forward.head_linear(x, attention.value_up)
    return ops.forward.attention(q, rows, attention.heads, cache, attention.sinks)


def store_kv(
    ops: Ops,
    attention: Attention | LatentAttention,
    x: Tensor,
    rows: Rows,
    rope: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """Project rows x [R, hidden], store their K and V in `cache`, and return q [R, num_q * dim]."""
    if isinstance(attention, LatentAttention):
        q = ops.forward.latent_store(ops.forward.linear(x, attention.qkv), rows, attention, rope, cache)
        if attention.q_up is not None:
            q = ops.forward.linear(q, attention.q_up)
        return ops.forward.latent_queries(q, rows, attention, rope)
    return ops.forward.linear_rope_store(x, rows, attention, rope, cache, eps)


def mlp_forward(ops: Ops, mlp: Mlp | Moe, x: Tensor, is_added: bool) -> Tensor:
    """Apply the gated MLP or the mixture of experts to rows x [R, hidden]: [R, hidden]; see `project`."""
    if isinstance(mlp, Moe):
        return ops.forward.moe(x, mlp)
    return project(ops, ops.forward.linear_act_mul(x, mlp.gate_up, mlp.activation), mlp.down, is_added)


def first_layer_input(
    ops: Ops,
    residual: Tensor,
    layer: Layer,
    rows: Rows,
    embedding: Tensor | QuantizedTable | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return what the first attention reads ([R, hidden] or [R, 2 hidden]) and the residual around it."""
    if layer.token_norm is None:
        if layer.attention_norm is None:
            return residual, residual
        normed = ops.forward.rms_norm_input(residual, layer.attention_norm, eps, layer.attention.qkv)
        return normed, residual
    assert embedding is not None
    assert layer.attention_norm is not None
    if not layer.residual_is_normed:
        norms = {"token_norm": layer.token_norm, "norm": layer.attention_norm}
        return ops.forward.embed_norm_concat(
            rows.tokens, embedding, residual=residual, eps=eps, **norms
        ), residual
    normed = ops.forward.rms_norm(residual, layer.attention_norm, eps)
    embedded = ops.forward.rms_norm(ops.forward.embed(rows.tokens, embedding), layer.token_norm, eps)
    return ops.forward.concat_columns(embedded, normed), normed
