"""Decoder layers over the ops of a backend: an attention block, an MLP, and the loop over layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftproof.ops import Attention, Layer, Mlp, Ops, QuantizedTable, Rows


def run_layers(
    ops: Ops,
    residual: Tensor,  # [R, hidden]: embedded tokens, or features of a draft head; may be overwritten
    layers: Sequence[Layer],
    norm: Tensor | None,  # [hidden]: after the last layer; None: no norm
    rows: Rows,
    rope: Tensor,  # [max_len, dim]
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
    if fused and output_rows is None and ops.forward.fused_layers is not None:
        found = ops.forward.fused_layers(residual, layers, rows, rope, caches, eps, taps, embedding)
        if found is not None:
            normed = found[0] if norm is None else ops.forward.rms_norm(found[0], norm, eps)
            return normed, *found
    x, residual = first_layer_input(ops, residual, layers[0], rows, embedding, eps)
    next_layers = [*layers[1:], None]
    tapped: dict[int, Tensor] = {}
    for i, (layer, cache, next_layer) in enumerate(zip(layers, caches, next_layers, strict=True)):
        x = attention_forward(ops, layer.attention, x, rows, rope, cache, eps)
        if output_rows is not None and layer is layers[-1]:  # K and V are stored: other rows end here
            x, residual = x.index_select(0, output_rows), residual.index_select(0, output_rows)
        x = ops.forward.linear(x, layer.attention.out)
        x, residual = ops.forward.add_rms_norm_input(x, residual, layer.mlp_norm, eps, layer.mlp.gate_up)
        x = mlp_forward(ops, layer.mlp, x)
        if next_layer is not None and next_layer.attention_norm is not None:
            reader = next_layer.attention.qkv
            x, residual = ops.forward.add_rms_norm_input(x, residual, next_layer.attention_norm, eps, reader)
        else:  # without a next norm only the sum is used, so the weight does not matter
            next_norm = norm if next_layer is None else None
            x, residual = ops.forward.add_rms_norm(
                x, residual, layer.mlp_norm if next_norm is None else next_norm, eps
            )
        if i in taps:
            tapped[i] = residual
    return residual if norm is None else x, residual, *(tapped[i] for i in taps)


def attention_forward(
    ops: Ops, attention: Attention, x: Tensor, rows: Rows, rope: Tensor, cache: Tensor, eps: float
) -> Tensor:
    """Store K and V of rows x [R, hidden] and attend: [R, num_q * dim], before the output projection."""
    q = store_kv(ops, attention, x, rows, rope, cache, eps)
    return ops.forward.attention(q, rows, attention.heads, cache)


def store_kv(
    ops: Ops, attention: Attention, x: Tensor, rows: Rows, rope: Tensor, cache: Tensor, eps: float
) -> Tensor:
    """Project rows x [R, hidden], store their K and V in `cache`, and return q [R, num_q * dim]."""
    return ops.forward.linear_rope_store(x, rows, attention, rope, cache, eps)


def mlp_forward(ops: Ops, mlp: Mlp, x: Tensor) -> Tensor:
    """Apply the gated MLP to rows x [R, hidden]: [R, hidden]."""
    return ops.forward.linear(ops.forward.linear_silu_mul(x, mlp.gate_up), mlp.down)


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
