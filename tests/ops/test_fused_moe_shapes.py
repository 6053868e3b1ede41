"""Shapes of layers that the kernel for one row of a mixture of experts supports; no GPU is needed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

QWEN3_30B_A3B = {"hidden": 2048, "num_experts": 128, "top_k": 8, "inner": 768, "num_q": 32, "num_kv": 4}


def is_supported(**changes: Any) -> bool:
    from draftproof.ops.triton.fused_moe.launcher import Shape, fits

    norms = {"has_q_norm": True, "has_k_norm": True, "normalizes": True, "scale": 0.1, "route_scale": 1.0}
    return fits(Shape(**{**QWEN3_30B_A3B, "dim": 128, **norms, **changes}))


def test_supported_shapes() -> None:
    assert is_supported() and is_supported(num_experts=64, inner=512, num_q=16, num_kv=16)
    assert is_supported(hidden=4096, top_k=4, inner=1536)
    assert is_supported(hidden=1024, num_experts=32, top_k=16, inner=256, num_q=8, num_kv=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 64},
        {"num_q": 24},  # the kernel divides the row into powers of two
        {"num_q": 32, "num_kv": 5},
        {"num_q": 32, "num_kv": 1},  # the queries, the key and the value of a KV head have 16 rows
        {"hidden": 2880},
        {"num_experts": 60},
        {"top_k": 6},
        {"inner": 700},
        {"inner": 1536},  # more columns of gate than half a stage has rows
    ],
)
def test_other_shapes_are_not_supported(changes: dict[str, int]) -> None:
    assert not is_supported(**changes)
