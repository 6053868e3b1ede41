"""The cuBLAS control of bench/gpu.py computes every product with cuBLAS, and reports where it does not."""

from __future__ import annotations

from importlib.util import find_spec
from inspect import unwrap
from typing import Any

import pytest
import torch
from common.gpu_exactness import Products, use_cublas

import tiny
from draftproof.engine.step.warmup import WarmUp

SHAPE = {
    "architecture": "LlamaForCausalLM",
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}
SIZES = (1, 8, 64, 600)  # rows; the fused kernel takes the first three

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs triton, no GPU"
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an engine on a simulated GPU."""
    from draftproof.ops.triton.gemm.cublas import Cublas
    from no_gpu import simulate_gpu

    simulate_gpu(monkeypatch)
    monkeypatch.setattr(Cublas, "multiply", lambda *_: None)
    monkeypatch.setitem(tiny.ARCHITECTURES, "wide", SHAPE)
    return tiny.engine("wide", "bfloat16", backend="triton", debug=False)


def watch_products(engine: Any) -> Any:
    """Count the products of forward passes and their logits."""
    with torch.inference_mode(), Products(engine.ops).watched() as products:
        for size in SIZES:
            unwrap(WarmUp.run_forward)(WarmUp(engine.loop.device), size)  # without the limit of conftest.py
    return products


def test_every_product_uses_cublas(engine: Any) -> None:
    use_cublas(engine)
    products = watch_products(engine)
    assert products.others == 0
    assert products.rows == {size: 4 * len(engine.runner.model.layers) + 1 for size in SIZES}
    assert not vars(engine.ops).keys() & {"blocks", "linear"}, "still watched"


def test_control_kernel_in_place_of_cublas_is_reported(engine: Any) -> None:
    use_cublas(engine)
    engine.ops.forward.one_launch = True
    products = watch_products(engine)
    assert products.others == 3 * 4 * len(engine.runner.model.layers)
    engine.ops.forward.one_launch, engine.ops.forward.cublas.mode = False, "never"
    assert watch_products(engine).others > products.others
