"""All layers of a mixture of experts in one kernel, for one row: bits of separate ops and of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof import LLM, SamplingParams
from draftproof.models.layers import run_layers
from draftproof.ops import Attention, AttentionShape, Layer, Moe, Routing, Rows, resolve
from one_row import MAX_TOKENS, PAGE, make_rows, randn

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)

BF16, EPS, NUM_LAYERS = torch.bfloat16, 1e-6, 3
# hidden, experts, experts of a token, columns of an expert, query heads, KV heads
SIZES = {
    "qwen3-30b-a3b": (2048, 128, 8, 768, 32, 4),
    "64 experts": (2048, 64, 8, 512, 16, 16),
    "16 experts of a token": (1024, 32, 16, 256, 8, 1),
    "wide": (4096, 32, 4, 1536, 32, 8),
}
# Positions in one span, in the spans of one item, in spans that several programs share, and in more of those
# than there are programs.
POSITIONS = (0, 1, 63, 64, 127, 128, 150, 255, 256, 700, 5000)


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    yield resolve("triton", torch.device("cuda"))


def make_layers(ops: Any, name: str, qk_norms: bool = True, normalize: bool = True) -> list[Layer]:
    """Return random layers."""
    hidden, experts, top_k, inner, num_q, num_kv = SIZES[name]
    heads = AttentionShape(num_q=num_q, num_kv=num_kv, dim=128, scale=128**-0.5, window=0)

    def weight(columns: int, depth: int, seed: int) -> Any:
        return ops.forward.pack_linear(randn(columns, depth, seed=seed) / depth**0.5)

    def norm(size: int, seed: int) -> Tensor:
        return 1 + randn(size, seed=seed) / 8

    made = []
    for seed in range(0, 100 * NUM_LAYERS, 100):
        qkv = weight((num_q + 2 * num_kv) * 128, hidden, seed)
        norms = (norm(128, seed + 1), norm(128, seed + 2)) if qk_norms else ()
        attention = Attention(heads, qkv, weight(hidden, num_q * 128, seed + 3), *norms)
        moe = Moe(
            Routing(experts, top_k, normalize=normalize, scale=1.0 if normalize else 2.5),
            ops.forward.pack_router(randn(experts, hidden, seed=seed + 4) / hidden**0.5),
            weight(experts * 2 * inner, hidden, seed + 5),
            weight(experts * hidden, inner, seed + 6),
        )
        made.append(Layer(norm(hidden, seed + 7), attention, norm(hidden, seed + 8), moe))
    return made


def make_caches(layers: list[Layer]) -> list[Tensor]:
    """Return caches with random keys and values of all tokens."""
    heads = layers[0].attention.heads
    shape = (2, 2 * MAX_TOKENS // PAGE + 1, PAGE, heads.num_kv, heads.dim)
    return [randn(*shape, seed=i) for i in range(len(layers))]


def run(
    ops: Any, layers: list[Layer], rows: Rows, caches: list[Tensor], fused: bool, taps: tuple[int, ...] = ()
) -> tuple[Tensor, ...]:
    """Return the results of all layers on one row."""
    hidden = layers[0].attention.out.columns
    angle = torch.arange(MAX_TOKENS, device="cuda")[:, None] * 10000.0 ** (
        -torch.arange(64, device="cuda") / 64
    )
    rope = torch.cat([angle.cos(), angle.sin()], 1)
    norm = layers[0].mlp_norm
    return run_layers(ops, randn(1, hidden, seed=9), layers, norm, rows, rope, caches, EPS, taps, fused=fused)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("qk_norms", "normalize"), [(True, True), (False, False)])
def test_bits_are_those_of_separate_ops(ops: Any, name: str, qk_norms: bool, normalize: bool) -> None:
    layers = make_layers(ops, name, qk_norms, normalize)
    caches = make_caches(layers)
    row = randn(1, layers[0].attention.out.columns, seed=9)
    assert ops.forward._fused_moe.supports(row, layers)
    for position in POSITIONS:
        rows = make_rows(position)
        before, after = [cache.clone() for cache in caches], [cache.clone() for cache in caches]
        want = run(ops, layers, rows, before, fused=False, taps=(0, 2))
        for _ in range(5):  # programs run in another order
            got = run(ops, layers, rows, after, fused=True, taps=(0, 2))
            assert all(map(torch.equal, got, want)), position
        assert all(map(torch.equal, after, before)), position
    assert not ops.forward._fused_moe._counter.any()


def test_logits_that_are_read_before_they_are_stored_are_detected(ops: Any) -> None:
    """Control: logits that are not UNSET at the start of a launch seem to be stored already."""
    from draftproof.ops.triton.fused_moe.launcher import LOGITS

    layers, rows = make_layers(ops, "qwen3-30b-a3b"), make_rows(150)
    want = run(ops, layers, rows, make_caches(layers), fused=False)
    assert torch.equal(run(ops, layers, rows, make_caches(layers), fused=True)[1], want[1])
    for scratch in ops.forward._fused_moe._scratch.values():
        scratch[LOGITS].zero_()
    assert not torch.equal(run(ops, layers, rows, make_caches(layers), fused=True)[1], want[1])
    assert torch.equal(run(ops, layers, rows, make_caches(layers), fused=True)[1], want[1])


def test_a_row_of_nan_ends_as_with_separate_ops(ops: Any) -> None:
    """Logits that are NaN differ from those that are not stored yet."""
    layers, rows = make_layers(ops, "16 experts of a token"), make_rows(40)
    norm = layers[0].attention_norm
    assert norm is not None
    layers[0] = replace(layers[0], attention_norm=norm * float("nan"))
    for fused in (False, True):
        assert run(ops, layers, rows, make_caches(layers), fused)[1].isnan().all()


def test_a_row_of_padding_stores_nothing(ops: Any) -> None:
    layers = make_layers(ops, "16 experts of a token")
    caches = make_caches(layers)
    before = [cache.clone() for cache in caches]
    run(ops, layers, make_rows(40, slot=-1), caches, fused=True)
    assert all(map(torch.equal, caches, before))


def test_other_layers_are_not_supported(ops: Any) -> None:
    layers = make_layers(ops, "16 experts of a token")
    row = randn(1, 1024, seed=9)
    supports = ops.forward._fused_moe.supports
    assert supports(row, layers) and not supports(row.repeat(2, 1), layers)
    moe = layers[0].mlp
    assert isinstance(moe, Moe)
    for changed in (
        replace(layers[0], mlp=replace(moe, correction=torch.zeros(32, device="cuda"))),
        replace(layers[0], mlp=replace(moe, routing=replace(moe.routing, scoring="sigmoid"))),
        replace(layers[0], attention_output_norm=layers[0].mlp_norm),
        replace(layers[0], residual_scale=0.5),
    ):
        assert not supports(row, [changed, *layers[1:]])


def write_model(folder: Path) -> str:
    """Write the configuration of a model that the kernel supports; its weights are random."""
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 4096, "hidden_size": 1024, "head_dim": 128,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 1, "num_experts": 32,
        "num_experts_per_tok": 16, "moe_intermediate_size": 256, "intermediate_size": 256,
        "norm_topk_prob": True, "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def test_an_engine_has_the_same_bits_with_drafts_and_in_batches(tmp_path: Path) -> None:
    """One row is computed by the kernel, several by the separate ops."""
    prompts = [{"prompt_token_ids": [7 + i, 11, 13, 7 + i, 11, 13, 7 + i]} for i in range(6)]
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=100, logprobs=3, ignore_eos=True)
        for i in range(len(prompts))
    ]
    sizes = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "skip_tokenizer_init": True}
    found = []
    for spec in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        with LLM(write_model(tmp_path), speculative_config=spec, max_num_seqs=8, **sizes) as llm:
            alone = [llm.generate(*each)[0] for each in zip(prompts, params, strict=True)]
            for results in (alone, llm.generate(prompts, params)):
                found.append([(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results])
    assert all(each == found[0] for each in found[1:])
