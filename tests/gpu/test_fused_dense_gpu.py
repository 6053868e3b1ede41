"""All layers of a dense model in one kernel, for one row: bits of separate ops and of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from draftproof import LLM, SamplingParams
from draftproof.models.layers import run_layers
from draftproof.ops import Attention, AttentionShape, Layer, Mlp, Rows, resolve
from one_row import MAX_TOKENS, PAGE, make_rows, randn

PROGRAMS = 128  # of the kernel
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)

BF16, EPS, NUM_LAYERS = torch.bfloat16, 1e-6, 3


class Size(NamedTuple):
    """Sizes and parts of a layer."""

    hidden: int
    inner: int
    num_q: int
    num_kv: int
    dim: int = 128
    qk_norms: bool = False
    output_norms: bool = False
    bias: bool = False
    activation: str = "silu"
    windows: tuple[int, ...] = (0, 0, 0)  # of each layer; a layer with a window has its own rotary table


SIZES = {
    "gemma-3-4b": Size(2560, 10240, 8, 4, 256, True, True, False, "gelu_tanh", (1024, 0, 1000)),
    "gemma-3-12b": Size(3840, 15360, 16, 8, 256, True, True, False, "gelu_tanh", (1024, 0, 1000)),
    "llama-3-8b": Size(4096, 14336, 32, 8),
    "llama-3.2-3b": Size(3072, 8192, 24, 8),
    "qwen3-8b": Size(4096, 12288, 32, 8, qk_norms=True),
    "qwen2.5-7b": Size(3584, 18944, 28, 4, bias=True),
    "small": Size(1280, 2560, 10, 2, windows=(100, 0, 1)),
}
# Positions in one span, in the spans of one item, in spans that several programs share, and in more of those
# than there are programs.
POSITIONS = (0, 1, 63, 64, 127, 128, 255, 256, 700, 1023, 1024, 1100, 5000)


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    yield resolve("triton", torch.device("cuda"))


def make_layers(ops: Any, name: str) -> list[Layer]:
    """Return random layers."""
    size = SIZES[name]
    hidden, dim, width = size.hidden, size.dim, size.num_q * size.dim

    def weight(columns: int, depth: int, seed: int, bias: Tensor | None = None) -> Any:
        return ops.forward.pack_linear(randn(columns, depth, seed=seed) / depth**0.5, bias)

    def norm(count: int, seed: int) -> Tensor:
        return 1 + randn(count, seed=seed) / 8

    made = []
    for layer, window in enumerate(size.windows):
        seed, qkv = 100 * layer, width + 2 * size.num_kv * dim
        heads = AttentionShape(size.num_q, size.num_kv, dim, dim**-0.5, window)
        bias = randn(qkv, seed=seed + 9) if size.bias else None
        norms = (norm(dim, seed + 1), norm(dim, seed + 2)) if size.qk_norms else ()
        attention = Attention(heads, weight(qkv, hidden, seed, bias), weight(hidden, width, seed + 3), *norms)
        mlp = Mlp(
            weight(2 * size.inner, hidden, seed + 4), weight(hidden, size.inner, seed + 5), size.activation
        )
        outputs = (norm(hidden, seed + 6), norm(hidden, seed + 7)) if size.output_norms else (None, None)
        made.append(Layer(norm(hidden, seed + 8), attention, norm(hidden, seed + 10), mlp, *outputs))
    return made


def make_caches(layers: list[Layer], rows: Rows, position: int) -> list[Tensor]:
    """Return caches with random keys and values before `position`, and NaN elsewhere."""
    heads = layers[0].attention.heads
    shape = (2, 2 * MAX_TOKENS // PAGE + 1, PAGE, heads.num_kv, heads.dim)
    token = torch.arange(position, device="cuda")
    pages, places = rows.page_table[1][token // PAGE].long(), token % PAGE
    caches = []
    for i in range(len(layers)):
        cache = torch.full(shape, float("nan"), dtype=BF16, device="cuda")
        cache[:, pages, places] = randn(2, position, heads.num_kv, heads.dim, seed=i)
        caches.append(cache)
    return caches


def make_ropes(layers: list[Layer]) -> list[Tensor]:
    """Return the rotary table of each layer: one for layers with a window, another for the others."""
    half, made = layers[0].attention.heads.dim // 2, {}
    for is_local, base in ((True, 10000.0), (False, 1000000.0)):
        power = -torch.arange(half, device="cuda") / half
        angle = torch.arange(MAX_TOKENS, device="cuda")[:, None] * base**power
        made[is_local] = torch.cat([angle.cos(), angle.sin()], 1)
    return [made[layer.attention.heads.window > 0] for layer in layers]


def run_separate(
    ops: Any, layers: list[Layer], rows: Rows, caches: list[Tensor], taps: tuple[int, ...] = ()
) -> tuple[Tensor, ...]:
    """Return the residual after all layers, then the taps, as separate ops."""
    row = randn(1, layers[0].attention.out.columns, seed=9)
    norm, ropes = layers[0].mlp_norm, make_ropes(layers)
    return run_layers(ops, row, layers, norm, rows, ropes, caches, EPS, taps, fused=False)[1:]


def run_kernel(
    ops: Any, layers: list[Layer], rows: Rows, caches: list[Tensor], taps: tuple[int, ...] = ()
) -> tuple[Tensor, ...]:
    """Return the residual after all layers, then the taps, of the kernel."""
    row = randn(1, layers[0].attention.out.columns, seed=9)
    tapped = ops.forward._fused_dense(row, layers, rows, make_ropes(layers), caches, EPS, taps)
    assert tapped is not None
    return row, *tapped.unbind(1)


def equal(first: Any, second: Any) -> bool:
    """Return whether all tensors have the same bits."""
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@pytest.mark.parametrize("name", SIZES)
def test_bits_are_those_of_separate_ops(ops: Any, name: str) -> None:
    layers = make_layers(ops, name)
    assert ops.forward._fused_dense.supports(randn(1, SIZES[name].hidden, seed=9), layers)
    for position in POSITIONS:
        rows = make_rows(position)
        before, after = (make_caches(layers, rows, position) for _ in range(2))
        want = run_separate(ops, layers, rows, before, taps=(0, 2))
        assert all(torch.isfinite(each).all() for each in want)
        for _ in range(5):  # programs run in another order
            got = run_kernel(ops, layers, rows, after, taps=(0, 2))
            assert equal(got, want), position
        assert equal(after, before), position
    assert not ops.forward._fused_dense._counter.any()


def test_a_barrier_that_does_not_wait_is_detected(ops: Any) -> None:
    """Control: a counter that begins with the arrivals of one barrier lets programs pass each one early."""
    layers, rows = make_layers(ops, "small"), make_rows(150)
    caches = make_caches(layers, rows, 150)
    want = run_separate(ops, layers, rows, caches)
    found = []
    for _ in range(10):
        ops.forward._fused_dense._counter[0] = PROGRAMS
        found.append(equal(run_kernel(ops, layers, rows, caches), want))
    assert not all(found)
    assert equal(run_kernel(ops, layers, rows, make_caches(layers, rows, 150)), want)


def test_a_row_of_padding_stores_nothing(ops: Any) -> None:
    layers, rows = make_layers(ops, "small"), make_rows(40, slot=-1)
    before, after = (make_caches(layers, rows, 0) for _ in range(2))
    run_kernel(ops, layers, rows, after)
    assert equal(after, before)


def test_other_layers_are_not_supported(ops: Any) -> None:
    layers = make_layers(ops, "small")
    row = randn(1, 1280, seed=9)
    supports = ops.forward._fused_dense.supports
    assert supports(row, layers) and not supports(row.repeat(2, 1), layers)
    assert not supports(row.float(), layers)
    attention, mlp = layers[0].attention, layers[0].mlp
    assert isinstance(attention, Attention) and isinstance(mlp, Mlp)
    for changed in (
        replace(layers[0], attention=replace(attention, sinks=torch.zeros(10, device="cuda"))),
        replace(layers[0], attention=replace(attention, q_row_norm=layers[0].mlp_norm)),
        replace(layers[0], mlp=replace(mlp, activation="swiglu_oai")),
        replace(layers[0], attention_output_norm=layers[0].mlp_norm),
        replace(layers[0], residual_scale=0.5),
    ):
        assert not supports(row, [changed, *layers[1:]])


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 1280,
    "head_dim": 128, "num_hidden_layers": 3, "num_attention_heads": 10, "num_key_value_heads": 2,
    "intermediate_size": 2560, "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256,
    "num_attention_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 64, "sliding_window_pattern": 2, "rope_local_base_freq": 5000.0,
}  # fmt: skip


@pytest.mark.parametrize("raw", [LLAMA, GEMMA], ids=["llama", "gemma3"])
def test_an_engine_has_the_same_bits_with_drafts_and_in_batches(tmp_path: Path, raw: dict[str, Any]) -> None:
    """One row is computed by the kernel, several by the separate ops."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    prompts = [{"prompt_token_ids": [7 + i, 11, 13, 7 + i, 11, 13, 7 + i]} for i in range(6)]
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=100, logprobs=3, ignore_eos=True)
        for i in range(len(prompts))
    ]
    sizes = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "skip_tokenizer_init": True}
    found = []
    for spec in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        with LLM(str(tmp_path), speculative_config=spec, max_num_seqs=8, **sizes) as llm:
            alone = [llm.generate(*each)[0] for each in zip(prompts, params, strict=True)]
            assert llm.engine.ops.forward._fused_dense._scratch, "the kernel has not run"
            for results in (alone, llm.generate(prompts, params)):
                found.append([(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results])
    assert all(each == found[0] for each in found[1:])
