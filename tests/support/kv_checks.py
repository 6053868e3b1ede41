"""Checks of quantised KV formats that every backend must pass."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from draftproof.ops import Attention, AttentionShape, Ops, resolve
from draftproof.ops.contract.kv_layout import KV_FORMATS, kv_format, split_page_bytes
from draftproof.ops.reference.kv import quantize_row
from opcheck import CPU, Paged, assert_close, bits

KV_DTYPES = list({form.dtype: None for form in KV_FORMATS.values()})
REFERENCE = resolve("reference", CPU)
HEADS = {
    "smollm2": AttentionShape(num_q=9, num_kv=3, dim=64, scale=0.125, window=0),
    "odd": AttentionShape(num_q=4, num_kv=2, dim=24, scale=0.2, window=9),
    "qwen3": AttentionShape(num_q=4, num_kv=1, dim=128, scale=0.09, window=0),
}
LENGTHS = [1, 5, 33, 200, 64, 65]


def rope(heads: AttentionShape, length: int = 200) -> Tensor:
    angles = torch.arange(length)[:, None] / 10.0 ** torch.arange(heads.dim // 2)[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def special_rows(dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows of zeros, tiny and huge values, one large value, ties of the rounding, and of no number."""
    rows = [torch.zeros(dim), torch.full((dim,), -1e-44), torch.full((dim,), -1e38), torch.zeros(dim)]
    rows[3][-1] = -7.25
    rows.append(torch.arange(dim) % 127 + 0.5)
    rows[-1][0] = 127
    rows.append(torch.linspace(-448, 448, dim))
    rows += [torch.randn(dim) * 10.0 ** -(torch.arange(dim) % 6)]
    for bad in (torch.nan, torch.inf, -torch.inf):
        rows.append(torch.randn(dim))
        rows[-1][dim // 2] = bad
    return torch.stack(rows).to(dtype)


def store(ops: Ops, values: Tensor, heads: AttentionShape, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Store rows [R, dim] as V of every head; return the elements and scales of V by row."""
    paged = Paged(heads, [len(values)], kv_dtype)
    qkv = values.repeat(1, heads.num_q + 2 * heads.num_kv)
    qkv[:, : (heads.num_q + heads.num_kv) * heads.dim] = 0
    rows = paged.rows([(0, i) for i in range(len(values))])
    ops.forward.rope_store(qkv, rows, Attention(heads, None, None), rope(heads), paged.cache, 1e-6)
    elements, scales = split_page_bytes(paged.cache)
    elements = elements.view(torch.int8)[1].flatten(0, 1)[rows.kv_index]
    return elements, scales[1].transpose(1, 2).flatten(0, 1)[rows.kv_index]


def check_stored_bytes(ops: Ops, kv_dtype: torch.dtype, dtype: torch.dtype, heads: AttentionShape) -> None:
    """Compare elements and scales bit by bit, for zeros, subnormals, ties, infinities and NaN too."""
    values, form = special_rows(heads.dim, dtype), kv_format(kv_dtype)
    assert form is not None
    elements, scales = store(ops, values, heads, kv_dtype)
    for row, found, scale in zip(values, elements, scales, strict=True):
        want, want_scale = quantize_row(row, form)
        for head in range(heads.num_kv):
            assert torch.equal(found[head], want.view(torch.int8))
            assert torch.equal(scale[head].isnan(), want_scale.isnan())
            assert scale[head].isnan() or bits(scale[head]) == bits(want_scale)


def check_attention(ops: Ops, kv_dtype: torch.dtype, dtype: torch.dtype, heads: AttentionShape) -> None:
    """Use ragged slots, pages out of order, and scales of NaN at every position that no row may read."""
    paged = Paged(heads, LENGTHS, kv_dtype)
    for where in (
        [(s, n - 1) for s, n in enumerate(LENGTHS)],
        [(5, 64), (1, 4), *((3, p) for p in range(122, 132)), (0, 0)],
    ):
        q = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype)
        got = ops.forward.attention(q, paged.rows(where), heads, paged.cache)
        assert_close(got, REFERENCE.forward.attention(q, paged.rows(where), heads, paged.cache), dtype)


def check_rows_are_independent(
    ops: Ops, kv_dtype: torch.dtype, dtype: torch.dtype, heads: AttentionShape, length: int
) -> None:
    """Store and attend in one chunk, in smaller ones, and the last rows one by one: the same bits.

    All rows are compared: outputs are rounded to `dtype`, so few elements show another order of a sum.
    """
    width, tail = (heads.num_q + 2 * heads.num_kv) * heads.dim, 5
    qkv = randn(length, width, dtype=dtype, seed=3)
    attention, table = Attention(heads, None, None), rope(heads, length + 1)
    found = []
    for starts in ([0], range(0, length, 33), [0, *range(length - tail, length)]):
        paged, outputs = Paged(heads, [length], kv_dtype), []
        for start, end in pairwise([*starts, length]):
            rows = paged.rows([(0, p) for p in range(start, end)])
            q = ops.forward.rope_store(qkv[start:end], rows, attention, table, paged.cache, 1e-6)
            outputs.append(ops.forward.attention(q, rows, heads, paged.cache))
        found.append((bits(torch.cat(outputs)), bits(paged.cache[:, 1:])))
    assert all(one == found[0] for one in found[1:])
