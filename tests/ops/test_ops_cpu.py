"""The cpu backend: a row's bits depend on that row alone, in every kernel, and the kernels are right."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftproof.ops import AttentionShape, Rows

pytest.importorskip("numba")

from draftproof.ops.cpu.backend import CpuOps
from draftproof.ops.cpu.jit import amx

CPU = torch.device("cpu")
AMX = amx.available()
KINDS = ["fp32", "bf16", pytest.param("amx", marks=pytest.mark.skipif(not AMX, reason="no AMX"))]
PAGE = 16


def make(kind: str, threads: int = 2) -> tuple[CpuOps, torch.dtype]:
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    return CpuOps(CPU, threads=threads, amx=kind == "amx"), dtype


@pytest.fixture(scope="module", params=KINDS)
def backend(request: Any) -> tuple[CpuOps, torch.dtype]:
    return make(request.param)


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(CPU, threads=2)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the float64 result."""
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(ours.double(), exact.double(), rtol=tolerance, atol=tolerance)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def poison(ops: CpuOps) -> None:
    """NaN in all memory that kernels use between calls."""
    ops.executor.team._scratch.fill(0xFF)
    ops.forward._workspace.fill_(float("nan"))


# --- linear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns,depth", [(97, 48), (259, 32), (64, 64), (33, 7), (960, 576), (17, 100), (1, 1)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_right_and_rows_stand_alone(
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


def test_a_bad_neighbour_changes_nothing(backend: tuple[CpuOps, torch.dtype]) -> None:
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


def test_silu_at_the_ends(ops: CpuOps) -> None:
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


class Paged:
    """Requests with shuffled pages; unused places hold NaN."""

    def __init__(self, heads: AttentionShape, lengths: list[int], dtype: torch.dtype) -> None:
        self.heads, self.lengths = heads, lengths
        per = max(-(-n // PAGE) for n in lengths) + 1
        order = torch.randperm(per * len(lengths), generator=torch.Generator().manual_seed(5))
        self.table = torch.full((len(lengths), per), -1, dtype=torch.int32)
        shape = (2, per * len(lengths) + 3, PAGE, heads.num_kv, heads.dim)
        self.cache = torch.full(shape, float("nan")).to(dtype)
        self.kv = [
            rand(2, n, heads.num_kv, heads.dim, dtype=dtype, seed=50 + s) for s, n in enumerate(lengths)
        ]
        for slot, n in enumerate(lengths):
            count = -(-n // PAGE)
            self.table[slot, :count] = order[slot * per : slot * per + count]
            for position in range(n):
                page = int(self.table[slot, position // PAGE])
                self.cache[:, page, position % PAGE] = self.kv[slot][:, position]

    def rows(self, places: list[tuple[int, int]]) -> Rows:
        slots = torch.tensor([slot for slot, _ in places])
        positions = torch.tensor([position for _, position in places])
        pages = self.table[slots, positions // PAGE].long()
        index = pages * PAGE + positions % PAGE
        return Rows(torch.zeros_like(slots), positions, slots, index, self.table)

    def exact(self, q: Tensor, places: list[tuple[int, int]]) -> Tensor:
        heads, out = self.heads, []
        for row, (slot, position) in zip(q.double(), places, strict=True):
            low = max(0, position - heads.window + 1) if heads.window else 0
            k, v = self.kv[slot][:, low : position + 1].double()
            group = heads.num_q // heads.num_kv
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("hd,khd->hk", row.view(heads.num_q, -1), k) * heads.scale
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten())
        return torch.stack(out)


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


def test_keys_beyond_a_row_do_not_touch_it(backend: tuple[CpuOps, torch.dtype]) -> None:
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


def test_a_row_that_sees_nan_says_so(backend: tuple[CpuOps, torch.dtype]) -> None:
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


# --- capture --------------------------------------------------------------------------------------


class Tiny:
    """A two-layer model of the ops."""

    def __init__(self, ops: CpuOps, dtype: torch.dtype) -> None:
        self.ops, self.heads = ops, AttentionShape(4, 2, 16, 0.25, 0)
        self.table = rand(97, 48, dtype=dtype)
        width = 8 * 16
        self.layers = [
            {
                "n1": rand(48, dtype=dtype, seed=i),
                "n2": rand(48, dtype=dtype, seed=10 + i),
                "qkv": ops.forward.pack_linear(rand(width, 48, dtype=dtype, seed=20 + i) / 7),
                "o": ops.forward.pack_linear(rand(48, 64, dtype=dtype, seed=30 + i) / 8),
                "gu": ops.forward.pack_linear(rand(160, 48, dtype=dtype, seed=40 + i) / 7),
                "down": ops.forward.pack_linear(rand(48, 80, dtype=dtype, seed=50 + i) / 9),
            }
            for i in range(2)
        ]
        self.head = ops.forward.pack_linear(self.table)
        angles = torch.outer(torch.arange(512.0), 0.5 ** torch.arange(8))
        self.rope = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.caches = [torch.full((2, 40, PAGE, 2, 16), float("nan")).to(dtype) for _ in range(2)]

    def forward(self, rows: Rows) -> Tensor:
        ops, heads = self.ops, self.heads
        x = ops.forward.embed(rows.tokens, self.table)
        h = ops.forward.rms_norm(x, self.layers[0]["n1"], 1e-5)
        for i, layer in enumerate(self.layers):
            if i:
                h, x = ops.forward.add_rms_norm(h, x, layer["n1"], 1e-5)
            qkv = ops.forward.linear(h, layer["qkv"])
            q = ops.forward.rope_store(qkv, rows, heads, self.rope, self.caches[i], None, None, 1e-5)
            h = ops.forward.linear(ops.forward.attention(q, rows, heads, self.caches[i]), layer["o"])
            h, x = ops.forward.add_rms_norm(h, x, layer["n2"], 1e-5)
            h = ops.forward.linear(ops.forward.silu_mul(ops.forward.linear(h, layer["gu"])), layer["down"])
        return ops.forward.linear(
            ops.forward.add_rms_norm(h, x, self.layers[0]["n1"], 1e-5)[0], self.head, torch.float32
        )


def tokens_of(places: list[tuple[int, int]], paged: Paged) -> Rows:
    rows = paged.rows(places)
    tokens = (rows.positions * 31 + rows.slots * 7) % 97
    return Rows(tokens, rows.positions, rows.slots, rows.kv_index, rows.page_table)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_is_eager_at_any_thread_count(kind: str) -> None:
    results = []
    for threads in (1, 2, 3):
        ops, dtype = make(kind, threads)
        model = Tiny(ops, dtype)
        paged = Paged(model.heads, [290, 30], dtype)
        captured = ops.runtime.capture(lambda rows, model=model: (model.forward(rows),), 300)
        chunk = [(0, p) for p in range(280)] + [(1, p) for p in range(20)]
        step = [(0, p) for p in range(280, 288)] + [(1, 20)]
        eager = [model.forward(tokens_of(places, paged)).clone() for places in (chunk, step)]
        for cache in model.caches:
            cache.fill_(float("nan"))
        again = [captured(tokens_of(places, paged))[0].clone() for places in (chunk, step)]
        assert same(eager[0], again[0]) and same(eager[1], again[1])
        poison(ops)
        captured._program.arena.fill(0xFF)  # type: ignore[attr-defined]
        for i in range(8):  # one at a time, after the keys of the rows before
            (alone,) = captured(tokens_of(step[i : i + 1], paged))
            assert same(alone, eager[1][i : i + 1])
        assert not eager[0].isnan().any()
        assert captured(tokens_of(step[:1], paged))[0].shape == (1, 97)
        results.append(torch.cat(eager))
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_capture_follows_a_new_page_table_and_refuses_foreign_operations() -> None:
    ops, dtype = make("fp32")
    model = Tiny(ops, dtype)
    captured = ops.runtime.capture(lambda rows: (model.forward(rows),), 4)
    first, second = (Paged(model.heads, [30], dtype) for _ in range(2))
    a = captured(tokens_of([(0, 0), (0, 1)], first))[0].clone()
    b = captured(tokens_of([(0, 0), (0, 1)], second))[0].clone()
    assert same(a, b)
    with pytest.raises(ValueError, match="captured for 4"):
        captured(tokens_of([(0, p) for p in range(5)], first))

    def foreign(rows: Rows) -> tuple[Tensor, ...]:
        return (
            ops.forward.rms_norm(
                ops.forward.embed(rows.tokens, model.table) * 2, model.layers[0]["n1"], 1e-5
            ),
        )

    with pytest.raises(Exception, match="ops only"):
        ops.runtime.capture(foreign, 4)(tokens_of([(0, 0)], first))
    assert same(model.forward(tokens_of([(0, 0), (0, 1)], first)), a)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_pass_is_given_rows_that_change(kind: str) -> None:
    """Its own result too, as a head's rounds do."""
    ops, dtype = make(kind)
    model = Tiny(ops, dtype)
    paged = Paged(model.heads, [30], dtype)
    norm = torch.cat([model.layers[0]["n1"]] * 2)

    def forward(rows: Rows, left: Tensor) -> tuple[Tensor, ...]:
        wide = ops.forward.concat_columns(left, ops.forward.embed(rows.tokens, model.table))
        return (ops.forward.rms_norm(wide, norm, 1e-5),)

    captured, width = ops.runtime.capture(forward, 40), model.table.shape[1]
    left = torch.randn(29, width).to(dtype)
    for count in (29, 1, 7):
        rows = tokens_of([(0, p) for p in range(count)], paged)
        wide = torch.cat([left[:count], model.table[rows.tokens]], 1)
        expected = ops.forward.rms_norm(wide, norm, 1e-5)
        (found,) = captured(rows, left[:count])
        assert same(found, expected)
        (again,) = captured(rows, found[:, :width])
        assert same(again, forward(rows, expected[:, :width])[0])


@pytest.mark.skipif(not amx.takes_bytes(), reason="needs AMX with int8")
@pytest.mark.parametrize(("columns", "depth"), [(61, 40), (64, 64), (200, 130), (97, 576)])
def test_rough_weights_are_nearly_right_and_rows_do_not_meet(columns: int, depth: int) -> None:
    """Bytes in fp64 are the definition; bf16 is what they stand for."""
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


def test_arena_places_never_overlap_while_alive() -> None:
    from draftproof.ops.cpu.jit.program import place

    numbers = np.random.default_rng(0)
    for _ in range(50):
        births = np.sort(numbers.integers(0, 30, 40))
        buffers = [(int(numbers.integers(1, 500)), int(b), int(b + numbers.integers(0, 8))) for b in births]
        offsets, total = place(buffers)
        for i, (size, born, last) in enumerate(buffers):
            assert offsets[i] % 64 == 0 and offsets[i] + size <= total
            for j in range(i):
                other, other_born, other_last = buffers[j]
                if other_born <= last and born <= other_last:
                    assert offsets[i] + size <= offsets[j] or offsets[j] + other <= offsets[i]


# --- sampling -------------------------------------------------------------------------------------


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """The definition, in Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        low = 0xFFFFFFFF
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & low, (p0 >> 32) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c


KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_known_answers() -> None:
    from draftproof.ops.cpu.sampling.philox import philox as native

    for counter, key, words in KNOWN:
        assert tuple(philox(counter, key)) == words
        assert tuple(native(*counter, *key)) == words


def noise(seed: int, position: int, stream: int, vocab: int) -> np.ndarray:
    """u of every id."""
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    words = [philox((i, position & 0xFFFFFFFF, stream, 0), key) for i in range(-(-vocab // 4))]
    return (np.array(words, dtype=np.float64).reshape(-1)[:vocab] + 0.5) * 2.0**-32


def test_uniform(ops: CpuOps) -> None:
    seeds = torch.tensor([0, -1, 2**62 + 12345, 7])
    positions = torch.tensor([0, 5, 1000000, 2**31])
    expected = [noise(int(s), int(p), 1, 1)[0] for s, p in zip(seeds, positions, strict=True)]
    assert ops.sampling.uniform(seeds, positions, 1).tolist() == expected


@pytest.mark.parametrize("vocab", [1, 3, 16, 97, 259, 1000, 5003])
def test_gumbel_argmax_is_brute_force(ops: CpuOps, vocab: int) -> None:
    scales = [0.0, 0.5, 3.0, 10.0, 1e5]
    rows = []
    for i, scale in enumerate(scales):
        rows.append(rand(vocab, seed=i) * scale)
    rows.append(torch.full((vocab,), float("-inf")))
    rows.append(rand(vocab, seed=9) * 2)
    rows[-1][rand(vocab, seed=8) > 0] = float("-inf")
    scaled = torch.stack(rows * 3)
    seeds = torch.arange(len(scaled)) * 2**33 - 5
    positions = torch.arange(len(scaled)) * 17
    got = ops.sampling.gumbel_argmax(scaled, seeds, positions, 2)
    for i, row in enumerate(scaled):
        u = noise(int(seeds[i]), int(positions[i]), 2, vocab)
        g = (-np.log(-np.log1p(-u))).astype(np.float32)
        assert int(got[i]) == int(np.argmax(row.numpy() + g)), i
        one = slice(i, i + 1)
        assert same(ops.sampling.gumbel_argmax(scaled[one], seeds[one], positions[one], 2), got[one])


def awkward(vocab: int) -> Tensor:
    """Rows with ties, -inf, one value only, signed zeros, everything but one -inf."""
    ties = torch.randint(-3, 4, (vocab,), generator=torch.Generator().manual_seed(1)).float()
    zeros = torch.zeros(vocab)
    zeros[::2] = -0.0
    holes = rand(vocab, seed=2) * 3
    holes[rand(vocab, seed=3) > 0] = float("-inf")
    lone = torch.full((vocab,), float("-inf"))
    lone[vocab // 2] = -5.0
    nothing = torch.full((vocab,), float("-inf"))
    return torch.stack([rand(vocab) * 4, ties, zeros, holes, lone, nothing, rand(vocab) * 30])


def order(row: Tensor) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))


@pytest.mark.parametrize("vocab", [1, 15, 97, 259, 1024])
def test_argmax_rank_top(ops: CpuOps, vocab: int) -> None:
    logits = awkward(vocab)
    orders = [order(row) for row in logits]
    assert ops.sampling.argmax(logits).tolist() == [ids[0] for ids in orders]
    for k in {1, min(5, vocab), vocab // 2, vocab}:
        if k:
            values, ids = ops.sampling.top(logits, k)
            assert ids.tolist() == [line[:k] for line in orders]
            assert same(values, logits.gather(1, ids))
    for place in {0, vocab // 3, vocab - 1}:
        ids = torch.tensor([line[place] for line in orders])
        assert ops.sampling.rank(logits, ids).tolist() == [place + 1] * len(logits)
    for i in range(len(logits)):
        assert ops.sampling.argmax(logits[i : i + 1]).tolist() == [orders[i][0]]
    assert ops.sampling.top(logits, 0)[0].shape == (len(logits), 0)


@pytest.mark.parametrize("vocab", [1, 97, 5003])
def test_logsumexp(ops: CpuOps, vocab: int) -> None:
    logits = awkward(vocab)
    got = ops.sampling.logsumexp(logits)
    torch.testing.assert_close(got, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
    for i in range(len(logits)):
        assert same(ops.sampling.logsumexp(logits[i : i + 1]), got[i : i + 1])
    assert ops.sampling.logsumexp(torch.tensor([[float("inf"), 0.0]])).tolist() == [float("inf")]


def truncated(row: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    ids = order(row)
    kept = ids[:top_k] if top_k else ids
    probs = row.double()[kept].softmax(0) if row.max() > float("-inf") else row.double()[kept]
    out = torch.full_like(row, float("-inf"))
    before = 0.0
    for token, prob in zip(kept, probs.tolist(), strict=True):
        if (top_p >= 1 or before < top_p) and prob >= min_p * float(probs[0]):
            out[token] = row[token]
        before += prob
    return out


@pytest.mark.parametrize("vocab", [1, 97, 1024])
def test_truncate(ops: CpuOps, vocab: int) -> None:
    logits = awkward(vocab)
    count = len(logits)
    cases = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.83, 0.03), (1, 1.0, 0.0)]
    for top_k, top_p, min_p in [*cases, (0, 0.01, 0.0), (3, 0.999, 0.0)]:
        got = ops.sampling.truncate(
            logits,
            torch.full((count,), top_k),
            torch.full((count,), top_p),
            torch.full((count,), min_p),
        )
        p, m = float(torch.tensor(top_p)), float(torch.tensor(min_p))
        for i, row in enumerate(logits):
            expected = truncated(row, min(top_k, vocab), p, m)
            assert torch.equal(got[i], expected), (i, top_k, top_p, min_p)


def test_nan_reads_and_writes_nothing_foreign(ops: CpuOps) -> None:
    logits = torch.full((3, 259), float("nan"))
    logits[1, 7] = 1.0
    logits[2] = rand(259)
    logits[2, 100] = float("nan")
    ids = ops.sampling.top(logits, 259)[1]
    assert ((ids >= 0) & (ids < 259)).all()
    assert ((ops.sampling.argmax(logits) >= 0) & (ops.sampling.argmax(logits) < 259)).all()
    sampled = ops.sampling.gumbel_argmax(logits, torch.zeros(3).long(), torch.zeros(3).long(), 0)
    assert ((sampled >= 0) & (sampled < 259)).all()
    ops.sampling.logsumexp(logits)
    ops.sampling.rank(logits, torch.zeros(3).long())
    limits = (torch.full((3,), 5), torch.full((3,), 0.5), torch.full((3,), 0.1))
    ops.sampling.truncate(logits, *limits)


def test_no_rows(ops: CpuOps) -> None:
    none = torch.empty(0, 97)
    empty = torch.empty(0, dtype=torch.int64)
    assert ops.sampling.argmax(none).shape == (0,)
    assert ops.sampling.gumbel_argmax(none, empty, empty, 0).shape == (0,)
    assert ops.sampling.top(none, 5)[1].shape == (0, 5)
    assert ops.sampling.truncate(none, empty, torch.empty(0), torch.empty(0)).shape == (0, 97)
    assert ops.forward.linear(torch.empty(0, 8), ops.forward.pack_linear(rand(5, 8))).shape == (0, 5)


def test_wrong_shapes_and_types_are_refused(ops: CpuOps) -> None:
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


def test_two_teams_in_two_threads() -> None:
    """The library lock of one team does not hold up another; ctypes lets go of the GIL."""
    import threading

    assert ctypes.sizeof(ctypes.c_void_p) == 8
    weight, x = rand(200, 64), rand(9, 64, seed=1)
    results: list[Tensor] = []

    def work() -> None:
        mine = CpuOps(CPU, threads=2)
        packed = mine.forward.pack_linear(weight)
        for _ in range(200):
            out = mine.forward.linear(x, packed)
        results.append(out)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(result, results[0]) for result in results)
