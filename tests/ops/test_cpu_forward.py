"""Forward ops of the cpu backend: right, and a row's bits depend on that row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.ops import AttentionShape

pytest.importorskip("numba")

from cpu_cases import CPU, KINDS, PAGE, Paged, close, make, poison, rand, same
from draftproof.ops.cpu.backend import CpuOps
from draftproof.ops.cpu.jit import amx


@pytest.fixture(scope="module", params=KINDS)
def backend(request: Any) -> tuple[CpuOps, torch.dtype]:
    return make(request.param)


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(CPU, threads=2)


# --- linear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns,depth", [(97, 48), (259, 32), (64, 64), (33, 7), (960, 576), (17, 100), (1, 1)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_correct_and_rows_are_independent(
    backend: tuple[CpuOps, torch.dtype], columns: int, depth: int, bias: bool
) -> None:
    ops, dtype = backend
    weight = rand(columns, depth, dtype=dtype, seed=1)
    offset = rand(columns, dtype=dtype, seed=2) if bias else None
    packed = ops.forward.pack_linear(weight, offset)
    x = rand(70, depth, dtype=dtype, seed=3)
    whole = ops.forward.linear(x, packed, torch.float32)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    # the products of bf16 are exact, so both types have the error of a sum in fp32
    assert (whole.double() - exact).abs().max() < depth**0.5 * 1e-5
    rounded = ops.forward.linear(x, packed)
    assert same(rounded, whole.to(dtype))
    poison(ops)
    alone = torch.cat([ops.forward.linear(x[i : i + 1], packed, torch.float32) for i in range(70)])
    assert same(alone, whole)
    for count in (2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 65):
        start = 70 - count
        assert same(ops.forward.linear(x[start:], packed, torch.float32), whole[start:])


def test_linear_of_many_rows(backend: tuple[CpuOps, torch.dtype]) -> None:
    ops, dtype = backend
    packed = ops.forward.pack_linear(rand(100, 64, dtype=dtype))
    x = rand(300, 64, dtype=dtype, seed=1)
    whole = ops.forward.linear(x, packed)
    for start, end in ((0, 1), (127, 130), (255, 257), (299, 300)):
        assert same(ops.forward.linear(x[start:end], packed), whole[start:end])


def test_linear_ignores_nan_in_other_rows(backend: tuple[CpuOps, torch.dtype]) -> None:
    ops, dtype = backend
    packed = ops.forward.pack_linear(rand(64, 40, dtype=dtype))
    x = rand(20, 40, dtype=dtype, seed=1)
    good = ops.forward.linear(x, packed)
    x[3] = float("nan")
    x[17] = float("inf")
    rest = [i for i in range(20) if i not in (3, 17)]
    assert same(ops.forward.linear(x, packed)[rest], good[rest])


# --- one row at a time ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 32, 48, 100, 576])
def test_norms_and_activation(backend: tuple[CpuOps, torch.dtype], width: int) -> None:
    ops, dtype = backend
    x, residual = rand(70, width, dtype=dtype, seed=1), rand(70, width, dtype=dtype, seed=2)
    weight = rand(width, dtype=dtype, seed=3)

    def norm(s: Tensor) -> Tensor:
        s = s.double()
        return s * (s.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

    normed = ops.forward.rms_norm(x, weight, 1e-5)
    close(normed, norm(x), dtype)
    both, total = ops.forward.add_rms_norm(x, residual, weight, 1e-5)
    assert same(total, (x.float() + residual.float()).to(dtype))
    assert same(both, ops.forward.rms_norm(total, weight, 1e-5))
    gate_up = torch.cat([x, residual], dim=1) * 4
    gated = ops.forward.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    close(gated / 4, gate * torch.sigmoid(gate) * up / 4, dtype)
    for i in (0, 1, 35, 69):
        one = slice(i, i + 1)
        assert same(ops.forward.rms_norm(x[one], weight, 1e-5), normed[one])
        assert same(ops.forward.add_rms_norm(x[one], residual[one], weight, 1e-5)[0], both[one])
        assert same(ops.forward.silu_mul(gate_up[one]), gated[one])


def test_silu_at_extreme_values(ops: CpuOps) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -30.0, 0.0, 30.0, 88.0, 200.0, 1e30])
    ours = ops.forward.silu_mul(torch.cat([gate, torch.ones(9)])[None])[0]
    torch.testing.assert_close(ours, torch.nn.functional.silu(gate), rtol=1e-5, atol=1e-30)


def test_embed(backend: tuple[CpuOps, torch.dtype]) -> None:
    ops, dtype = backend
    table = rand(97, 24, dtype=dtype)
    tokens = torch.tensor([0, 96, 5, 5])
    assert same(ops.forward.embed(tokens, table), table[tokens])
    assert ops.forward.embed(tokens[:0], table).shape == (0, 24)


# --- attention ------------------------------------------------------------------------------------


HEADS = [
    AttentionShape(9, 3, 64, 0.125, 0),
    AttentionShape(4, 2, 8, 0.35, 0),
    AttentionShape(2, 2, 16, 0.25, 20),
    AttentionShape(8, 1, 32, 0.2, 150),
    AttentionShape(2, 1, 128, 0.09, 0),
    AttentionShape(4, 4, 24, 0.2, 0),
]


@pytest.mark.parametrize("heads", HEADS)
def test_attention(backend: tuple[CpuOps, torch.dtype], heads: AttentionShape) -> None:
    ops, dtype = backend
    paged = Paged(heads, [300, 70, 1, 129], dtype)
    places = [(0, p) for p in range(100, 165)] + [(1, p) for p in range(70)] + [(2, 0)]
    places += [(3, p) for p in (126, 127, 128)] + [(0, 299)]
    q = rand(len(places), heads.num_q * heads.dim, dtype=dtype, seed=9)
    whole = ops.forward.attention(q, paged.rows(places), heads, paged.cache)
    some = list(range(0, len(places), 6)) + [135, 139]
    close(whole[some], paged.exact(q[some], [places[i] for i in some]), dtype)
    for i in [0, 1, 27, 28, 64, 65, 100, 134, 135, 136, 137, 138, 139]:
        poison(ops)
        alone = ops.forward.attention(q[i : i + 1], paged.rows(places[i : i + 1]), heads, paged.cache)
        assert same(alone, whole[i : i + 1]), i
    for start, end in ((3, 11), (60, 70), (130, 140)):
        part = ops.forward.attention(q[start:end], paged.rows(places[start:end]), heads, paged.cache)
        assert same(part, whole[start:end])


def test_attention_ignores_keys_beyond_the_row(backend: tuple[CpuOps, torch.dtype]) -> None:
    """Rows 40..45 of one request together, with NaN stored by the rows after row 42."""
    ops, dtype = backend
    heads = HEADS[0]
    paged = Paged(heads, [46], dtype)
    places = [(0, p) for p in range(40, 46)]
    q = rand(6, heads.num_q * heads.dim, dtype=dtype)
    good = ops.forward.attention(q, paged.rows(places), heads, paged.cache)
    for position in (43, 44, 45):
        paged.cache[:, int(paged.table[0, position // PAGE]), position % PAGE] = float("nan")
    assert same(ops.forward.attention(q, paged.rows(places), heads, paged.cache)[:3], good[:3])


def test_attention_returns_nan_for_rows_with_visible_nan(backend: tuple[CpuOps, torch.dtype]) -> None:
    """NaN in V at keys 3 and 30; with a window of 20, rows see the first, none, or the second."""
    ops, dtype = backend
    heads = HEADS[2]
    paged = Paged(heads, [60], dtype)
    for position in (3, 30):
        paged.cache[1, int(paged.table[0, position // PAGE]), position % PAGE] = float("nan")
    places = [(0, p) for p in range(60)]
    q = rand(60, heads.num_q * heads.dim, dtype=dtype)
    got = ops.forward.attention(q, paged.rows(places), heads, paged.cache)
    spoilt = [any(p - 19 <= bad <= p for bad in (3, 30)) for p in range(60)]
    assert got.isnan().all(1).tolist() == spoilt and got.isnan().any(1).tolist() == spoilt
    for i in range(60):
        alone = ops.forward.attention(q[i : i + 1], paged.rows(places[i : i + 1]), heads, paged.cache)
        assert same(alone.nan_to_num(7.0), got[i : i + 1].nan_to_num(7.0))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_rope_store(backend: tuple[CpuOps, torch.dtype], heads: AttentionShape, norms: bool) -> None:
    ops, dtype = backend
    paged = Paged(heads, [40, 33], dtype)
    places = [(0, p) for p in range(5, 40)] + [(1, 3), (1, 32)]
    rows = paged.rows(places)
    width = (heads.num_q + 2 * heads.num_kv) * heads.dim
    qkv = rand(len(places), width, dtype=dtype, seed=4)
    angles = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(heads.dim // 2))
    rope = torch.cat([angles.cos(), angles.sin()], dim=1)
    q_norm = rand(heads.dim, dtype=dtype, seed=6) if norms else None
    k_norm = rand(heads.dim, dtype=dtype, seed=7) if norms else None
    before = paged.cache.clone()
    cache = paged.cache
    got = ops.forward.rope_store(qkv, rows, heads, rope, cache, q_norm, k_norm, 1e-6)

    def turn(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x.double()
        if norm is not None:
            x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
        low, high = x.chunk(2, -1)
        cos, sin = rope[rows.positions].double()[:, None].chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    parts = qkv.view(len(places), -1, heads.dim)
    q, k, v = parts.split([heads.num_q, heads.num_kv, heads.num_kv], 1)
    close(got.view_as(q), turn(q, q_norm), dtype)
    flat = cache.view(2, -1, heads.num_kv, heads.dim)
    close(flat[0, rows.kv_index], turn(k, k_norm), dtype)
    assert same(flat[1, rows.kv_index], v.contiguous())
    others = torch.ones(flat.shape[1], dtype=torch.bool)
    others[rows.kv_index] = False
    old = before.view_as(flat)
    assert torch.equal(flat[:, others].nan_to_num(), old[:, others].nan_to_num())
    for i in (0, 20, 36):
        other = before.clone()
        one = paged.rows(places[i : i + 1])
        alone = ops.forward.rope_store(qkv[i : i + 1], one, heads, rope, other, q_norm, k_norm, 1e-6)
        assert same(alone, got[i : i + 1])
        index = int(one.kv_index)
        assert same(other.view_as(flat)[:, index], flat[:, index])


@pytest.mark.skipif(not amx.takes_bytes(), reason="needs AMX with int8")
@pytest.mark.parametrize(("columns", "depth"), [(61, 40), (64, 64), (200, 130), (97, 576)])
def test_int8_draft_weights_are_close_and_rows_are_independent(columns: int, depth: int) -> None:
    """Compare with int8 in fp64, which is the definition, and with bf16."""
    ops, dtype = make("amx", 2)
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn((columns, depth), generator=generator).to(dtype)
    weight[3] = 0
    x = torch.randn((70, depth), generator=generator).to(dtype)
    x[5], x[7] = 0, 100 * x[7]
    rough = ops.forward.pack_draft_linear(weight)
    found = ops.forward.linear(x, rough, torch.float32)
    bias = torch.randn(columns, generator=generator).to(dtype)
    assert same(
        ops.forward.linear(x, ops.forward.pack_draft_linear(weight, bias), torch.float32), found + bias
    )

    def in_bytes(rows: Tensor) -> Tensor:
        scale = rows.double().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        return (rows.double() / scale).round() * scale

    expected = in_bytes(x) @ in_bytes(weight).T
    size = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    off = (found - expected).abs() / size.clamp(min=1e-9)
    assert off.max() < 5e-3 and off.median() < 1e-6  # a byte here and there is rounded the other way
    assert ((found - x.double() @ weight.double().T).abs() <= 0.02 * size + 1e-6).all()
    assert (found[5] == 0).all() and (found[:, 3] == 0).all()
    poison(ops)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(30, 70)):
        assert same(ops.forward.linear(x[rows], rough, torch.float32), found[rows])
    assert same(make("amx", 3)[0].forward.linear(x, rough, torch.float32), found)
    assert same(ops.forward.linear(x, rough), found.to(dtype))


def test_ops_reject_wrong_shapes_and_dtypes(ops: CpuOps) -> None:
    packed = ops.forward.pack_linear(rand(5, 8))
    with pytest.raises(ValueError):
        ops.forward.linear(rand(2, 9), packed)
    with pytest.raises(ValueError):
        ops.forward.linear(rand(2, 8, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError):
        ops.forward.rms_norm(rand(2, 8), rand(9), 1e-5)
    with pytest.raises(ValueError):
        ops.sampling.argmax(rand(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError):
        ops.sampling.top(rand(2, 8), 9)
