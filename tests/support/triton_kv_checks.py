"""Checks under Triton's interpreter: quantised KV formats, and ops that only some families use."""

from __future__ import annotations

import sys
from unittest import mock

import torch

from draftproof.ops import AttentionShape
from family_checks import check_activations, check_sinks, check_sums_and_norms
from kv_checks import HEADS, KV_DTYPES, check_attention, check_rows_are_independent, check_stored_bytes
from triton_checks import CHECKS, DTYPES, attention_kernels, check, ops, run_checks

SMALL = AttentionShape(num_q=2, num_kv=1, dim=16, scale=0.25, window=0)


@check
def stored_bytes_are_those_of_the_definition() -> None:
    for kv_dtype in KV_DTYPES:
        for dtype in DTYPES:
            for heads in HEADS.values():
                check_stored_bytes(ops, kv_dtype, dtype, heads)


@check
def attention_equals_reference() -> None:
    """Compare with the reference; once more with tiles that loop over their spans."""
    for kv_dtype in KV_DTYPES:
        check_attention(ops, kv_dtype, torch.float32, HEADS["smollm2"])
        check_attention(ops, kv_dtype, torch.bfloat16, HEADS["odd"])
        with mock.patch.object(attention_kernels, "MAX_SPLIT_PROGRAMS", 1):
            check_attention(ops, kv_dtype, torch.bfloat16, HEADS["qwen3"])


@check
def rows_do_not_depend_on_others() -> None:
    for kv_dtype in KV_DTYPES:
        check_rows_are_independent(ops, kv_dtype, torch.bfloat16, SMALL, length=40)


@check
def ops_of_families_equal_reference() -> None:
    """Compare with the reference; attention also with tiles that loop over their spans."""
    for dtype in DTYPES:
        check_activations(ops, dtype)
        check_sums_and_norms(ops, dtype)
    check_sinks(ops, torch.float32)
    with mock.patch.object(attention_kernels, "MAX_SPLIT_PROGRAMS", 1):
        check_sinks(ops, torch.bfloat16)


def main(only: list[str]) -> None:
    """Run the checks of this file."""
    run_checks(CHECKS[__name__], only)


if __name__ == "__main__":
    main(sys.argv[1:])
