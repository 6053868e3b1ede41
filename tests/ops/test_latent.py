"""Latent attention of every backend against `reference`, and independence of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.ops import AttentionShape, LatentAttention, Ops
from latent_layers import NOPE, RANK, VALUE, layer, randn, rope
from opcheck import POOL, Paged, assert_close, bits, importable, rows_that_differ

OPS = importable()
OTHERS = {name: ops for name, ops in OPS.items() if name != "reference"}
REFERENCE = OPS["reference"]
others = pytest.mark.parametrize("ops", OTHERS.values(), ids=OTHERS)
dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
SHAPES = {
    "lite": AttentionShape(num_q=3, num_kv=1, dim=24, scale=0.25, window=0, value_dim=16),
    "wide": AttentionShape(num_q=16, num_kv=1, dim=136, scale=0.1, window=0, value_dim=128),
}
shapes = pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
LENGTHS = [1, 33, 132, 65]


def project(ops: Ops, attention: LatentAttention, x: Tensor, q: Tensor, paged: Paged, where: list) -> Tensor:
    """Run every op around the attention and return all results side by side."""
    rows, table = paged.rows(where), rope(attention.rope_dim)
    first = ops.forward.latent_store(x, rows, attention, table, paged.cache)
    queries = ops.forward.latent_queries(q, rows, attention, table)
    latent = queries.view(len(q), attention.heads.num_q, attention.heads.dim)[
        ..., : attention.heads.value_dim
    ]
    values = ops.forward.head_linear(latent.flatten(1), attention.value_up)
    return torch.cat([first, queries, values], 1)


def inputs(heads: AttentionShape, rank: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = heads.num_q * (NOPE + heads.dim - heads.value_dim)
    x = randn(count, (rank or width) + heads.dim, seed=1, dtype=dtype)
    return x, randn(count, width, seed=2, dtype=dtype)


@others
@dtypes
@shapes
@pytest.mark.parametrize(("rank", "pairs"), [(0, True), (RANK, True), (RANK, False)])
def test_projections_and_stored_rows_equal_reference(
    ops: Ops, dtype: torch.dtype, heads: AttentionShape, rank: int, pairs: bool
) -> None:
    for where in ([], [(1, 32)], [(0, 0), (2, 17), (2, 18), (2, 19), (3, 64)]):
        x, q = inputs(heads, rank, len(where), dtype)
        found, caches = [], []
        for backend in (ops, REFERENCE):
            paged = Paged(heads, LENGTHS, dtype)
            paged.cache.zero_()
            found.append(project(backend, layer(backend, heads, dtype, rank, pairs), x, q, paged, where))
            caches.append(paged.cache)
        assert_close(*found, dtype)
        assert_close(*caches, dtype)


@others
@dtypes
def test_rows_of_projections_are_independent(ops: Ops, dtype: torch.dtype) -> None:
    heads, where = SHAPES["wide"], [(2, p) for p in range(POOL)]
    attention, (x, q) = layer(ops, heads, dtype, RANK, True), inputs(heads, RANK, POOL, dtype)
    stored: dict[int, bytes] = {}

    def call(at: list[int]) -> Tensor:
        paged = Paged(heads, LENGTHS, dtype)
        out = project(ops, attention, x[at], q[at], paged, [where[i] for i in at])
        for i in at:
            row = bits(paged.cache.view(-1, heads.dim)[paged.place(*where[i])])
            assert stored.setdefault(i, row) == row
        return out

    assert not rows_that_differ(call, counts=(2, 9, 17), turns=1)


@others
@dtypes
@shapes
def test_attention_equals_reference(ops: Ops, dtype: torch.dtype, heads: AttentionShape) -> None:
    paged = Paged(heads, LENGTHS, dtype)
    for where in ([], [(2, 131)], [(3, 64), *((2, p) for p in range(122, 132)), (0, 0)]):
        q = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype)
        found = [
            backend.forward.attention(q, paged.rows(where), heads, paged.cache)
            for backend in (ops, REFERENCE)
        ]
        assert_close(*found, dtype)


def dependent_rows(ops: Ops, heads: AttentionShape, dtype: torch.dtype) -> list[str]:
    """Return rows whose bits differ alone, in a verify window, and in a prefill chunk."""
    paged = Paged(heads, LENGTHS, dtype)
    q = {at: randn(heads.num_q * heads.dim, seed=i, dtype=dtype) for i, at in enumerate(paged.pool)}

    def run(where: list[tuple[int, int]]) -> list[bytes]:
        x = torch.stack([q[at] for at in where])
        return [bits(row) for row in ops.forward.attention(x, paged.rows(where), heads, paged.cache)]

    slot, wrong = 2, []
    for start, count in ((0, 132), (0, 40), (40, 92), (120, 5), (126, 6), (60, 9)):
        batch = [(0, 0), *((slot, p) for p in range(start, start + count)), (3, 64)]
        for at, got in zip(batch, run(batch), strict=True):
            if at[1] % 13 in (0, 12) and run([at])[0] != got:
                wrong.append(f"{at} among {len(batch)}")
    return wrong


@others
@dtypes
@shapes
def test_prefill_verify_and_decode_rows_have_the_same_bits(
    ops: Ops, dtype: torch.dtype, heads: AttentionShape
) -> None:
    assert not dependent_rows(ops, heads, dtype)


def test_control_second_algebraic_form_is_detected() -> None:
    """Compute decode rows from keys that are projected first: equal in exact numbers, not in bits."""
    ops, heads, dtype = OPS["torch"], SHAPES["wide"], torch.float32
    attention, kv_up = layer(ops, heads, dtype, 0, True), randn(16, NOPE + VALUE, 128, seed=4) / 4
    paged, where = Paged(heads, LENGTHS, dtype), [(2, 131)]
    x, q = inputs(heads, 0, 1, dtype)
    rows, table = paged.rows(where), rope(attention.rope_dim)
    ops.forward.latent_store(x, rows, attention, table, paged.cache)
    queries = ops.forward.latent_queries(q, rows, attention, table)
    absorbed = ops.forward.attention(queries, rows, heads, paged.cache)
    absorbed = ops.forward.head_linear(absorbed, attention.value_up)
    places = [paged.place(2, p) for p in range(132)]
    latent, key = paged.cache.view(-1, heads.dim)[places].split([128, 8], 1)
    keys, values = torch.einsum("tl,hdl->htd", latent, kv_up).split([NOPE, VALUE], 2)
    rotary = queries.view(16, heads.dim)[:, 128:]
    scores = torch.einsum("hd,htd->ht", q.view(16, -1)[:, :NOPE], keys) + rotary @ key.T
    plain = torch.einsum("ht,htd->hd", torch.softmax(scores * heads.scale, 1), values).view(1, -1)
    torch.testing.assert_close(absorbed, plain, rtol=1e-4, atol=1e-4)
    assert bits(absorbed) != bits(plain)


def test_control_blocks_of_keys_by_number_of_rows_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.ops.torch import forward

    plain = forward._attend

    def attend(q: Tensor, *arguments: object) -> Tensor:
        monkeypatch.setattr(forward, "BLOCK_KEYS", 64 if len(q) == 1 else 32)
        return plain(q, *arguments)

    monkeypatch.setattr(forward, "_attend", attend)
    assert dependent_rows(OPS["torch"], SHAPES["lite"], torch.float32)
