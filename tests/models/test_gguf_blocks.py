"""Blocks of GGUF tensors against the dequantisation of the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from draftproof import LLM, ConfigError, SamplingParams
from draftproof.engine.build import check_formats
from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.gguf.blocks import DECODERS, read_blocks
from draftproof.models.gguf.file import TYPES, read_gguf
from draftproof.models.gguf.mapped_weights import BLOCK_BYTES, GGUFWeight
from draftproof.models.hub import cache_folder
from draftproof.models.load import load_checkpoint
from draftproof.models.weight_formats import BlockWeight, FloatWeight
from draftproof.ops import resolve
from draftproof.ops.contract.block_scales import SUPER_BLOCK
from draftproof.ops.torch.forward import TorchForward
from gguf_files import encode, write_gguf

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=256,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=256,
    max_position=256,
    tie_embeddings=True,
    windows=(0, 0),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))


TYPE_IDS = {name: type_id for type_id, (name, _, _) in TYPES.items()}


def stored(kind: str, shape: tuple[int, int] = (5, 512)) -> np.ndarray:
    rng = np.random.default_rng(TYPE_IDS[kind])
    raw = encode(rng.normal(size=shape).astype(np.float32), kind, rng)
    return raw.view(np.uint8).reshape(shape[0], -1)


@pytest.mark.parametrize("kind", DECODERS)
def test_blocks_have_the_values_of_the_gguf_package(kind: str) -> None:
    raw = stored(kind)
    blocks = read_blocks(raw, kind, BLOCK_BYTES[kind])
    is_4bit = kind.startswith("Q4")
    assert blocks.integers.dtype == (np.uint8 if is_4bit else np.int8)
    assert blocks.scales.dtype == (np.int8 if kind.endswith("K") else np.float16)
    group = blocks.integers.shape[1] // blocks.scales.shape[1]
    assert group == (16 if kind == "Q6_K" else 32)
    scales = blocks.scales.astype(np.float32)
    if blocks.bases is not None:
        scales *= np.repeat(blocks.bases.astype(np.float32), SUPER_BLOCK // group, axis=1)
    scale, *minimum = (np.repeat(scales[..., i], group, axis=1) for i in range(scales.shape[2]))
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(scale * blocks.integers + (minimum[0] if minimum else 0), want)
    if is_4bit:
        assert blocks.integers.max() < 16


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_damaged_scale_is_refused_with_the_name_of_the_tensor(kind: str, tmp_path: Path) -> None:
    """Nothing stays behind: neither a loaded model nor a file in the cache."""
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", CONFIG, kind=kind)
    info = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    content[info.offset : info.offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    options: Any = {"quantization": "gguf", "device": "cpu", "skip_tokenizer_init": True}
    with pytest.raises(LoadError, match="m.gguf: tensor 'blk.1.ffn_up.weight' holds scales that are not fin"):
        LLM(str(path), **options)
    assert not list((cache_folder() / "packed").iterdir())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_weights_keep_the_blocks_and_the_values_of_the_unpacked_model(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", CONFIG, kind=kind)
    made = load_checkpoint(path, dtype="float32", keep_blocks=True, progress=False)
    unpacked = load_checkpoint(path, dtype="float32", progress=False)
    for name, weight in made.weights.items():
        assert isinstance(weight, FloatWeight if weight.data.ndim == 1 else GGUFWeight)
        assert torch.equal(weight.dequantize(torch.float32), unpacked.weights[name].dequantize())


def test_k_quants_of_different_types_are_concatenated_in_two_levels() -> None:
    parts = [
        GGUFWeight(torch.from_numpy(stored(kind, (4, 512))), kind=kind).decode() for kind in ("Q4_K", "Q6_K")
    ]
    both = BlockWeight.cat(parts)
    assert both.has_two_levels and both.group == 16 and both.data.dtype == torch.int8
    wanted = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(both.dequantize(torch.float32), wanted)
    for begin, end in ((0, 256), (256, 512), (32, 288)):
        some = both.columns(begin, end)
        assert some.has_two_levels == (begin != 32)
        assert torch.equal(some.dequantize(torch.float32), wanted[:, begin:end])


def test_weights_of_different_groups_are_concatenated() -> None:
    data = torch.arange(64, dtype=torch.int8).view(2, 32)
    coarse = BlockWeight(data, torch.rand(2, 1, 2))
    fine = BlockWeight(data, torch.rand(2, 2, 2))
    both = BlockWeight.cat([coarse, fine])
    assert both.group == 16
    assert torch.equal(both.dequantize(), torch.cat([coarse.dequantize(), fine.dequantize()]))
    small = BlockWeight((data % 16).to(torch.uint8), torch.rand(2, 2, 1).half())  # 4 bits, no minimum
    both = BlockWeight.cat([small, coarse])
    assert both.data.dtype == torch.int8 and both.scales is not None and both.scales.dtype == torch.float32
    assert torch.equal(both.dequantize(), torch.cat([small.dequantize(), coarse.dequantize()]))


@pytest.mark.parametrize(
    ("kind", "quantization", "dtype"),
    [
        ("Q4_1", "gguf", "float32"),
        ("Q4_1", "gguf", "bfloat16"),
        ("Q6_K", "gguf", "float32"),
        ("F32", "int4", "float32"),
    ],
)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_engine_on_blocks_is_exact_under_speculation(
    kind: str, quantization: str, dtype: str, method: str, tmp_path: Path
) -> None:
    """Compare requests in one batch with drafts and short chunks with each request alone."""
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", CONFIG, kind=kind)
    options: Any = {"quantization": quantization, "dtype": dtype, "device": "cpu"}
    options["skip_tokenizer_init"] = True
    lists = [[5, 6, 7, 8] * 9 + [5, 6], [9, 3] * 20 + [9], [1, 2, 3]]
    prompts: Any = [{"prompt_token_ids": ids} for ids in lists]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, logprobs=2, ignore_eos=True)
    speculative = {"method": method, "num_speculative_tokens": 4, "adaptive": False}

    def run(llm: LLM, requests: Any) -> tuple[list[Any], int]:
        found = llm.generate(requests, params, use_tqdm=False)
        facts = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found]
        return facts, sum(output.metrics.num_draft_tokens for output in found)

    with LLM(str(path), **options) as llm:
        alone = [run(llm, [prompt])[0][0] for prompt in prompts]
    options |= {"max_num_batched_tokens": 16, "max_num_seqs": 3}
    with LLM(str(path), speculative_config=speculative, **options) as llm:
        together, num_drafts = run(llm, prompts)
        shown = "int4" if quantization == "int4" else kind
        assert f", {shown} weights with {dtype} activations on cpu (cpu backend)" in llm.engine.describe()
    assert together == alone and num_drafts


def test_blocks_need_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in (CONFIG, tmp_path):
        with pytest.raises(ConfigError, match="give one as model"):
            load_checkpoint(model, keep_blocks=True, progress=False)


def test_backend_without_the_format_refuses_it() -> None:
    class NoFormats(TorchForward):
        weight_formats = frozenset()

    ops = resolve("torch", torch.device("cpu"))
    ops.forward = NoFormats()
    weight = BlockWeight(torch.zeros((2, 32), dtype=torch.int8), torch.zeros(2, 1, 2))
    with pytest.raises(ConfigError, match="torch backend does not multiply weights in the format blocks"):
        check_formats({"a_proj.weight": weight}, ops)
