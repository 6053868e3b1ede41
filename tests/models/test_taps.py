"""Tapped residual rows of inner layers: their values, and that taps change no other output."""

from __future__ import annotations

import pytest
import torch

import tiny
from draftproof.models.config import LayerNorms, ModelConfig
from draftproof.models.expected_tensors import dummy_tensors
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.models.weight_formats import BlockWeight, FloatWeight, WeightTensor
from draftproof.ops import resolve

CPU = torch.device("cpu")


def runner(backend: str, dtype: str, taps: tuple[int, ...], arch: str = "qwen3") -> Runner:
    made, ops = tiny.checkpoint(arch, dtype), resolve(backend, CPU)
    model = create_model(made.config, made.weights, ops, 64)
    return Runner(model, ops, made.dtype, num_pages=9, page_size=8, max_rows=32, taps=taps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_taps_return_residual_rows_and_change_no_output_bit(backend, dtype):
    plain, tapped = runner(backend, dtype, ()), runner(backend, dtype, (1, 0))
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    count = 3 if backend == "reference" else 20
    at = torch.arange(count)
    for places in (at, at[-1:] + 1):
        tokens, slots = places * 7 % tiny.VOCAB, torch.ones_like(places)
        rows = plain.rows(tokens, places, slots, table)
        want = plain.forward(rows)
        hidden, second, first = tapped.forward_tapped(rows)
        assert torch.equal(hidden, want)
        assert torch.equal(plain.ops.forward.rms_norm(second.contiguous(), plain.model.norm, 1e-6), want)
        assert first.shape == want.shape and not torch.equal(first, second)
    for mine, theirs in zip(plain.caches, tapped.caches, strict=True):
        assert torch.equal(mine, theirs)


OUTPUT_NORMS = LayerNorms(attention="", attention_output="post_a", mlp="", mlp_output="post_m")


@pytest.mark.parametrize(("norms", "dtype"), [(LayerNorms(), torch.float32), (OUTPUT_NORMS, torch.bfloat16)])
def test_residual_behind_a_table_in_blocks_is_fp32_where_norms_read_it(norms, dtype):
    """Weights that read the residual without a norm take it in the model's dtype."""
    config = ModelConfig(
        "LlamaForCausalLM", tiny.VOCAB, 64, 2, 4, 2, 16, 64, tie_embeddings=True, norms=norms, windows=(0, 0)
    )
    name, found = "model.embed_tokens.weight", {}
    for backend in ("reference", "torch", "cpu"):
        weights: dict[str, WeightTensor] = {
            key: FloatWeight(value) for key, value in dummy_tensors(config, torch.bfloat16, 0).items()
        }
        data = (127 * weights[name].data.float() / weights[name].data.float().abs().max()).to(torch.int8)
        weights[name] = BlockWeight(data, torch.full((tiny.VOCAB, 2, 1), 0.01).half())
        ops = resolve(backend, CPU)
        model = create_model(config, weights, ops, 64)
        made = Runner(model, ops, torch.bfloat16, num_pages=9, page_size=8, max_rows=32, taps=(0, 1))
        table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
        at = torch.arange(6)
        hidden, *taps = made.forward_tapped(made.rows(at * 7, at, torch.ones_like(at), table))
        assert hidden.dtype == torch.bfloat16 and {tap.dtype for tap in taps} == {dtype}
        assert torch.equal(ops.forward.rms_norm(taps[1].contiguous(), model.norm, config.norm_eps), hidden)
        found[backend] = taps[1].float()
        assert torch.allclose(found[backend], found["reference"], rtol=0.02, atol=0.02)
