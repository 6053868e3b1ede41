"""Checks of the ops that only some model families use, for every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops import Attention, AttentionShape, Ops
from draftproof.ops.contract.types import ACTIVATIONS
from opcheck import CPU, Paged, assert_close, bits, importable

REFERENCE = importable()["reference"]
ROWS = 5
HEADS = (
    AttentionShape(num_q=6, num_kv=2, dim=16, scale=0.25, window=0),
    AttentionShape(num_q=4, num_kv=4, dim=8, scale=0.35, window=9),
)
LENGTHS = [1, 5, 33, 140]
EXTREMES = [-1e30, -1e4, -200.0, -88.0, -7.5, -0.0, 0.0, 6.5, 7.5, 88.0, 1e4, 1.0, -1.0, 0.5]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device=CPU).to(dtype)


def check_activations(ops: Ops, dtype: torch.dtype) -> None:
    """Compare each activation with the reference, alone and after a linear layer, also at extremes."""
    gate = torch.tensor(EXTREMES, dtype=torch.float32)
    extremes = torch.cat([gate, torch.linspace(-9, 9, len(EXTREMES))])[None]
    weight = (randn(2 * 48, 64, seed=1) / 4).to(dtype)
    packed, x = ops.forward.pack_linear(weight), randn(ROWS, 64, seed=2, dtype=dtype)
    for name in ACTIVATIONS:
        both = 4 * randn(ROWS, 2 * 45, seed=3, dtype=dtype)
        assert_close(ops.forward.act_mul(both, name), REFERENCE.forward.act_mul(both, name), dtype)
        got, want = ops.forward.act_mul(extremes, name), REFERENCE.forward.act_mul(extremes, name)
        assert_close(got, want, torch.float32)
        fused = ops.forward.linear_act_mul(x, packed, name)
        assert bits(fused) == bits(ops.forward.act_mul(ops.forward.linear(x, packed), name))
        alone = torch.cat([ops.forward.act_mul(both[i : i + 1], name) for i in range(ROWS)])
        assert bits(alone) == bits(ops.forward.act_mul(both, name))


def check_sums_and_norms(ops: Ops, dtype: torch.dtype) -> None:
    """Compare `add`, `scale` and `row_norms` with the reference, each row alone, and fused norms."""
    x, residual = randn(ROWS, 45, seed=1, dtype=dtype), randn(ROWS, 45, seed=2, dtype=dtype)
    total = ops.forward.add(x, residual)
    assert bits(total) == bits(ops.forward.add_rms_norm(x, residual, x[0], 1e-6)[1])
    assert bits(total) == bits(REFERENCE.forward.add(x, residual))
    output_norm = randn(45, seed=5, dtype=dtype)
    want = ops.forward.add_rms_norm(ops.forward.rms_norm(x, output_norm, 1e-6), residual, x[0], 1e-6)
    for times in (1, 52):
        many, others = x.repeat(times, 1), residual.repeat(times, 1)
        got = ops.forward.norm_add_rms_norm(many, output_norm, others, x[0], 1e-6)
        assert [bits(each) for each in got] == [bits(each.repeat(times, 1)) for each in want]
    for factor in (0.22, 12.0, 45**0.5):
        assert bits(ops.forward.scale(x, factor)) == bits(REFERENCE.forward.scale(x, factor))
    for heads in HEADS:
        width, kv_width = heads.num_q * heads.dim, heads.num_kv * heads.dim
        norms = {"q_row_norm": randn(width, seed=3, dtype=dtype), "k_row_norm": randn(kv_width, dtype=dtype)}
        attention = Attention(heads, None, None, **norms)
        qkv = 3 * randn(ROWS, width + 2 * kv_width, seed=4, dtype=dtype)
        got = ops.forward.row_norms(qkv, attention, 1e-6)
        assert_close(got, REFERENCE.forward.row_norms(qkv, attention, 1e-6), dtype)
        assert bits(got[:, -kv_width:]) == bits(qkv[:, -kv_width:]), "v is copied"
        alone = torch.cat([ops.forward.row_norms(qkv[i : i + 1], attention, 1e-6) for i in range(ROWS)])
        assert bits(alone) == bits(got)


def check_sinks(ops: Ops, dtype: torch.dtype) -> None:
    """Compare attention with sinks with the reference; a row alone has the bits of the row in a batch."""
    where = [(3, p) for p in range(134, 140)] + [(1, 4), (2, 31), (2, 32), (0, 0)]
    for heads in HEADS:
        paged = Paged(heads, LENGTHS, dtype)
        sinks = torch.linspace(-3.0, 40.0, heads.num_q)  # the last outweighs every key
        q = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype)
        got = ops.forward.attention(q, paged.rows(where), heads, paged.cache, sinks)
        assert_close(got, REFERENCE.forward.attention(q, paged.rows(where), heads, paged.cache, sinks), dtype)
        plain = ops.forward.attention(q, paged.rows(where), heads, paged.cache)
        assert float((got - plain).abs().max()) > 0.1, "sinks have no effect"
        for i in (0, 5, 6, len(where) - 1):
            alone = ops.forward.attention(q[i : i + 1], paged.rows([where[i]]), heads, paged.cache, sinks)
            assert bits(alone[0]) == bits(got[i])


EVERY_CHECK = (check_activations, check_sums_and_norms, check_sinks)
