"""Quantised weights on a GPU: bits of a row at every number of rows, fused producers and epilogues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.models.weight_formats import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4GroupWeight,
    W8A8Weight,
    WeightTensor,
)
from draftproof.ops import Attention, AttentionShape, Rows, resolve
from draftproof.ops.torch.backend import TorchOps
from draftproof.ops.triton.gemm import select
from draftproof.ops.triton.gemm.tiles import QUANTIZED_TILES
from exact import Batch, Case, Setup
from quantized_files import int4_weight_with_zeros, mxfp4_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

ROW_COUNTS = (1, 2, 9, 16, 17, 33, 64, 65, 128, 129, 256, 300, 512, 513, 1100)
SHAPES = ((6144, 4096), (512, 14336), (960, 576))  # (N, K)
HEADS = AttentionShape(num_q=4, num_kv=2, dim=64, scale=0.125, window=0)


MAKERS: dict[str, Callable[[Tensor], WeightTensor]] = {
    "w8a8": W8A8Weight.quantize,
    "fp8": Fp8Weight.quantize,
    "fp8_block": Fp8BlockWeight.quantize,
    "w4a16": Int4GroupWeight.quantize,
    "w4a16_zeros": int4_weight_with_zeros,
    "w4a16_32": partial(Int4GroupWeight.quantize, group=32),
    "mxfp4": mxfp4_weight,
}


def pack_stored(ops: Any, weight: WeightTensor) -> Any:
    """Pack a weight in its own format."""
    return ops.forward.pack_quantized(weight.format, weight.data, weight.scales, None, weight.zeros)


formats = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    yield resolve("triton", torch.device("cuda"))


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_has_the_same_bits_at_every_number_of_rows(ops: Any, name: str, shape: tuple[int, int]) -> None:
    packed = pack_stored(ops, MAKERS[name](randn(*shape, seed=1, dtype=torch.float32) / 16))
    x = (
        randn(max(ROW_COUNTS), shape[1], seed=2)
        * torch.logspace(-2, 2, max(ROW_COUNTS), device="cuda")[:, None]
    )
    x = x.to(torch.bfloat16)
    whole = ops.forward.linear(x, packed, torch.float32)
    for count in ROW_COUNTS:
        for first in (0, len(x) - count):
            got = ops.forward.linear(x[first : first + count].contiguous(), packed, torch.float32)
            assert torch.equal(got, whole[first : first + count]), (count, first)


@formats
def test_tile_changes_no_bit(ops: Any, name: str) -> None:
    packed = pack_stored(ops, MAKERS[name](randn(640, 4096, seed=1, dtype=torch.float32) / 16))
    x, found = randn(40, 4096, seed=2), []
    rows = select.prepare_rows(x, packed, False)
    for tile in {tile for tiles in QUANTIZED_TILES[packed.format].values() for tile in tiles}:
        for pdl in (False, True):
            out = torch.empty((40, 640), device="cuda")
            select.quantized.linear(rows, packed, out, pdl, tile)
            found.append(out)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("depth", [4096, 14336, 592])
def test_row_quantised_by_the_gemm_has_the_bits_of_separate_kernels(ops: Any, depth: int) -> None:
    packed = pack_stored(ops, W8A8Weight.quantize(randn(640, depth, seed=1, dtype=torch.float32) / 16))
    row = randn(1, depth, seed=2).to(torch.bfloat16)
    row[0, -1] = -9.0
    for tile in QUANTIZED_TILES["w8a8"][1]:
        for pdl in (False, True):
            found = []
            for given in (row, select.prepare_rows(row, packed, False)):
                out = torch.empty((1, 640), device="cuda")
                select.quantized.linear(given, packed, out, pdl, tile)
                found.append(out)
            assert torch.equal(*found), (tile, pdl)


@formats
@pytest.mark.parametrize("shape", ((96, 576), (64, 4096)), ids=str)
def test_linear_is_close_to_torch_and_w8a8_has_its_bits(ops: Any, name: str, shape: tuple[int, int]) -> None:
    weight = MAKERS[name](randn(*shape, seed=1, dtype=torch.float32) / 16)
    x, exact = randn(70, shape[1], seed=2), TorchOps(torch.device("cuda"))
    got, want = (o.forward.linear(x, pack_stored(o, weight), torch.float32) for o in (ops, exact))
    # the tensor core keeps 14 bits or more of a sum of e4m3 products
    assert bool(((got - want).abs() <= 2e-3 * want.abs() + 2e-3 * want.abs().mean()).all())
    if name == "w8a8":
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["w4a16", "w4a16_zeros", "w4a16_32", "mxfp4"])
def test_4_bit_weight_has_the_bits_of_the_bf16_gemm(ops: Any, name: str) -> None:
    for shape in SHAPES:
        weight = MAKERS[name](randn(*shape, seed=1, dtype=torch.float32) / 16)
        dense = ops.forward.pack_linear(weight.dequantize(torch.bfloat16))
        for count in (1, 40, 200, 600):
            x = randn(count, shape[1], seed=count)
            got, want = (ops.forward.linear(x, p, torch.float32) for p in (pack_stored(ops, weight), dense))
            assert torch.equal(got, want), (shape, count)


@formats
@pytest.mark.parametrize("count", [1, 40, 300, 700])
def test_fused_norm_and_epilogues_have_the_bits_of_separate_ops(ops: Any, name: str, count: int) -> None:
    packed = pack_stored(ops, MAKERS[name](randn(512, 576, seed=1, dtype=torch.float32) / 16))
    x, residual, norm = randn(count, 576, seed=2), randn(count, 576, seed=3), randn(576, seed=4)
    normed, total = ops.forward.add_rms_norm(x, residual, norm, 1e-5)
    rows, same = ops.forward.add_rms_norm_input(x, residual, norm, 1e-5, packed)
    plain = ops.forward.linear(normed, packed)
    assert torch.equal(total, same) and torch.equal(ops.forward.linear(rows, packed), plain)
    assert torch.equal(
        ops.forward.linear(ops.forward.rms_norm_input(x, norm, 1e-5, packed), packed),
        ops.forward.linear(ops.forward.rms_norm(x, norm, 1e-5), packed),
    )
    assert torch.equal(ops.forward.linear_act_mul(rows, packed), ops.forward.act_mul(plain))
    line = torch.arange(count, device="cuda")
    table = torch.arange(1024, device="cuda", dtype=torch.int32)[None].contiguous()
    these = Rows(line, line, torch.zeros_like(line), line, table)
    caches = [torch.zeros((2, 1024, 1, 2, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    attention, rope = Attention(HEADS, packed, None), randn(1024, 64, seed=6, dtype=torch.float32)
    got = ops.forward.linear_rope_store(rows, these, attention, rope, caches[0], 1e-5)
    assert torch.equal(got, ops.forward.rope_store(plain, these, attention, rope, caches[1], 1e-5))
    assert torch.equal(*caches)


def test_e4m3_rounding_of_the_kernel_is_that_of_torch(ops: Any) -> None:
    packed = pack_stored(ops, Fp8Weight.quantize(randn(64, 65536, seed=1, dtype=torch.float32)))
    bits = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(bits.isfinite() & (bits.abs() <= 448), bits, 0).repeat(2, 1)
    x[:, 0] = 448  # so that the scale is 1
    rows = select.prepare_rows(x, packed, False)
    assert torch.equal(rows.values.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_activation_scale_of_a_batch_is_detected(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 5, "adaptive": False}
    setup = Setup("llama", "bfloat16", "triton", device="cuda", quantization=quantization)
    cases = [Case(i, "none", 0.7, length=20 + i) for i in range(3)]
    assert Batch(cases, setup, spec).differences() == []
    prepare = select.prepare_rows

    def batch_scale(x: Any, packed: Any, pdl: bool, tile: Any) -> Any:
        if isinstance(x, Tensor):
            step = x.abs().max() / 64
            x = ((x / step).round() * step).to(x.dtype)
        return prepare(x, packed, pdl, tile)

    monkeypatch.setattr(select, "prepare_rows", batch_scale)
    assert Batch(cases, setup, spec).differences(fresh=True)
