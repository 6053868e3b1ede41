"""Weights packed from GGUF blocks: rows on lookup, and the cache of packed weights on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftproof import LLM, SamplingParams
from draftproof.models.config import ModelConfig
from draftproof.models.gguf import cache_files, mapped_weights, packed_store
from draftproof.models.gguf.block_checksum import BLOCK_BYTES, BlockChecksum, checksum_of_file
from draftproof.models.gguf.packed_store import PackedStore
from draftproof.models.load import Checkpoint, load_checkpoint
from draftproof.models.registry import create_model
from draftproof.ops import QuantizedTable, resolve
from gguf_files import write_gguf

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=144,
    hidden_size=256,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    max_position=256,
    tie_embeddings=False,
    windows=(0,),
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / packed_store.FOLDER


def load(path: Path, kind: str | None = None) -> Checkpoint:
    if kind is not None:
        write_gguf(path, "llama", CONFIG, kind=kind)
    return load_checkpoint(path, dtype="float32", keep_blocks=True, progress=False)


def logits(path: Path, backend: str = "cpu") -> torch.Tensor:
    """Return the logits of every token after a fixed hidden row, by way of the store of the file."""
    made, ops = load(path), resolve(backend, CPU)
    with packed_store.packed_store(ops, list(made.weights.values())) as store:
        model = create_model(made.config, made.weights, ops, 64, store)
    hidden = ops.forward.embed(torch.arange(0, 144, 9), model.embedding)
    return model.logits(hidden)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookup_gives_the_rows_of_the_dequantised_table(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    table = load(tmp_path / "m.gguf", kind).weights["model.embed_tokens.weight"]
    tokens = torch.tensor([0, 143, 31, 32, 33, 31, 64])
    want = table.dequantize(dtype)[tokens]
    assert torch.equal(table.rows(tokens).dequantize(dtype), want)
    decoded = table.to(CPU)
    for name in ("cpu", "torch", "reference"):
        ops = resolve(name, CPU)
        packed = ops.forward.pack_quantized("blocks", decoded.data, decoded.scales)
        found = ops.forward.embed(tokens, QuantizedTable(packed, (144, 256), dtype))
        assert torch.equal(found, want), name


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_weight_packed_in_chunks_equals_one_packed_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    made, ops = load(path, kind), resolve("cpu", CPU)
    monkeypatch.setattr(mapped_weights, "CHUNK_ELEMENTS", 1)
    names = [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up")]
    parts = [made.weights[f"{name}.weight"] for name in names]
    assert len(mapped_weights.chunk_ranges(parts)) == 4  # type: ignore[arg-type]
    store = PackedStore(ops, tmp_path / "x.packed")
    stored = store.packed(names, parts, None)
    store.discard()
    whole = type(parts[0].to(CPU)).cat([part.to(CPU) for part in parts])  # type: ignore[misc]
    want = ops.forward.pack_quantized("blocks", whole.data, whole.scales)
    assert torch.equal(stored.weight, want.weight) and stored.layout == want.layout


def test_second_start_maps_the_file_of_the_first(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    load(path, "Q4_K")
    want, calls, decode = logits(path, "torch"), [], mapped_weights.GGUFWeight.decode
    first = logits(path)
    assert torch.allclose(first, want, atol=1e-4)
    (stored,) = own_cache.iterdir()
    monkeypatch.setattr(mapped_weights.GGUFWeight, "decode", lambda *a: calls.append(1) or decode(*a))
    assert torch.equal(logits(path), first) and not calls
    whole = stored.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for spoiled in (whole[:-1], b"", b"x" * 1000, flipped, whole[:-40] + b"{" * 12 + whole[-28:]):
        stored.unlink()
        stored.write_bytes(spoiled)
        del calls[:]
        assert torch.equal(logits(path), first)
        assert calls
        assert stored.read_bytes() == whole


def test_two_processes_may_pack_at_once(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "m.gguf"
    made, ops = load(path, "Q8_0"), resolve("cpu", CPU)
    target, name = own_cache / "m.packed", "lm_head"
    one, two = PackedStore(ops, target), PackedStore(ops, target)
    found = [store.packed([name], [made.weights[f"{name}.weight"]], None) for store in (one, two)]
    one.finish()
    third = PackedStore(ops, target).packed([name], [made.weights[f"{name}.weight"]], None)
    two.finish()
    assert all(torch.equal(each.weight, third.weight) for each in found)
    assert [each.name for each in own_cache.iterdir()] == ["m.packed"]


def test_cache_that_cannot_be_written_is_skipped(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.gguf"
    load(path, "Q4_1")
    own_cache.parent.mkdir()
    own_cache.write_text("in the way")
    found = logits(path)
    assert "not cached" in caplog.text
    own_cache.unlink()
    assert torch.equal(logits(path), found)


def test_unused_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the newest files within the limit, and none of an earlier state of the same source."""
    monkeypatch.setattr(cache_files, "FOLDER_BYTES", 30)
    names = ["a-1-v-new.x", "a-1-v-old.x", "b-2-v-s.x", "c-3-v-s.x", ".writing-abandoned", ".writing-now"]
    for age, name in enumerate(names):
        (tmp_path / name).write_bytes(b"0123456789")
        os.utime(tmp_path / name, ns=((1000 - age) * 10**9,) * 2)
    (tmp_path / ".writing-now").touch()
    cache_files.remove_unused(tmp_path / "a-1-v-new.x")
    assert {each.name for each in tmp_path.iterdir()} == {names[0], names[2], names[3], names[5]}
    monkeypatch.setattr(cache_files, "FOLDER_BYTES", 20)
    cache_files.remove_unused(tmp_path / "a-1-v-new.x")
    assert {each.name for each in tmp_path.iterdir()} == {names[0], names[2], names[5]}


def test_file_with_mixed_types_is_exact_under_speculation(tmp_path: Path) -> None:
    """Pack q and k of 4 bits with v of 6 bits as one weight, and gate of 4 bits with up as floats."""
    path = tmp_path / "m.gguf"
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "output": "Q6_K", "token_embd": "Q4_K", "ffn_up": "F16"}
    write_gguf(path, "llama", CONFIG, kind="Q4_K", kinds=kinds)
    options: Any = {"quantization": "gguf", "device": "cpu", "skip_tokenizer_init": True}
    prompts: Any = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8] * 9 + [5, 6], [9, 3] * 20)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=16, logprobs=2, ignore_eos=True)
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    found = []
    for extra in ({}, {"speculative_config": speculative}):
        with LLM(str(path), **options, **extra) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert found[0] == found[1]


def test_checksum_does_not_depend_on_the_division_into_pieces(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_BYTES + 77, np.uint8).tobytes()
    path = tmp_path / "data"
    path.write_bytes(b"head" + data + b"tail")
    want = checksum_of_file(path, 4, 4 + len(data))
    for size in (1, 1000, BLOCK_BYTES, BLOCK_BYTES + 1, len(data)):
        checksum = BlockChecksum()
        for first in range(0, len(data), size):
            checksum.add(memoryview(data)[first : first + size])
        assert checksum.value() == want, size
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(b"head" + damaged)
        assert checksum_of_file(path, 4, 4 + len(data)) != want, place
    path.write_bytes(b"head" + data[BLOCK_BYTES:] + data[:BLOCK_BYTES])
    assert checksum_of_file(path, 4, 4 + len(data)) != want
    path.write_bytes(b"head" + data[:-1])
    assert checksum_of_file(path, 4, 4 + len(data)) != want
