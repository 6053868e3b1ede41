"""Shapes of layers that the kernel for one row of a dense model supports; no GPU is needed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

LLAMA_8B = {"hidden": 4096, "inner": 14336, "num_q": 32, "num_kv": 8, "dim": 128}
SUPPORTED: dict[str, dict[str, int]] = {
    "llama-3-8b": {},
    "qwen3-8b": {"inner": 12288},
    "gemma-3-4b": {"hidden": 2560, "inner": 10240, "num_q": 8, "num_kv": 4, "dim": 256},
    "gemma-3-12b": {"hidden": 3840, "inner": 15360, "num_q": 16, "num_kv": 8, "dim": 256},
    "qwen2.5-7b": {"hidden": 3584, "inner": 18944, "num_q": 28, "num_kv": 4},
    "qwen3-4b": {"hidden": 2560, "inner": 9728},
    "llama-3.2-3b": {"hidden": 3072, "inner": 8192, "num_q": 24},
}


def make_shape(**changes: Any) -> Any:
    from draftproof.ops.triton.fused_dense.launcher import Shape

    parts = {"has_bias": False, "has_q_norm": False, "has_k_norm": False, "has_output_norm": False}
    return Shape(**{**LLAMA_8B, **parts, "activation": "silu", "scale": 0.1, **changes})


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_shapes(name: str) -> None:
    from draftproof.ops.triton.fused_dense.launcher import fits
    from draftproof.ops.triton.fused_dense.pool import UNIT
    from draftproof.ops.triton.one_row.launcher import PROGRAMS

    shape = make_shape(**SUPPORTED[name])
    assert fits(shape) and shape.inner % UNIT.value == 0
    pooled = shape.inner // UNIT.value - PROGRAMS * shape.num_own_units
    assert PROGRAMS // 2 <= pooled <= 2 * PROGRAMS  # units that programs claim


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 64},
        {"num_kv": 5},
        {"num_q": 32, "num_kv": 2},  # more queries of a KV head than the tensor core has columns
        {"num_q": 64},  # more columns of q, k and v than half a stage has rows
        {"hidden": 1024},  # `fused/` runs these
        {"hidden": 5120},
        {"hidden": 2880},
        {"inner": 14300},
        {"inner": 53248},  # more shared memory than a program has
    ],
)
def test_other_shapes_are_not_supported(changes: dict[str, int]) -> None:
    from draftproof.ops.triton.fused_dense.launcher import fits

    assert not fits(make_shape(**changes))
