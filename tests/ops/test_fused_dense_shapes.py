"""Shapes of layers that the kernel for one row of a dense model supports; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from draftproof.ops import Attention, AttentionShape, Layer, Mlp

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


def make_layer(dtype: torch.dtype = torch.bfloat16) -> Layer:
    """Return a layer of the Llama-8B shape without memory."""
    from draftproof.ops.triton.gemm.weight import PackedLinear

    def packed(columns: int, depth: int) -> PackedLinear:
        return PackedLinear(torch.empty((columns, depth), dtype=dtype, device="meta"), None)

    norm = torch.empty(4096, dtype=dtype, device="meta")
    attention = Attention(AttentionShape(32, 8, 128, 0.1, 0), packed(6144, 4096), packed(4096, 4096))
    return Layer(norm, attention, norm, Mlp(packed(28672, 4096), packed(4096, 14336)))


def changed_layers() -> dict[str, Layer]:
    """Return layers that the kernel must refuse, each by what is changed."""
    layer = make_layer()
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, Attention) and isinstance(mlp, Mlp)
    bias, head_norm = torch.empty(4096), torch.empty(128)

    def with_attention(**changes: Any) -> Layer:
        return replace(layer, attention=replace(attention, **changes))

    def with_mlp(**changes: Any) -> Layer:
        return replace(layer, mlp=replace(mlp, **changes))

    return {
        "fp32": make_layer(torch.float32),
        "bias of the output": with_attention(out=replace(attention.out, bias=bias)),
        "bias of down": with_mlp(down=replace(mlp.down, bias=bias)),
        "bias of gate and up": with_mlp(gate_up=replace(mlp.gate_up, bias=bias)),
        "quantised weight": with_mlp(down=replace(mlp.down, format="w8a8")),
        "sinks": with_attention(sinks=torch.empty(32)),
        "norm of all heads": with_attention(q_row_norm=layer.attention_norm),
        "fp32 norm of heads": with_attention(q_norm=head_norm),
        "fp32 norm": replace(layer, mlp_norm=torch.empty(4096)),
        "one output norm": replace(layer, mlp_output_norm=layer.mlp_norm),
        "no norm": replace(layer, attention_norm=None),
        "token norm": replace(layer, token_norm=layer.mlp_norm),
        "normed residual": replace(layer, residual_is_normed=True),
        "residual scale": replace(layer, residual_scale=0.5),
        "activation": with_mlp(activation="swiglu_oai"),
        "other sizes": with_mlp(down=replace(mlp.down, depth=7168)),
    }


def test_supported_layer() -> None:
    from draftproof.ops.triton.fused_dense.launcher import shape_of

    shape = shape_of(make_layer())
    assert shape is not None and (shape.hidden, shape.inner, shape.width) == (4096, 14336, 4096)


@pytest.mark.parametrize("name", changed_layers() if find_spec("triton") else ())
def test_other_layers_are_not_supported(name: str) -> None:
    from draftproof.ops.triton.fused_dense.launcher import shape_of

    assert shape_of(changed_layers()[name]) is None
