"""Tapped residual rows of inner layers: their values, and that taps change no other output."""

from __future__ import annotations

import pytest
import torch

import tiny
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
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
