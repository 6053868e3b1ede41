"""Shared parts of test_draft_model and the tests that reuse them."""

from __future__ import annotations

from typing import Any

from draftproof.ops.cpu.backend import CpuOps
from draftproof.ops.triton.graphs import bucket_of


class PaddedOps(CpuOps):
    """As on a GPU: few sizes, padded, and what was captured once, on an empty plan, is replayed."""

    asynchronous = True

    def bucket(self, rows: int) -> int:
        return bucket_of(rows)

    def graph(self, function: Any, apart: bool = False) -> Any:
        function()
        return function
