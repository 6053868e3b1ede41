"""Weight formats: stored parts, rows, concatenation, bytes and dequantised values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from draftproof.errors import LoadError
from draftproof.models.weight_formats import (
    FloatWeight,
    Fp8BlockWeight,
    Fp8Weight,
    Int4GroupWeight,
    Int8RowWeight,
    W8A8Weight,
    WeightTensor,
    dequantize_all,
    quantize_linears,
    read_weights,
)
from draftproof.models.weights.low_bit import Mxfp4Weight
from draftproof.ops.torch.backend import TorchOps
from quantized_files import mxfp4_weight

OPS = TorchOps(torch.device("cpu"))
BYTES = torch.zeros((4, 16), dtype=torch.uint8)
# format -> a weight of it made from a float matrix
MADE = {
    "int8": Int8RowWeight.quantize,
    "fp32": FloatWeight,
    "fp8": Fp8Weight.quantize,
    "fp8_block": Fp8BlockWeight.quantize,
    "w4a16": Int4GroupWeight.quantize,
    "mxfp4": mxfp4_weight,
}


def test_int8_weight_reads_back_as_bf16_of_data_times_scale() -> None:
    matrix = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    weight = Int8RowWeight.quantize(matrix)
    stored = {**weight.stored("fc.weight"), "norm.weight": torch.ones(5)}
    found = read_weights(stored)
    assert {name: w.format for name, w in found.items()} == {"fc.weight": "int8", "norm.weight": "fp32"}
    want = (stored["fc.weight"].float() * stored["fc.weight.scale"][:, None]).to(torch.bfloat16)
    assert torch.equal(dequantize_all(found)["fc.weight"], want)
    assert torch.equal(found["fc.weight"].dequantize(torch.float32), want.float())
    assert (want.float() - matrix).abs().max() < 0.03
    assert found["fc.weight"].nbytes == 6 * 5 + 6 * 4


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("rows", [6, 256])
def test_rows_and_cat_keep_the_values_of_each_row(kind: str, rows: int) -> None:
    matrix = torch.randn(rows, 160, generator=torch.Generator().manual_seed(2))
    weight = MADE[kind](matrix)
    ids = torch.tensor([4, 0, 4, rows - 1])
    assert weight.format == kind and weight.shape == (rows, 160)
    assert torch.equal(weight.rows(ids).dequantize(), weight.dequantize()[ids])
    for other in (weight.rows(ids), weight):
        both = type(weight).cat([weight, other])
        assert torch.equal(both.dequantize(), torch.cat([weight.dequantize(), other.dequantize()]))
    assert weight.to(torch.device("cpu")).nbytes == weight.nbytes


def test_fp8_weights_are_the_nearest_e4m3_values() -> None:
    matrix = torch.randn(130, 200, generator=torch.Generator().manual_seed(3))
    matrix[3] = 0
    for weight in (Fp8Weight.quantize(matrix), Fp8BlockWeight.quantize(matrix)):
        error = (weight.dequantize(torch.float32) - matrix).abs()
        largest = matrix.abs().amax(1, keepdim=True) if weight.format == "fp8" else matrix.abs().max()
        assert bool((error <= torch.maximum(matrix.abs() / 16, largest / 448 / 256)).all())
        assert weight.nbytes < matrix.numel() + 4 * len(matrix) + 1
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    with pytest.raises(LoadError, match="not numbers"):
        Fp8Weight.create(values, torch.ones(256))
    one = Fp8Weight.create(values[:120], torch.tensor(0.5))
    assert torch.equal(one.dequantize(), values[:120].to(torch.bfloat16) / 2)


@pytest.mark.parametrize(("depth", "group"), [(256, 128), (192, 64), (96, 32), (50, 50)])
def test_4_bit_groups_round_to_the_nearest_of_16_values(depth: int, group: int) -> None:
    matrix = torch.randn(7, depth, generator=torch.Generator().manual_seed(4))
    weight = Int4GroupWeight.quantize(matrix)
    assert weight.group == group
    scales = weight.scales.float().repeat_interleave(group, 1)  # type: ignore[union-attr]
    assert bool(((weight.dequantize(torch.float32) - matrix).abs() <= scales * 0.55).all())
    zeros = torch.randint(0, 16, weight.scales.shape, dtype=torch.uint8)  # type: ignore[union-attr]
    moved = Int4GroupWeight.create(weight.integers(), weight.scales, zeros)
    want = (weight.integers().float() - zeros.float().repeat_interleave(group, 1)) * scales
    assert torch.equal(moved.dequantize(), want.to(torch.bfloat16))
    assert torch.equal(
        Int4GroupWeight.cat([weight, moved]).dequantize(),
        torch.cat([weight.dequantize(), moved.dequantize()]),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fp8Weight.create(torch.ones(4, 4), torch.ones(4)), "e4m3 matrix"),
        (
            lambda: Fp8Weight.create(torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(3)),
            "scales of shape",
        ),
        (
            lambda: Fp8BlockWeight.create(torch.ones(4, 129).to(torch.float8_e4m3fn), torch.ones(1, 1)),
            "shape",
        ),
        (lambda: Int4GroupWeight.create(torch.ones(2, 96), torch.ones(2, 2)), "groups of 128, 64, 32"),
        (lambda: Int4GroupWeight.create(torch.ones(2, 64), torch.full((2, 1), torch.nan)), "not finite"),
        (lambda: Int4GroupWeight.create(torch.ones(2, 64) * 16, torch.ones(2, 1)), "outside of 0 to 15"),
        (
            lambda: Int4GroupWeight.create(torch.ones(2, 64), torch.ones(2, 1), torch.ones(1, 1)),
            "zero points",
        ),
        (lambda: Mxfp4Weight.create(BYTES, BYTES[:, :2]), r"\[4, 2\] for a matrix of \[4, 32\]"),
        (lambda: Mxfp4Weight.create(BYTES, BYTES[:3, :1]), r"\[3, 1\] for a matrix of \[4, 32\]"),
        (lambda: Mxfp4Weight.create(BYTES[:, :8], BYTES[:, :1]), r"rows of 16 are not whole groups of 32"),
        (lambda: Mxfp4Weight.create(BYTES.float(), BYTES[:, :1]), "blocks: a uint8 matrix"),
        (lambda: Mxfp4Weight.create(BYTES, BYTES[:, :1] + 253), "not finite"),
    ],
)
def test_malformed_weight_is_refused(make: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        make()


def test_int8_weight_without_a_scale_per_row_is_refused() -> None:
    stored = Int8RowWeight.quantize(torch.ones(3, 2)).stored("fc.weight")
    for scale in (None, torch.ones(2)):
        broken = {"fc.weight": stored["fc.weight"]} | ({} if scale is None else {"fc.weight.scale": scale})
        with pytest.raises(LoadError, match=r"fc\.weight\.scale does not hold one scale per row"):
            read_weights(broken)


def test_linears_are_quantized_in_place_and_other_weights_stay_floats() -> None:
    made = tiny.checkpoint("llama", "float32")
    before = dict(made.weights)
    quantize_linears(made.weights, "none", OPS)
    assert made.weights == before
    quantize_linears(made.weights, "int8", OPS)
    kinds = {name: type(weight) for name, weight in made.weights.items()}
    assert kinds["model.embed_tokens.weight"] is FloatWeight and kinds["model.norm.weight"] is FloatWeight
    linears = [name for name, kind in kinds.items() if kind is W8A8Weight]
    assert len(linears) == 7 * made.config.num_layers
    for name in linears:
        exact, rough = before[name].dequantize(), made.weights[name].dequantize(torch.float32)
        assert (exact - rough).abs().max() <= exact.abs().max() / 100
        assert made.weights[name].nbytes < before[name].nbytes / 3


def test_weight_that_is_not_finite_is_refused_with_its_name() -> None:
    weights: dict[str, WeightTensor] = {"a.q_proj.weight": FloatWeight(torch.tensor([[1.0, torch.inf]]))}
    with pytest.raises(LoadError, match=r"a\.q_proj\.weight .*not finite"):
        quantize_linears(weights, "int8", OPS)
