"""Quantised KV formats on every backend: stored bytes, attention over them, rows that stay independent."""

from __future__ import annotations

import pytest
import torch

from draftproof.config import EngineConfig
from draftproof.errors import ConfigError
from draftproof.ops import AttentionShape, KVLayout, Ops
from draftproof.ops.contract.kv_layout import kv_format, resolve_kv_dtype
from draftproof.ops.reference.kv import quantize_row
from kv_checks import (
    HEADS,
    KV_DTYPES,
    check_attention,
    check_rows_are_independent,
    check_stored_bytes,
    randn,
)
from opcheck import CPU, importable

BACKENDS = importable()
OTHERS = {name: ops for name, ops in BACKENDS.items() if name != "reference"}
every = pytest.mark.parametrize("ops", BACKENDS.values(), ids=BACKENDS)
others = pytest.mark.parametrize("ops", OTHERS.values(), ids=OTHERS)
formats = pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
shapes = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)


@every
@formats
@dtypes
@shapes
def test_stored_bytes_are_those_of_the_definition(
    ops: Ops, kv_dtype: torch.dtype, dtype: torch.dtype, heads: AttentionShape
) -> None:
    check_stored_bytes(ops, kv_dtype, dtype, heads)


@formats
@dtypes
def test_error_of_a_stored_row_is_at_most_half_a_step(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    form = kv_format(kv_dtype)
    assert form is not None
    every = torch.arange(256, dtype=torch.uint8).view(kv_dtype).double()
    every = every[every.isfinite()]
    for row in randn(20, 64, dtype=dtype):
        elements, scale = quantize_row(row, form)
        best = (row.double()[:, None] / scale.double() - every).abs().min(1).values
        assert torch.allclose((row.double() / scale.double() - elements.double()).abs(), best, atol=1e-4)


@others
@formats
@dtypes
@shapes
def test_attention_equals_reference(
    ops: Ops, kv_dtype: torch.dtype, dtype: torch.dtype, heads: AttentionShape
) -> None:
    check_attention(ops, kv_dtype, dtype, heads)


@others
@formats
@dtypes
def test_rows_do_not_depend_on_others(ops: Ops, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check_rows_are_independent(ops, kv_dtype, dtype, HEADS["smollm2"], length=140)


@formats
def test_bytes_of_pages_include_the_scales(kv_dtype: torch.dtype) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=64, dtype=kv_dtype)
    caches = layout.allocate(5, 16, CPU)
    assert sum(cache.nbytes for cache in caches) == 5 * 16 * layout.bytes_per_token
    assert layout.bytes_per_token == 2 * 2 * 3 * (64 + 4)


def test_unknown_formats_are_refused_with_the_list() -> None:
    for refuse in (
        lambda: resolve_kv_dtype("fp4", torch.bfloat16),
        lambda: EngineConfig(model="tiny", kv_cache_dtype="fp4"),
    ):
        with pytest.raises(ConfigError, match="must be one of auto, int8, fp8, fp8_e4m3, got 'fp4'"):
            refuse()
    assert resolve_kv_dtype("auto", torch.bfloat16) == torch.bfloat16
