"""Layouts of tensor core operands in attention with quantised KV, compiled for Hopper without a GPU.

    PYTHONPATH=src:tests/support python tests/support/kv_operands.py

Kernels are compiled up to the IR with layouts. Widths of operands are printed by kernel; 4: the compiler
permutes elements, see `convert_elements` of kv_cache.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from draftproof.ops import AttentionShape, KVLayout, Rows
from draftproof.ops.contract.kv_layout import KV_FORMATS
from draftproof.ops.triton.attention import kv_cache
from draftproof.ops.triton.backend import TritonOps
from triton_compile import CAPABILITY, CPU, launch_source, replaced_launches

HEADS = AttentionShape(num_q=4, num_kv=1, dim=128, scale=0.1, window=0)
TABLE_TOKENS = 2048
Widths = dict[str, list[str]]  # by kernel, height of its tile and whether it uses span_loop.py


class LayoutsMade(Exception):
    """IR with layouts, which ends the compilation."""


def end_compilation(self: CUDABackend, module: Any, *given: Any) -> None:
    """Replace the stage after the IR with layouts."""
    raise LayoutsMade(str(module))


def operand_widths(kv_cache_dtype: str, counts: Sequence[int]) -> Widths:
    """Return the widths of the operands of the attention kernels for calls of `counts` rows."""
    found: Widths = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if "attention" not in self.fn.__name__:
            return
        source, options, given = launch_source(self, args, kwargs)
        try:
            triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
        except LayoutsMade as layouts:
            widths = sorted(set(re.findall(r"kWidth = (\d+)", str(layouts))))
            loop = "spans" if given["SPAN_LOOP"] else "blocks"
            found[f"{self.fn.__name__} {given['BM']} {loop}"] = widths

    with replaced_launches(run), mock.patch.object(CUDABackend, "make_llir", end_compilation):
        ops = TritonOps(CPU, pdl=True)
        kv_layout = KVLayout(1, HEADS.num_kv, HEADS.dim, KV_FORMATS[kv_cache_dtype].dtype)
        (cache,) = kv_layout.allocate(8, 16, CPU)
        for count in counts:
            column, table = torch.zeros(count, dtype=torch.int64), torch.zeros((4, TABLE_TOKENS // 16)).int()
            q = torch.empty((count, HEADS.num_q * HEADS.dim), dtype=torch.bfloat16)
            ops.forward.attention(q, Rows(column, column, column, column, table), HEADS, cache)
    return found


def main() -> None:
    """Compile kernels of `splitkv.py` (up to 64 rows) and `prefill.py`, then one with a plain conversion."""
    found = {"int8": operand_widths("int8", (600,)), "fp8": operand_widths("fp8", (64,))}
    with mock.patch.object(kv_cache, "HAS_PTX", tl.constexpr(False)):
        found["int8, plain"] = operand_widths("int8", (64,))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
