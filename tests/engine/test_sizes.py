"""Sizes derived from model, machine and configuration."""

from __future__ import annotations

import pytest
import torch

import heads
import tiny
from draftproof.config import EngineConfig
from draftproof.engine.sizing import resolve_sizes
from draftproof.errors import ConfigError
from draftproof.ops import KVLayout, Runtime
from draftproof.ops.torch.backend import TorchOps
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup


class FakeDeviceRuntime(Runtime):
    """Runtime of a device with a known amount of free memory."""

    def __init__(self, free: int) -> None:
        super().__init__(torch.device("cpu"))
        self.free = free

    def free_memory(self) -> int:
        return self.free


class FakeDevice(TorchOps):
    """Backend of a device with a known amount of free memory."""

    default_seqs = 64
    default_rows = 128

    def __init__(self, free: int) -> None:
        super().__init__(torch.device("cpu"))
        self.runtime = FakeDeviceRuntime(free)


def sizes(free: int, **options: object):
    config = EngineConfig(model="x", max_model_len=256, **options)
    return resolve_sizes(config, tiny.checkpoint(), FakeDevice(free))


def test_kv_pool_fills_the_free_memory() -> None:
    made = tiny.checkpoint()
    each = KVLayout(2, 2, 8, torch.float32).bytes_per_token
    weights = sum(t.numel() * 4 for t in made.tensors.values())
    logits = 4 * 64 * 2 * tiny.VOCAB * 4
    model = made.config
    activations = 128 * 4 * (4 * model.hidden_size + 3 * model.intermediate_size + 2 * (4 + 2) * 8)
    found = sizes(int((weights + logits + activations + each * 1600) / 0.9) + 100)
    assert 1600 <= found.kv_tokens < 1600 + 2 * found.page_size
    assert (found.num_seqs, found.max_rows, found.max_pages) == (64, 128, 16)
    plenty = sizes(1 << 40)
    assert plenty.kv_tokens == 64 * 256  # no more than all slots can use


def test_too_little_memory_is_an_error_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"does not fit: 0.0 GiB are free.*max_model_len"):
        sizes(1000)


def test_rows_and_slots_limit_each_other() -> None:
    assert sizes(1 << 40, max_num_seqs=500).max_rows == 500
    assert sizes(1 << 40, max_num_batched_tokens=16).num_seqs == 16
    with pytest.raises(ConfigError, match="at least max_num_seqs"):
        sizes(1 << 40, max_num_batched_tokens=16, max_num_seqs=17)


def test_draft_storage_reduces_the_pool() -> None:
    config, made = EngineConfig(model="x", max_model_len=256), tiny.checkpoint()
    each = KVLayout(2, 2, 8, torch.float32).bytes_per_token
    device = FakeDevice(4 << 20)
    plain = resolve_sizes(config, made, device)
    twice = resolve_sizes(config, made, device, (each, 0))
    assert 256 < twice.num_pages == pytest.approx(plain.num_pages / 2, abs=1)
    heavy = resolve_sizes(config, made, device, (0, 1 << 20))
    assert plain.num_pages - heavy.num_pages == pytest.approx((1 << 20) / each / 16, abs=1)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("method", heads.WITH_MODELS)
def test_reported_draft_storage_is_allocated(method: str, kv_cache_dtype: str) -> None:
    options = heads.options(method, "llama", "float32")
    kind = lookup(PROPOSERS, method, "method")
    each, weight_bytes = kind.storage(options, tiny.model_config("llama"), torch.float32, kv_cache_dtype)
    sizes = {"page_size": 8, "kv_cache_tokens": 256, "kv_cache_dtype": kv_cache_dtype}
    target = tiny.engine(speculative={"method": method, **options}, **sizes)
    proposer = target.loop.proposer
    caches = proposer.runner.caches if hasattr(proposer, "runner") else proposer.caches
    assert sum(cache.nbytes for cache in caches) == each * (256 + 8)  # and page 0
    assert weight_bytes > 4 * 1000
    assert kind.storage({}, tiny.model_config("llama"), torch.float32) == (0, 0)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_quantised_kv_has_more_pages_in_the_same_memory(kv_cache_dtype: str) -> None:
    made = tiny.checkpoint()
    device = FakeDevice(4 << 20)
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 256, "max_model_len": 256}
    plain, quantised = (
        resolve_sizes(EngineConfig(model="tiny", kv_cache_dtype=name, **sizes), made, device)
        for name in ("auto", kv_cache_dtype)
    )
    bytes_of = [KVLayout(2, 2, 8, dtype).bytes_per_token for dtype in (torch.float32, torch.int8)]
    assert quantised.num_pages == pytest.approx(plain.num_pages * bytes_of[0] / bytes_of[1], abs=3)


def test_kv_larger_than_the_memory_of_the_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower kv_cache_tokens"):
        tiny.engine(kv_cache_tokens=1 << 45)
