"""Helpers for tests of the CPU backend: kinds of kernels, random tensors, paged caches."""

from __future__ import annotations

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


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Assert that a result is within a few roundings of the float64 result."""
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(ours.double(), exact.double(), rtol=tolerance, atol=tolerance)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def poison(ops: CpuOps) -> None:
    """Fill all memory that kernels use between calls with NaN."""
    ops.executor.team._scratch.fill(0xFF)
    ops.forward._workspace.fill_(float("nan"))


class Paged:
    """Paged cache of requests with shuffled pages; unused positions hold NaN."""

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
