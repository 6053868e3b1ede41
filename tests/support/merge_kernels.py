"""Kernel that calls `merge_rows` alone, for comparison; import `triton_interpreter` before it."""

import triton
import triton.language as tl

from draftproof.ops.triton.attention import merge


@triton.jit
def merge_rows_kernel(parts, stats, out, spans, count, HEADS: tl.constexpr, D: tl.constexpr):
    """Merge the spans of one row by `merge_rows`."""
    merge.merge_rows(parts, stats, None, out, 0, 1, 0, spans, 0, count, 1, HEADS, D, D, HEADS, 4)
