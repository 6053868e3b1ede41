"""Weight formats: stored parts, rows, concatenation, bytes and dequantised values."""

from __future__ import annotations

import pytest
import torch

import tiny
from draftproof.errors import LoadError
from draftproof.models.weight_formats import (
    FloatWeight,
    Int8RowWeight,
    W8A8Weight,
    WeightTensor,
    dequantize_all,
    quantize_linears,
    read_weights,
)


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


@pytest.mark.parametrize("kind", ["int8", "fp32"])
def test_rows_and_cat_keep_the_values_of_each_row(kind: str) -> None:
    matrix = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    weight = Int8RowWeight.quantize(matrix) if kind == "int8" else FloatWeight(matrix)
    ids = torch.tensor([4, 0, 4])
    assert weight.format == kind and weight.shape == (6, 5)
    assert torch.equal(weight.rows(ids).dequantize(), weight.dequantize()[ids])
    both = type(weight).cat([weight, weight.rows(ids)])
    assert torch.equal(both.dequantize(), torch.cat([weight.dequantize(), weight.dequantize()[ids]]))


def test_int8_weight_without_a_scale_per_row_is_refused() -> None:
    stored = Int8RowWeight.quantize(torch.ones(3, 2)).stored("fc.weight")
    for scale in (None, torch.ones(2)):
        broken = {"fc.weight": stored["fc.weight"]} | ({} if scale is None else {"fc.weight.scale": scale})
        with pytest.raises(LoadError, match=r"fc\.weight\.scale does not hold one scale per row"):
            read_weights(broken)


def test_linears_are_quantized_in_place_and_other_weights_stay_floats() -> None:
    made = tiny.checkpoint("llama", "float32")
    before = dict(made.weights)
    quantize_linears(made.weights, "none")
    assert made.weights == before
    quantize_linears(made.weights, "int8")
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
        quantize_linears(weights, "int8")
