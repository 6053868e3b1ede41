"""Checks of the mixture of experts under Triton's interpreter; `test_ops_triton` runs this file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import triton_checks  # first: it enables the interpreter before the kernels are imported
from draftproof.errors import ConfigError
from draftproof.models.weight_formats import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4GroupWeight,
    W8A8Weight,
    WeightTensor,
)
from draftproof.ops import ExpertPart, Mlp, Moe, Ops, Routing
from draftproof.ops.reference import moe as definition
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.moe import forward, routing, tiles
from draftproof.ops.triton.moe.tuning_launches import assignment_of
from exact import Batch, Case, Setup
from opcheck import assert_close, bits
from quantized_files import int4_weight_with_zeros, mxfp4_weight

ops, ref, randn, check = triton_checks.ops, triton_checks.ref, triton_checks.randn, triton_checks.check
BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, INNER = 48, 24
ROUTINGS = {
    "mixtral": Routing(num_experts=4, top_k=2),
    "qwen": Routing(num_experts=6, top_k=3, normalize=False),
    "deepseek_v2": Routing(num_experts=8, top_k=3, num_groups=4, top_groups=2, normalize=False, scale=16.0),
    "deepseek_v3": Routing(
        num_experts=12, top_k=4, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2_sum",
        scale=2.5,
    ),
}  # fmt: skip


# Name -> weight of a matrix [N, K] in a 4-bit format.
FOUR_BITS: dict[str, Callable[[Tensor], WeightTensor]] = {
    "w4a16": Int4GroupWeight.quantize,
    "w4a16 in groups of 32": partial(Int4GroupWeight.quantize, group=32),
    "w4a16 with zero points": int4_weight_with_zeros,
    "mxfp4": mxfp4_weight,
}


@dataclass(frozen=True)
class Weights:
    """Weights of a mixture of experts, before packing."""

    routing: Routing
    dtype: torch.dtype
    has_bias: bool = False
    has_shared: bool = False
    depth: tuple[int, int] = (HIDDEN, INNER)  # hidden, inner

    def __call__(self, each: Ops, quantize: Callable[[Tensor], Any] | None = None) -> Moe:
        """Pack the weights for a backend; `quantize` makes a quantised weight of a matrix."""
        forward, count, (hidden, inner) = each.forward, self.routing.num_experts, self.depth

        def matrix(columns: int, depth: int, seed: int) -> Tensor:
            return (randn(columns, depth, seed=seed) / depth**0.5).to(self.dtype)

        def packed(stacked: Tensor, bias: Tensor | None = None) -> Any:
            if quantize is None:
                return forward.pack_linear(stacked, bias)
            made = quantize(stacked.float())
            return forward.pack_quantized(made.format, made.data, made.scales, bias, made.zeros)

        def experts(columns: int, depth: int, seed: int) -> Any:
            parts = [matrix(columns, depth, seed + i) for i in range(count)]
            bias = randn(count * columns, seed=9, dtype=self.dtype) if self.has_bias else None
            if forward.stacks_experts:
                return packed(torch.cat(parts), bias)
            biases = [None] * count if bias is None else bias.chunk(count)
            return tuple(map(packed, parts, biases))

        router, ties = 4 * matrix(count, hidden, 1), count // 2
        router[ties] = router[0]  # equal logits in every row
        has_correction = self.routing.scoring == "sigmoid"
        return Moe(
            self.routing,
            forward.pack_router(router, randn(count, seed=5) if self.has_bias else None),
            experts(2 * inner, hidden, 100),
            experts(hidden, inner, 200),
            randn(count, seed=6) / 4 if has_correction else None,
            Mlp(packed(matrix(32, hidden, 7)), packed(matrix(hidden, 16, 8))) if self.has_shared else None,
            forward.pack_router(matrix(1, hidden, 3)) if self.has_shared else None,
        )


def sample_rows(count: int, dtype: torch.dtype, hidden: int = HIDDEN) -> Tensor:
    """Return rows [count, hidden]; the second is zero, so that all of its logits are equal."""
    x = randn(count, hidden, seed=4, dtype=dtype)
    x[1:2] = 0
    return x


def with_list(x: Tensor, moe: Moe) -> Tensor:
    """Compute all rows by the work list."""
    with mock.patch.object(ops.forward.mixture, "few_rows", 0):
        return ops.forward.moe(x, moe)


def few(x: Tensor, moe: Moe) -> Tensor:
    """Compute all rows without a work list."""
    with mock.patch.object(ops.forward.mixture, "few_rows", 1 << 20):
        return ops.forward.moe(x, moe)


@check
def output_equals_reference() -> None:
    for name, dtype in (("mixtral", FP32), ("qwen", BF16), ("deepseek_v3", BF16)):
        weights = Weights(ROUTINGS[name], dtype, has_bias=name == "mixtral", has_shared=name == "qwen")
        made, x = weights(ops), sample_rows(3, dtype)
        want = ref.forward.moe(x, weights(ref))
        for run in (few, with_list):
            assert_close(run(x, made), want, dtype)
    assert ops.forward.moe(x[:0], made).shape == (0, HIDDEN)


@check
def experts_weights_and_lists_equal_reference() -> None:
    for rule in ROUTINGS.values():
        weights, x = Weights(rule, torch.float32, has_bias=True), sample_rows(18, FP32)
        made, theirs = weights(ops), weights(ref)
        logits = ref.forward.router_logits(x, theirs.router)
        router, counters, shares_of_rows = made.router.in_dtype(x.dtype), made.router.counters, set()
        # Several programs a row tile, one program; all rows, one tile of rows, fewer rows than warps.
        for split, tile_rows, count in ((512, 16, 18), (0, 4, 18), (0, 0, 18), (512, 4, 9), (512, 0, 3)):
            with (
                mock.patch.object(routing, "MAX_SPLIT_ROWS", split),
                mock.patch.object(routing, "EXPERTS", 4),
            ):
                found = routing.route(x[:count], router, rule, made.correction, counters, tile_rows, False)
            assert not counters.any()
            shares_of_rows.add(bits(found.weights[:3]))
            for row, (experts, shares) in enumerate(zip(found.experts, found.weights, strict=True)):
                want, want_shares = definition.route(logits[row], rule, made.correction)
                assert experts.tolist() == want
                torch.testing.assert_close(shares, want_shares, rtol=1e-5, atol=1e-6)
            if tile_rows:
                check_list(found, rule.num_experts, tile_rows)
        assert len(shares_of_rows) == 1


def check_list(found: routing.Assignment, num_experts: int, tile_rows: int) -> None:
    """Check that the list has the counts and tiles of a list made by torch, and each pair once."""
    want = assignment_of(found.experts, num_experts, tile_rows)
    assert found.counts is not None and found.order is not None and found.items is not None
    assert want.counts is not None and want.order is not None and want.items is not None
    assert torch.equal(found.counts, want.counts)
    size = 1 + int(want.items[0])
    assert torch.equal(found.items[:size], want.items[:size]) and len(found.items) == len(want.items)
    for expert, count in enumerate(found.counts.tolist()):
        assert sorted(found.order[expert, :count].tolist()) == sorted(want.order[expert, :count].tolist())


@check
def row_has_the_same_bits_in_every_batch() -> None:
    for dtype, name in ((FP32, "mixtral"), (BF16, "qwen")):
        made, x = Weights(ROUTINGS[name], dtype, has_shared=name == "qwen")(ops), sample_rows(20, dtype)
        single = {row: bits(few(x[row : row + 1], made)) for row in (1, 17)}
        for run, batch in ((few, [17, 0]), (with_list, [17]), (with_list, list(range(20)))):
            out = run(x[batch], made)
            for place, row in enumerate(batch):
                assert row not in single or bits(out[place : place + 1]) == single[row], (name, row, run)


@check
def tiles_change_no_bit_of_a_row() -> None:
    """Compare tiles of other rows and columns; under the interpreter all have the same depth."""
    made, x = Weights(ROUTINGS["qwen"], BF16)(ops), sample_rows(20, BF16)
    found = set()
    for size, columns in ((16, 32), (32, 16)):
        table = {size: (tiles.Tile(size, columns, 64, 4, 2),)}
        with (
            mock.patch.object(tiles, "GATE_UP_TILES", table),
            mock.patch.object(tiles, "DOWN_TILES", table),
            mock.patch.object(tiles, "TILE_ROWS", {tiles.ANY_ROWS: size}),
        ):
            found.add(bits(with_list(x, made)))
    assert len(found) == 1


@check
def not_finite_row_changes_no_other() -> None:
    for rule in (ROUTINGS["deepseek_v3"], ROUTINGS["qwen"]):
        made, x = Weights(rule, FP32)(ops), sample_rows(4, FP32)
        want = with_list(x, made)
        x[1], x[2] = float("nan"), float("inf")
        got = with_list(x, made)
        assert torch.equal(got[[0, 3]], want[[0, 3]])
        assert not got[1].isfinite().any() and not made.router.counters.any()


@check
def sum_and_norm_have_the_bits_of_separate_ops() -> None:
    for dtype, has_shared in ((BF16, True), (FP32, False)):
        made, x = Weights(ROUTINGS["mixtral"], dtype, has_shared=has_shared)(ops), sample_rows(3, dtype)
        residual, norm = randn(3, HIDDEN, seed=8, dtype=dtype), randn(HIDDEN, seed=9, dtype=dtype)
        got = ops.forward.moe_add_rms_norm(x, made, residual, norm, 1e-6)
        want = ops.forward.add_rms_norm(few(x, made), residual, norm, 1e-6)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert not len(ops.forward.moe_add_rms_norm(x[:0], made, residual[:0], norm, 1e-6)[0])


@check
def quantised_experts_equal_reference() -> None:
    rule = ROUTINGS["mixtral"]
    for quantize in (W8A8Weight.quantize, Fp8Weight.quantize, Fp8BlockWeight.quantize, *FOUR_BITS.values()):
        weights = Weights(rule, BF16, depth=(128, 64 if quantize in FOUR_BITS.values() else 128))
        made, x = weights(ops, quantize), sample_rows(2, BF16, 128)
        got = few(x, made)
        assert_close(got, ref.forward.moe(x, weights(ref, quantize)), BF16)
        assert bits(got) == bits(with_list(x, made))


@check
def row_of_4_bit_experts_has_the_same_bits_in_every_batch() -> None:
    """Multiply more pairs of an expert than a tile has rows, by weights that are not whole pieces."""
    rule, x = Routing(num_experts=2, top_k=2), sample_rows(70, BF16, 96)
    for name, quantize in FOUR_BITS.items():
        made = Weights(rule, BF16, depth=(96, 32))(ops, quantize)
        whole = with_list(x, made)
        assert bits(few(x[69:], made)) == bits(whole[69:]), name
        assert bits(with_list(x[3:6], made)) == bits(whole[3:6]), name


@check
def biases_and_clamped_swiglu_of_mxfp4_experts_equal_reference() -> None:
    """Multiply as gpt-oss does, in both dtypes."""
    for dtype in (BF16, FP32):
        weights = Weights(Routing(num_experts=3, top_k=2), dtype, has_bias=True, depth=(64, 32))
        x = sample_rows(3, dtype, 64)
        made, theirs = (replace(weights(o, mxfp4_weight), activation="swiglu_oai") for o in (ops, ref))
        assert_close(few(x, made), ref.forward.moe(x, theirs), dtype)


@check
def speculation_with_4_bit_experts_is_exact() -> None:
    """Serve a request with drafts, some of them wrong, and compare it with the request without."""
    cases = [Case(0, length=3, prompt=False, max_tokens=4)]
    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 2, "adaptive": False}
    for arch, quantization in (("gpt_oss_mxfp4", "none"), ("gpt_oss", "int4")):
        batch = Batch(cases, Setup(arch, "bfloat16", "triton", quantization=quantization), spec)
        assert batch.differences() == [], arch
        assert sum(step.num_draft for step in batch.records["0"].steps) > 1


@check
def experts_of_other_formats_are_refused() -> None:
    made, x = Weights(ROUTINGS["mixtral"], FP32)(ops), sample_rows(2, FP32)
    packed = PackedLinear(made.down.weight, None, made.down.kind, "int3")
    with pytest.raises(ConfigError, match=r"int3 are not supported: bf16, fp32, w8a8, fp8, w4a16"):
        ops.forward.moe(x, replace(made, down=packed))
    with pytest.raises(ConfigError, match="do not fit"):
        ops.forward.moe(x[:, :24].contiguous(), made)


@check
def part_of_the_experts_has_the_bits_of_all() -> None:
    """Compare the pairs of experts 2 to 4 with those of a rank that has every expert."""
    for dtype, rule in ((FP32, ROUTINGS["qwen"]), (BF16, ROUTINGS["deepseek_v3"])):
        made, x = Weights(rule, dtype, has_bias=dtype == FP32)(ops), sample_rows(6, dtype)
        owners = torch.tensor([int(2 <= expert < 5) for expert in range(rule.num_experts)])

        def own(packed: PackedLinear, count: int = rule.num_experts) -> PackedLinear:
            rows = slice(2 * packed.columns // count, 5 * packed.columns // count)
            return ops.forward.pack_linear(
                packed.weight[rows], None if packed.bias is None else packed.bias[rows]
            )

        part = replace(made, gate_up=own(made.gate_up), down=own(made.down), part=ExpertPart(2, 3, owners))
        for few_rows in (0, 1 << 20):
            with mock.patch.object(ops.forward.mixture, "few_rows", few_rows):
                want, got = ops.forward.expert_outputs(x, made), ops.forward.expert_outputs(x, part)
            assert torch.equal(got.experts, want.experts) and torch.equal(got.weights, want.weights)
            here = owners[want.experts.flatten().long()] == 1
            assert here.any() and not here.all()
            assert torch.equal(got.values[here], want.values[here])


@check
def defects_are_found() -> None:
    """Plant defects: a sum in another order of ranks, and ties by the highest expert."""
    made, x = Weights(ROUTINGS["qwen"], FP32)(ops), sample_rows(3, FP32)
    want, plain = with_list(x, made), forward.combine

    def reversed_ranks(outputs: Tensor, weights: Tensor, *more: Any) -> Tensor:
        turned = outputs.view(*weights.shape, -1).flip(1).flatten(0, 1).contiguous()
        return plain(turned, weights.flip(1).contiguous(), *more)

    with mock.patch.object(forward, "combine", reversed_ranks):
        assert not torch.equal(with_list(x, made), want)
    chosen = routing.route(
        x, made.router.in_dtype(x.dtype), made.routing, None, made.router.counters, 0, False
    )
    assert chosen.experts[1].tolist() == [0, 1, 2]  # all scores of the row are equal


def main(only: list[str]) -> None:
    """Run the checks of this file."""
    triton_checks.run_checks(triton_checks.CHECKS[__name__], only)


if __name__ == "__main__":
    main(sys.argv[1:])
