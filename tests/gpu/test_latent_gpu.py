"""Latent attention on a GPU in DeepSeek's widths: values, and bits of prefill, verify and decode rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.ops import AttentionShape, LatentAttention, Rows, resolve
from exact import Batch, Case, Setup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CUDA = torch.device("cuda")
PAGE, NOPE, VALUE = 16, 128, 128
LENGTHS = [700, 1, 129, 300]
dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
head_counts = pytest.mark.parametrize("num_heads", (16, 64, 128))


def shape(num_heads: int) -> AttentionShape:
    return AttentionShape(num_q=num_heads, num_kv=1, dim=576, scale=0.1, window=0, value_dim=512)


def randn(*sizes: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


class Pages:
    """Latent rows of some slots on shuffled pages."""

    def __init__(self, dtype: torch.dtype) -> None:
        per_slot = -(-max(LENGTHS) // PAGE)
        order = 1 + torch.randperm(len(LENGTHS) * per_slot, generator=torch.Generator().manual_seed(0))
        self.table = order.view(len(LENGTHS), per_slot).to(CUDA, torch.int32)
        self.cache = randn(1, len(order) + 1, PAGE, 1, 576, seed=1, dtype=dtype)

    def rows(self, where: list[tuple[int, int]]) -> Rows:
        slots, positions = (torch.tensor(column, device=CUDA) for column in zip(*where, strict=True))
        index = self.table[slots, positions // PAGE].long() * PAGE + positions % PAGE
        return Rows(torch.zeros_like(slots), positions, slots, index, self.table)


WHERE = [(1, 0), *((0, p) for p in range(640, 700)), *((2, p) for p in range(120, 129)), (3, 299)]


def batches(rows: int) -> list[list[int]]:
    """Return row numbers of calls: one row, verify windows, chunks, all."""
    single = [[i] for i in (0, 1, 33, 60, 61, 69, rows - 1)]
    return [*single, list(range(57, 61)), list(range(1, 18)), list(range(18, 61)), list(range(50, rows))]


def assert_rows_are_independent(call: Any, rows: int) -> None:
    whole = call(list(range(rows)))
    for batch in batches(rows):
        assert torch.equal(call(batch), whole[batch]), f"{len(batch)} rows from {batch[0]}"


@dtypes
@head_counts
def test_attention_equals_plain_torch_and_rows_are_independent(dtype: torch.dtype, num_heads: int) -> None:
    ops, heads, pages = resolve("triton", CUDA), shape(num_heads), Pages(dtype)
    q = randn(len(WHERE), num_heads * 576, seed=2, dtype=dtype) * 0.3

    def call(at: list[int]) -> Tensor:
        return ops.forward.attention(
            q[at].contiguous(), pages.rows([WHERE[i] for i in at]), heads, pages.cache
        )

    found = call(list(range(len(WHERE))))
    for i in (0, 1, 60, 65, len(WHERE) - 1):
        slot, position = WHERE[i]
        keys = pages.cache[0, pages.table[slot].long()].reshape(-1, 576)[: position + 1].double()
        scores = q[i].view(num_heads, 576).double() @ keys.T * heads.scale
        want = (torch.softmax(scores, -1) @ keys[:, :512]).reshape(-1)
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found[i].double(), want, rtol=tolerance, atol=tolerance)
    assert_rows_are_independent(call, len(WHERE))


@dtypes
@pytest.mark.parametrize(("num_heads", "rank"), [(16, 0), (128, 1536)])
def test_projections_equal_plain_torch_and_rows_are_independent(
    dtype: torch.dtype, num_heads: int, rank: int
) -> None:
    ops, heads, pages = resolve("triton", CUDA), shape(num_heads), Pages(dtype)
    kv_up = randn(num_heads, NOPE + VALUE, 512, seed=3, dtype=dtype) / 16
    attention = LatentAttention(
        heads=heads,
        nope_dim=NOPE,
        qkv=None,
        q_norm=randn(rank, seed=4, dtype=dtype) if rank else None,
        q_up=None,
        latent_norm=randn(512, seed=5, dtype=dtype),
        key_up=ops.forward.pack_heads(kv_up[:, :NOPE].transpose(1, 2)),
        value_up=ops.forward.pack_heads(kv_up[:, NOPE:]),
        out=None,
        rope_pairs=True,
        norm_eps=1e-6,
    )
    angles = torch.arange(720, device=CUDA)[:, None] / 100.0 ** (torch.arange(32, device=CUDA) / 32)
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    x = randn(len(WHERE), attention.q_columns + 576, seed=6, dtype=dtype)
    given = randn(len(WHERE), num_heads * (NOPE + 64), seed=7, dtype=dtype)

    def call(at: list[int]) -> Tensor:
        rows = pages.rows([WHERE[i] for i in at])
        first = ops.forward.latent_store(x[at].contiguous(), rows, attention, rope, pages.cache)
        q = given[at].contiguous() if rank else first
        queries = ops.forward.latent_queries(q, rows, attention, rope)
        latent = queries.view(len(at), num_heads, 576)[..., :512].flatten(1)
        stored = pages.cache.view(-1, 576)[rows.kv_index]
        return torch.cat([first, queries, ops.forward.head_linear(latent, attention.value_up), stored], 1)

    whole = call(list(range(len(WHERE))))
    q = (given if rank else x[:, : attention.q_columns]).view(len(WHERE), num_heads, -1).double()
    want = torch.einsum("rhn,hnl->rhl", q[..., :NOPE], kv_up[:, :NOPE].double())
    queries = whole[:, attention.q_columns :][:, : num_heads * 576].view(len(WHERE), num_heads, 576)
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(queries[..., :512].double(), want, rtol=tolerance, atol=tolerance)
    cos, sin = rope[pages.rows(WHERE).positions].double().chunk(2, -1)
    even, odd = q[..., NOPE::2], q[..., NOPE + 1 :: 2]
    turned = torch.cat(
        [even * cos[:, None] - odd * sin[:, None], odd * cos[:, None] + even * sin[:, None]], -1
    )
    torch.testing.assert_close(queries[..., 512:].double(), turned, rtol=tolerance, atol=tolerance)
    assert_rows_are_independent(call, len(WHERE))


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_bit(arch: str, dtype: str) -> None:
    cases = [Case(i, "none", 0.7 * (i % 2), length=14 + 21 * i) for i in range(6)]
    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 5, "adaptive": False}
    setup = Setup(arch, dtype, "triton", device="cuda")
    for how in ({"overlap": True, "arrivals": [0, 0, 2, 3, 5, 5]}, {"chunk": 16, "overlap": False}):
        assert Batch(cases, setup, spec, **how).differences() == []
