"""Helpers for tests of the CPU backend: kinds of kernels, random tensors, comparisons."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
    ops.executor.pool._scratch.fill(0xFF)
    ops.forward._workspace.fill_(float("nan"))
