"""Mixture of experts on a GPU: bits of a row at every number of rows and tile, and inside a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.models.weight_formats import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4GroupWeight,
    W8A8Weight,
    WeightTensor,
)
from draftproof.ops import Mlp, Moe, Routing, resolve
from draftproof.ops.torch.backend import TorchOps
from quantized_files import int4_weight_with_zeros, mxfp4_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

ROW_COUNTS = (1, 2, 4, 5, 9, 16, 17, 33, 64, 100, 128, 256, 300, 512, 513, 1100, 2048)
QWEN3 = Routing(num_experts=128, top_k=8)
DEEPSEEK_V2_LITE = Routing(num_experts=64, top_k=6, normalize=False)
DEEPSEEK_V3 = Routing(
    num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_score="top2_sum", scale=2.5
)
SHAPES = {  # routing, hidden, inner
    "qwen3-30b-a3b": (QWEN3, 2048, 768),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 2048, 1408),
    "deepseek-v3-small": (DEEPSEEK_V3, 1024, 256),
    "mixtral-small": (Routing(num_experts=8, top_k=2), 512, 1792),
    "gpt-oss-small": (Routing(num_experts=32, top_k=4), 2880, 320),  # depths that are not whole pieces
}
MAKERS: dict[str, Callable[[Tensor], WeightTensor] | None] = {
    "bf16": None,
    "fp32": None,
    "w8a8": W8A8Weight.quantize,
    "fp8": Fp8Weight.quantize,
    "fp8_block": Fp8BlockWeight.quantize,
    "w4a16": Int4GroupWeight.quantize,
    "w4a16_zeros": int4_weight_with_zeros,
    "mxfp4": mxfp4_weight,
}


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    yield resolve("triton", torch.device("cuda"))


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def packed(ops: Any, name: str, columns: int, depth: int, seed: int) -> Any:
    """Return a random weight of a format, of all experts or of the shared one."""
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    weight, maker = (randn(columns, depth, seed=seed) / depth**0.5).to(dtype), MAKERS[name]
    if maker is None:
        return ops.forward.pack_linear(weight)
    made = maker(weight.float())
    return ops.forward.pack_quantized(made.format, made.data, made.scales, None, made.zeros)


def mixture(ops: Any, shape: str, name: str = "bf16", has_shared: bool = False) -> tuple[Moe, Tensor]:
    """Return a mixture of experts and rows of every magnitude for it."""
    rule, hidden, inner = SHAPES[shape]
    count, dtype = rule.num_experts, torch.float32 if name == "fp32" else torch.bfloat16
    made = Moe(
        rule,
        ops.forward.pack_router(randn(count, hidden, seed=1) / 32),
        packed(ops, name, count * 2 * inner, hidden, 2),
        packed(ops, name, count * hidden, inner, 3),
        randn(count, seed=4, dtype=torch.float32) / 8 if rule.scoring == "sigmoid" else None,
        Mlp(packed(ops, name, 512, hidden, 5), packed(ops, name, hidden, 256, 6)) if has_shared else None,
        ops.forward.pack_router(randn(1, hidden, seed=7) / 32) if has_shared else None,
    )
    rows = max(ROW_COUNTS)
    x = randn(rows, hidden, seed=8) * torch.logspace(-1, 1, rows, device="cuda")[:, None]
    return made, x.to(dtype)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_row_has_the_same_bits_at_every_number_of_rows(ops: Any, shape: str, name: str) -> None:
    if name == "fp32" and shape != "mixtral-small":
        pytest.skip("fp32 runs without tensor cores: one shape is enough")
    if name == "fp8_block" and SHAPES[shape][1] % 128:
        pytest.skip("the weights of an expert are not whole blocks of 128 rows: refused")
    made, x = mixture(ops, shape, name, has_shared=shape != "qwen3-30b-a3b")
    whole = ops.forward.moe(x, made)
    for count in ROW_COUNTS:
        for first in (0, (len(x) - count) // 2, len(x) - count):
            got = ops.forward.moe(x[first : first + count].contiguous(), made)
            assert torch.equal(got, whole[first : first + count]), (count, first)


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "deepseek-v3-small"])
def test_path_without_a_list_has_the_bits_of_the_list(ops: Any, shape: str, monkeypatch: Any) -> None:
    made, x = mixture(ops, shape)
    for count in (1, 3, 16, 40):
        found = []
        for limit in (0, 1 << 20):
            monkeypatch.setattr(ops.forward.mixture, "few_rows", limit)
            found.append(ops.forward.moe(x[:count], made))
        assert torch.equal(*found), count


@pytest.mark.parametrize("name", ["w4a16", "w4a16_zeros", "mxfp4"])
def test_tiles_of_4_bit_experts_change_no_bit(ops: Any, name: str, monkeypatch: Any) -> None:
    from draftproof.ops.triton.moe import tiles

    monkeypatch.setattr(ops.forward.tiles, "measured", {})
    made, x = mixture(ops, "gpt-oss-small" if name == "mxfp4" else "qwen3-30b-a3b", name)
    want = ops.forward.moe(x[:600], made)
    choices = {variant: sum(found.values(), ()) for variant, found in tiles.FOUR_BIT_TILES.items()}
    for place in range(max(map(len, choices.values()))):
        chosen = {key: {tiles.ANY_ROWS: found[place:] or found[:1]} for key, found in choices.items()}
        monkeypatch.setattr(tiles, "FOUR_BIT_TILES", chosen)
        assert torch.equal(ops.forward.moe(x[:600], made), want), place
        assert torch.equal(ops.forward.moe(x[:3], made), want[:3]), place


@pytest.mark.parametrize("name", ["w4a16", "w4a16_zeros", "mxfp4"])
def test_4_bit_experts_have_the_bits_of_their_bf16_weights(ops: Any, name: str) -> None:
    """Multiply by the dequantised weights of the selected experts, one pair at a time."""
    rule, hidden, inner = SHAPES["gpt-oss-small"]
    maker = MAKERS[name]
    assert maker is not None
    weights = [
        maker((randn(32 * n, k, seed=n) / k**0.5).float()) for n, k in ((2 * inner, hidden), (hidden, inner))
    ]
    router = ops.forward.pack_router(randn(32, hidden, seed=1) / 32)
    gate_up, down = (ops.forward.pack_quantized(w.format, w.data, w.scales, None, w.zeros) for w in weights)
    x = randn(40, hidden, seed=8)
    found = ops.forward.expert_outputs(x, Moe(rule, router, gate_up, down))
    wide = [weight.dequantize(torch.bfloat16).chunk(32) for weight in weights]
    for pair in (0, 9, 41, 159):
        expert = int(found.experts.flatten()[pair])
        mlp = [ops.forward.pack_linear(each[expert].contiguous()) for each in wide]
        own = ops.forward.linear_act_mul(x[pair // 4 : pair // 4 + 1], mlp[0])
        want = ops.forward.linear(own, mlp[1], torch.float32)[0]
        assert torch.equal(found.values[pair], want), pair


@pytest.mark.parametrize("rows", [3, 64, 600])
def test_tiles_change_no_bit(ops: Any, rows: int, monkeypatch: Any) -> None:
    from draftproof.ops.triton.moe import tiles

    monkeypatch.setattr(ops.forward.tiles, "measured", {})
    made, x = mixture(ops, "qwen3-30b-a3b")
    want = ops.forward.moe(x[:rows], made)
    gate_up, down = dict(tiles.GATE_UP_TILES), dict(tiles.DOWN_TILES)
    for size in gate_up:
        monkeypatch.setattr(tiles, "TILE_ROWS", {tiles.ANY_ROWS: size})
        for place in range(max(len(gate_up[size]), len(down[size]))):
            for name, found in (("GATE_UP_TILES", gate_up[size]), ("DOWN_TILES", down[size])):
                monkeypatch.setattr(tiles, name, {size: (found[place % len(found)],)})
            assert torch.equal(ops.forward.moe(x[:rows], made), want), (size, place)


@pytest.mark.parametrize("shape", SHAPES)
def test_output_equals_that_of_torch(ops: Any, shape: str) -> None:
    """Compare in bf16; a row whose last expert is nearly tied may select another one."""
    made, x = mixture(ops, shape, has_shared=True)
    theirs = TorchOps(torch.device("cuda"))
    count = made.routing.num_experts

    def split(weight: Any) -> tuple[Any, ...]:
        return tuple(theirs.forward.pack_linear(part) for part in weight.weight.chunk(count))

    router = theirs.forward.pack_router(made.router.linear.weight)
    assert made.shared is not None
    shared = Mlp(*(theirs.forward.pack_linear(w.weight) for w in (made.shared.gate_up, made.shared.down)))
    gate = theirs.forward.pack_router(made.shared_gate.linear.weight)
    other = Moe(made.routing, router, split(made.gate_up), split(made.down), made.correction, shared, gate)
    rows = x[-24:].contiguous()
    got, want = ops.forward.moe(rows, made).float(), theirs.forward.moe(rows, other).float()
    close = torch.isclose(got, want, rtol=2**-6, atol=2**-5 * float(want.abs().amax()))
    assert close.all(1).sum() >= len(rows) - 2


@pytest.mark.parametrize("rows", [1, 40, 600])
def test_sum_and_norm_have_the_bits_of_separate_ops(ops: Any, rows: int) -> None:
    made, x = mixture(ops, "deepseek-v2-lite", has_shared=True)
    x, norm = x[:rows].contiguous(), randn(x.shape[1], seed=9)
    residual = randn(*x.shape, seed=10)
    got = ops.forward.moe_add_rms_norm(x, made, residual, norm, 1e-6)
    want = ops.forward.add_rms_norm(ops.forward.moe(x, made), residual, norm, 1e-6)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("shape", "name"), [("qwen3-30b-a3b", "bf16"), ("gpt-oss-small", "mxfp4")])
def test_graph_replays_with_other_rows(ops: Any, shape: str, name: str) -> None:
    made, x = mixture(ops, shape, name)
    buffer = x[:24].clone()
    replay = ops.runtime.graph(lambda: ops.forward.moe(buffer, made))
    for first in (0, 24, 500, 0):
        buffer.copy_(x[first : first + 24])
        assert torch.equal(replay(), ops.forward.moe(x[first : first + 24].contiguous(), made))
    assert not made.router.counters.any()


@pytest.mark.parametrize("name", ["bf16", "w8a8"])
@pytest.mark.parametrize("count", [64, 128, 256, 700])
def test_rows_that_select_the_same_experts(ops: Any, name: str, count: int) -> None:
    made, x = mixture(ops, "qwen3-30b-a3b", name)
    rows = x[7:8].repeat(count, 1)
    out = ops.forward.moe(rows, made)
    assert torch.equal(out, ops.forward.moe(rows[:1], made).expand_as(out))
    rows[count // 2 :] = x[: count - count // 2]  # half of them select other experts
    out = ops.forward.moe(rows, made)
    for row in (0, count // 2, count - 1):
        assert torch.equal(out[row : row + 1], ops.forward.moe(rows[row : row + 1], made)), row
