"""Checks of latent attention of the triton backend under Triton's interpreter; see `triton_checks`."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from draftproof.ops import AttentionShape, LatentAttention, Ops
from latent_layers import NOPE, RANK, layer, rope
from opcheck import Paged, assert_close, bits
from triton_checks import CHECKS, DTYPES, assert_batch_invariant, check, ops, randn, ref, run_checks

SHAPES = (
    AttentionShape(num_q=3, num_kv=1, dim=24, scale=0.25, window=0, value_dim=16),
    AttentionShape(num_q=40, num_kv=1, dim=40, scale=0.2, window=0, value_dim=32),  # two groups of heads
)
LENGTHS = [1, 33, 300, 65]


def project(
    backend: Ops, attention: LatentAttention, x: Tensor, q: Tensor, paged: Paged, where: list
) -> Tensor:
    """Run every op around the attention; queries that are not normed are read through a view."""
    heads, rows, table = attention.heads, paged.rows(where), rope(attention.rope_dim)
    first = backend.forward.latent_store(x, rows, attention, table, paged.cache)
    given = q if attention.q_norm is not None else first
    queries = backend.forward.latent_queries(given, rows, attention, table)
    latents = queries.view(len(x), heads.num_q, heads.dim)[..., : heads.value_dim]
    values = backend.forward.head_linear(latents.flatten(1), attention.value_up)
    return torch.cat([first, queries, values], 1)


@check
def projections_and_stored_rows() -> None:
    where = [(0, 0), (2, 17), (2, 18), (2, 19), (3, 64)]
    for dtype in DTYPES:
        for heads, rank, pairs in ((SHAPES[0], 0, True), (SHAPES[0], RANK, False), (SHAPES[1], RANK, True)):
            width = heads.num_q * (NOPE + heads.dim - heads.value_dim)
            x = randn(len(where), (rank or width) + heads.dim, seed=1, dtype=dtype)
            q, found, caches = randn(len(where), width, seed=2, dtype=dtype), [], []
            for backend in (ops, ref):
                paged = Paged(heads, LENGTHS, dtype)
                paged.cache.zero_()
                found.append(project(backend, layer(backend, heads, dtype, rank, pairs), x, q, paged, where))
                caches.append(paged.cache)
            assert_close(*found, dtype)
            assert_close(*caches, dtype)
    rows, cache = paged.rows(where), torch.full_like(paged.cache, 7.0)
    rows.slots[2:4] = -1  # padding stores nothing
    attention = layer(ops, heads, dtype, rank, pairs)
    ops.forward.latent_store(x, rows, attention, rope(attention.rope_dim), cache)
    flat = cache.view(-1, heads.dim)
    assert bool((flat[rows.kv_index[2:4]] == 7).all()) and bool((flat[rows.kv_index[:2]] != 7).any())


@check
def projections_are_batch_invariant() -> None:
    heads, count = SHAPES[0], 18
    attention, paged = layer(ops, heads, torch.float32, RANK, True), Paged(heads, LENGTHS, torch.float32)
    width = heads.num_q * (NOPE + attention.rope_dim)
    x, q = randn(count, RANK + heads.dim, seed=1), randn(count, width, seed=2)

    def call(at: list[int]) -> Tensor:
        return project(ops, attention, x[at], q[at], paged, [(2, i) for i in at])

    assert_batch_invariant(call, count, [list(range(count)), [7, 3, 9]])


@check
def latent_attention() -> None:
    for heads in SHAPES:
        for dtype in DTYPES:
            paged = Paged(heads, LENGTHS, dtype)
            for where in ([(2, 299)], [(3, 64), *((2, p) for p in range(295, 300)), (0, 0)]):
                q = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype)
                found = [b.forward.attention(q, paged.rows(where), heads, paged.cache) for b in (ops, ref)]
                assert_close(*found, dtype)
    assert not len(ops.forward.attention(q[:0], paged.rows([]), heads, paged.cache))


def run(heads: AttentionShape, paged: Paged, q: dict, where: list) -> list[bytes]:
    x = torch.stack([q[at] for at in where])
    return [bits(row) for row in ops.forward.attention(x, paged.rows(where), heads, paged.cache)]


@check
def prefill_verify_and_decode_rows_have_the_same_bits() -> None:
    """Compare parallel spans with a program that loops over them, tiles of several rows, and single rows."""
    for heads, start in ((SHAPES[0], 286), (SHAPES[1], 296)):
        paged = Paged(heads, LENGTHS, torch.float32)
        where = [(0, 0), *((2, p) for p in range(start, 300)), (3, 64)]
        q = {at: randn(heads.num_q * heads.dim, seed=i) for i, at in enumerate(where)}
        together = run(heads, paged, q, where)
        with mock.patch("draftproof.ops.triton.latent.attention.MAX_SPLIT_PROGRAMS", 1):
            assert run(heads, paged, q, where) == together
        for i in (0, 1, len(where) // 2, len(where) - 2, len(where) - 1):
            assert run(heads, paged, q, [where[i]])[0] == together[i], where[i]
        assert run(heads, paged, q, where[-4:-1]) == together[-4:-1]


@check
def padding_rows_are_ignored() -> None:
    heads = SHAPES[0]
    paged, where = Paged(heads, LENGTHS, torch.float32), [(2, 298), (2, 299), (3, 64)]
    q = randn(3, heads.num_q * heads.dim)
    rows = paged.rows(where)
    want = ops.forward.attention(q, rows, heads, paged.cache)
    rows.slots[2] = -1
    assert torch.equal(ops.forward.attention(q, rows, heads, paged.cache)[:2], want[:2])


def main(only: list[str]) -> None:
    """Run the checks of this file."""
    run_checks(CHECKS[__name__], only)
