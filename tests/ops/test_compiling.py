"""Parallel compilation of kernels before a start; no GPU is needed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs triton, and no GPU"
)


class Driver:
    """Triton driver of a GPU that does not exist."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def norms(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the module of the RMS norm and a function that returns its compiled kernels."""
    from triton.runtime import driver

    from draftproof.ops.triton import elementwise

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = elementwise.rms_norm_kernel
    driver.set_active(Driver())
    kernel.device_caches.clear()
    try:
        yield elementwise, lambda: [k.metadata.name for k in kernel.device_caches[0][0].values()]
    finally:
        kernel.device_caches.clear()
        driver._active = None


def norm(elementwise: Any, width: int) -> torch.Tensor:
    return elementwise.rms_norm(torch.ones((4, width)), torch.ones(width), 1e-5, False)


def test_kernels_are_compiled_and_not_run(norms: Any) -> None:
    from triton.runtime.jit import JITFunction

    from draftproof.ops.triton.compile_ahead import compile_ahead, is_compiling

    elementwise, known = norms
    launch, ticks, found = JITFunction.run, [], []

    def both() -> None:
        assert is_compiling()
        found.extend(norm(elementwise, width) for width in (32, 64, 32))

    compile_ahead([both, both], lambda *of: ticks.append(of))
    assert known() == ["rms_norm_kernel"] * 2
    assert all(not out.any() for out in found)  # zeros are valid indices
    assert ticks[-1] == (2, 2)
    assert JITFunction.run is launch and not is_compiling()


@pytest.mark.parametrize("serial", [True, False])
def test_kernels_are_parsed_one_at_a_time(norms: Any, serial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check serial parsing; without it, as a control, threads parse at the same time."""
    from triton.runtime.jit import JITCallable

    from draftproof.ops.triton import compile_ahead

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    if not serial:
        monkeypatch.setattr(compile_ahead, "_serial_parsing", nullcontext)
    guard, inside, most, whole = threading.Lock(), [], [], JITCallable.parse

    def slow(self: Any) -> Any:
        with guard:
            inside.append(self)
            most.append(len(inside))
        time.sleep(0.1)
        try:
            with guard:  # parsing itself at the same time sometimes fails
                return whole(self)
        finally:
            inside.remove(self)

    monkeypatch.setattr(JITCallable, "parse", slow)
    elementwise, known = norms
    compile_ahead.compile_ahead([lambda: [norm(elementwise, 32 << i) for i in range(4)]], lambda *of: None)
    assert len(known()) == 4 and (max(most) == 1) is serial
    assert JITCallable.parse is slow


def test_launches_of_other_threads_run_during_compilation(
    norms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    from draftproof.ops.triton.compile_ahead import compile_ahead

    elementwise, _ = norms
    launched: list[bool] = []
    whole = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launched.append(warmup)
        return whole(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", run)

    def meanwhile() -> None:
        thread = threading.Thread(target=norm, args=(elementwise, 128))
        thread.start()
        thread.join()

    compile_ahead([meanwhile], lambda *_: None)
    assert launched == [False]


def test_function_that_raises_restores_launches(norms: Any) -> None:
    from triton.runtime.jit import JITFunction

    from draftproof.ops.triton.compile_ahead import compile_ahead, is_compiling

    launch = JITFunction.run
    with pytest.raises(ZeroDivisionError):
        compile_ahead([lambda: 1 // 0], lambda *_: None)
    assert JITFunction.run is launch and not is_compiling()
    compile_ahead([], lambda *_: None)  # no lock is held


def test_cublas_is_not_checked_during_compilation() -> None:
    from draftproof.ops.triton import compile_ahead
    from draftproof.ops.triton.gemm.cublas import Cublas
    from draftproof.ops.triton.gemm.weight import PackedLinear

    cublas = Cublas(lambda *_: None)  # type: ignore[arg-type]
    packed = PackedLinear(torch.zeros((64, 64), dtype=torch.bfloat16), None)
    compile_ahead._thread_state.compiling = True
    try:
        assert cublas.call_kind(packed, 512, torch.bfloat16) == ""
        assert not cublas.is_second_faster("x", lambda: None, lambda: None, False)
    finally:
        compile_ahead._thread_state.compiling = False
    assert not cublas.proven and not cublas.faster


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cublas_uses_the_first_call_with_equal_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftproof.ops.triton.gemm.cublas import MIN_HALVES_ROWS, Cublas
    from draftproof.ops.triton.gemm.weight import PackedLinear

    def gemm(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
        out.copy_(x.float() @ packed.weight.float().t())

    def multiply(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, kind: str, equal: tuple[str, ...]
    ) -> None:
        out.copy_(x.float() @ weight.float().t() + (0 if kind in equal else 1))

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    packed = PackedLinear(torch.randn(32, 16).bfloat16(), None)
    wide = "halves" if dtype == torch.float32 else "bias"
    cases = [
        (("plain", "halves", "bias"), "plain", "plain"),
        (("halves", "bias"), "bias", wide),
        ((), "", ""),
    ]
    for equal, few, many in cases:
        cublas = Cublas(gemm)  # type: ignore[arg-type]
        monkeypatch.setattr(cublas, "multiply", partial(multiply, equal=equal))
        assert cublas.call_kind(packed, 4, dtype) == few
        assert cublas.call_kind(packed, MIN_HALVES_ROWS, dtype) == many


def test_all_kinds_of_cublas_calls_are_the_product() -> None:
    from draftproof.ops.triton.gemm.cublas import FP32_CALL_KINDS, Cublas

    x, weight = torch.randn(6, 16), torch.randn(8, 16)
    for kind in FP32_CALL_KINDS:
        out = torch.full((6, 8), torch.nan)
        Cublas(lambda *_: None).multiply(x, weight, out, kind)  # type: ignore[arg-type]
        torch.testing.assert_close(out, x @ weight.t())


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle3", "hybrid", "draft_model"])
@torch.inference_mode()
def test_start_without_running_kernels_reads_valid_indices(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call everything that is captured, with the sizes of a GPU; torch ops run on zeros.

    On the CPU an index out of range raises; on a GPU it would end the process.
    """
    import heads
    import tiny
    from no_gpu import simulate_gpu

    kernels, gone_through = simulate_gpu(monkeypatch)
    speculative = {"method": method, "num_speculative_tokens": 4}
    speculative |= heads.options(method, "llama", "bfloat16")
    options = {"warm_up": True, "max_num_batched_tokens": 2048, "backend": "triton", "debug": False}
    engine = tiny.engine("llama", "bfloat16", speculative, **options)
    assert len(gone_through) > 40 and len(set(kernels)) > 15
    engine.ops.runtime.compile(list(gone_through), lambda *_: None)  # again, because a start ignores failures
    assert engine.loop.device.drafting.failure is None and engine.loop.device.drafting.proposer is not None
