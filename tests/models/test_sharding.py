"""Cuts of a model between ranks: places, parts of every weight format, and what is refused."""

from dataclasses import replace

import pytest
import torch

import tiny
from draftproof.errors import ConfigError
from draftproof.models.weight_formats import QUANTIZERS, FloatWeight, Fp8BlockWeight
from draftproof.models.weights.cuts import WeightCuts
from draftproof.models.weights.sharding import Sharding, head_bounds, possible_sizes
from draftproof.ops.parallel.forward import pairwise_sum

SHAPES = [(1, 1), (4, 2), (4, 1), (9, 3), (14, 2), (15, 5), (12, 12), (24, 3), (16, 8), (7, 7)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8])
def test_cuts_ascend_and_those_of_fewer_ranks_are_among_those_of_eight(count):
    for heads, kv in SHAPES:
        bounds = head_bounds(heads, kv, count)
        assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] == heads
        if 8 % count == 0:
            assert bounds == head_bounds(heads, kv, 8)[:: 8 // count]


def test_kv_heads_are_those_of_the_query_heads():
    for heads, kv in SHAPES:
        config = replace(tiny.model_config("llama"), num_heads=heads, num_kv_heads=kv)
        for size in possible_sizes(config):
            for rank in range(size):
                part = Sharding(config, rank, size, invariant=False)
                group = len(part.heads) // len(part.kv_heads)
                owners = [part.kv_heads[i // group] for i in range(len(part.heads))]
                assert owners == [head // (heads // kv) for head in part.heads]
                if kv % size == 0:  # no KV head is stored twice
                    assert len(part.kv_heads) == kv // size


def test_refused_sizes_name_the_possible_ones():
    config = replace(tiny.model_config("llama"), num_heads=9, num_kv_heads=3)
    assert possible_sizes(config)[:4] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"possible sizes: 1, 2, 3, 4"):
        Sharding(config, 0, 10, invariant=False)
    with pytest.raises(ConfigError, match="1, 2, 4 and 8 ranks"):
        Sharding(config, 0, 3, invariant=True)


MATRIX = torch.randn((64, 256), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
FORMATS = {**QUANTIZERS, "fp8_block": Fp8BlockWeight.quantize, "float": FloatWeight}


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_those_of_the_whole_matrix(name):
    whole = FORMATS[name](MATRIX)
    part = whole.columns(128, 256)
    assert part.shape == (64, 128)
    assert torch.equal(part.dequantize(), whole.dequantize()[:, 128:])


def cut(made, rank):
    """Return the part of a rank of two, and its configuration."""
    sharding = Sharding(made.config, rank, 2, invariant=False)
    cuts, weights = WeightCuts.of_weights(sharding, made.weights, made.dtype), dict(made.weights)
    cuts.cut(weights)
    return weights, cuts.local_config()


def test_a_cut_inside_a_block_is_refused():
    made = tiny.checkpoint("llama")
    name = "model.layers.0.self_attn.o_proj.weight"
    made.weights[name] = FORMATS["blocks"](made.weights[name].dequantize())
    with pytest.raises(ConfigError, match="cannot cut model.layers.0.self_attn.o_proj.weight at column 16"):
        cut(made, 1)


def test_a_weight_without_a_rule_is_refused():
    made = tiny.checkpoint("llama")
    made.weights["model.layers.0.self_attn.gate"] = FloatWeight(torch.zeros(4))
    with pytest.raises(ConfigError, match="does not support model.layers.0.self_attn.gate"):
        cut(made, 0)


def test_a_subtree_is_a_partial_sum():
    terms = list(torch.randn((8, 1000), generator=torch.Generator().manual_seed(2)))
    whole = pairwise_sum(terms)
    for size in (2, 4, 8):
        own = 8 // size
        partial = [pairwise_sum(terms[rank * own : (rank + 1) * own]) for rank in range(size)]
        assert torch.equal(pairwise_sum(partial), whole)
    assert not torch.equal(sum(terms[1:], terms[0]), whole)  # another order has other bits
