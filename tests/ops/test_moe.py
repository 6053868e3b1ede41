"""Mixtures of experts: every backend against the reference, in every form of routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftproof.models.weight_formats import QUANTIZERS, pack_weight
from draftproof.ops import ExpertPart, Mlp, Moe, Ops, Routing, resolve
from draftproof.ops.contract.types import ExpertOutputs
from draftproof.ops.reference import moe as reference_moe
from draftproof.ops.torch import moe as torch_moe
from quantized_files import mxfp4_weight

CPU = torch.device("cpu")
HIDDEN, INNER, SHARED, EXPERTS = 64, 48, 80, 8
ROUTINGS = {
    "softmax": Routing(EXPERTS, 3, normalize=False),
    "normalized": Routing(EXPERTS, 2),
    "sigmoid": Routing(EXPERTS, 3, scoring="sigmoid", scale=2.5),
    "groups_max": Routing(EXPERTS, 3, normalize=False, num_groups=4, top_groups=2, scale=1.5),
    "groups_top2": Routing(EXPERTS, 4, scoring="sigmoid", num_groups=4, top_groups=3, group_score="top2_sum"),
    "all": Routing(EXPERTS, EXPERTS),
}
every_routing = pytest.mark.parametrize("name", ROUTINGS)


def weights(seed: int, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]


def mixture(ops: Ops, routing: Routing, dtype: torch.dtype, shared: bool = True, bias: bool = False) -> Moe:
    """Return a mixture of experts packed for a backend; equal seeds give equal weights."""
    pack = ops.forward.pack_linear

    def experts(rows: int, columns: int, seed: int) -> Any:
        made = [tensor.to(dtype) for tensor in weights(seed, *[(rows, columns)] * EXPERTS)]
        return pack(torch.cat(made)) if ops.forward.stacks_experts else tuple(pack(w) for w in made)

    router, gate = weights(1, (EXPERTS, HIDDEN), (1, HIDDEN))
    gate_up, down = (w.to(dtype) for w in weights(2, (2 * SHARED, HIDDEN), (HIDDEN, SHARED)))
    correction = torch.linspace(-0.5, 0.5, EXPERTS)[torch.arange(EXPERTS) * 5 % EXPERTS] if bias else None
    return Moe(
        routing,
        ops.forward.pack_router(router * 4),
        experts(2 * INNER, HIDDEN, 3),
        experts(HIDDEN, INNER, 4),
        correction,
        Mlp(pack(gate_up), pack(down)) if shared else None,
        ops.forward.pack_router(gate * 4) if shared else None,
    )


def rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(9)).to(dtype)


@every_routing
@pytest.mark.parametrize("bias", (False, True))
def test_torch_routes_as_the_reference_with_ties(name: str, bias: bool) -> None:
    """Logits in steps of a half have many ties, which the lowest id wins in both."""
    routing = ROUTINGS[name]
    logits = (torch.randn((60, EXPERTS), generator=torch.Generator().manual_seed(3)) * 4).round() / 2
    correction = torch.tensor([0.0, 0.25] * (EXPERTS // 2)) if bias else None
    experts, chosen = torch_moe.route(logits, routing, correction)
    for row, own, own_weights in zip(logits, experts, chosen, strict=True):
        want, want_weights = reference_moe.route(row, routing, correction)
        assert own.tolist() == want
        torch.testing.assert_close(own_weights, want_weights, rtol=1e-6, atol=0)


@every_routing
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("backend", ("torch", "cpu"))
def test_backend_equals_the_reference(name: str, dtype: torch.dtype, backend: str) -> None:
    x, routing = rows(17, dtype), ROUTINGS[name]
    reference, ops = resolve("reference", CPU), resolve(backend, CPU)
    want = reference.forward.moe(x, mixture(reference, routing, dtype, bias=True))
    got = ops.forward.moe(x, mixture(ops, routing, dtype, bias=True))
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("backend", ("torch", "cpu"))
def test_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, backend: str) -> None:
    ops = resolve(backend, CPU)
    moe = mixture(ops, ROUTINGS["sigmoid"], dtype)
    x = rows(60, dtype)
    whole = ops.forward.moe(x, moe)
    for part in (slice(0, 1), slice(59, 60), slice(3, 20)):
        assert torch.equal(ops.forward.moe(x[part], moe), whole[part])
    assert torch.equal(ops.forward.moe(x.flip(0), moe).flip(0), whole)
    assert ops.forward.moe(x[:0], moe).shape == (0, HIDDEN)


@pytest.mark.parametrize("weight_format", ("w8a8", "blocks", "fp8", "w4a16", "mxfp4"))
def test_experts_in_quantised_formats_equal_the_reference_row_by_row(weight_format: str) -> None:
    """Every weight format of the CPU multiplies experts; one row and sixty have the same bits."""
    reference, ops = resolve("reference", CPU), resolve("cpu", CPU)
    x, routing = rows(60, torch.float32), Routing(EXPERTS, 2)
    quantize = {**QUANTIZERS, "mxfp4": mxfp4_weight}[weight_format]

    def packed(target: Ops) -> Moe:
        def experts(shape: tuple[int, int], seed: int) -> Any:
            made = [quantize(w) for w in weights(seed, *[shape] * EXPERTS)]
            return tuple(pack_weight(target, w) for w in made)

        router = target.forward.pack_router(weights(1, (EXPERTS, HIDDEN))[0] * 4)
        return Moe(routing, router, experts((128, HIDDEN), 3), experts((HIDDEN, 64), 4))

    moe = packed(ops)
    whole = ops.forward.moe(x, moe)
    want = reference.forward.moe(x[:5], packed(reference))
    torch.testing.assert_close(whole[:5], want, rtol=2e-2, atol=2e-2)
    for at in (0, 31, 59):
        assert torch.equal(ops.forward.moe(x[at : at + 1], moe), whole[at : at + 1])


@pytest.mark.parametrize("backend", ("reference", "torch", "cpu"))
def test_part_of_the_experts_has_the_bits_of_all(backend: str) -> None:
    """The pairs of experts 2 to 4 equal those of a rank that has every expert."""
    ops = resolve(backend, CPU)
    moe, x = mixture(ops, ROUTINGS["normalized"], torch.float32), rows(9, torch.float32)
    owners = torch.tensor([int(2 <= expert < 5) for expert in range(EXPERTS)])
    part = replace(moe, gate_up=moe.gate_up[2:5], down=moe.down[2:5], part=ExpertPart(2, 3, owners))

    def values(found: ExpertOutputs) -> torch.Tensor:
        return found.values if found.places is None else found.values[found.places.flatten()]

    want, got = ops.forward.expert_outputs(x, moe), ops.forward.expert_outputs(x, part)
    assert torch.equal(got.experts, want.experts) and torch.equal(got.weights, want.weights)
    here = owners[want.experts.flatten()] == 1
    assert here.any() and not here.all()
    assert torch.equal(values(got)[here], values(want)[here])


# --- negative controls ---


def differs_between_batches(forward: Any, moe: Moe, x: torch.Tensor) -> bool:
    """Return whether a row has other bits alone than beside others, or in another order of the rows."""
    whole = forward(x, moe)
    alone = torch.cat([forward(row[None], moe) for row in x])
    return not (torch.equal(alone, whole) and torch.equal(forward(x.flip(0), moe).flip(0), whole))


def combine_by_arrival(ops: Ops, x: torch.Tensor, moe: Moe) -> torch.Tensor:
    """Add the experts of all rows in the order in which the batch first selects them."""
    experts, chosen = torch_moe.route(ops.forward.router_logits(x, moe.router), moe.routing, moe.correction)
    total = torch.zeros_like(x)
    for expert in dict.fromkeys(experts.flatten().tolist()):
        at, ranks = (experts == expert).nonzero(as_tuple=True)
        inner = ops.forward.linear_act_mul(x[at], moe.gate_up[expert])
        total[at] += chosen[at, ranks, None] * ops.forward.linear(inner, moe.down[expert], torch.float32)
    return total


@pytest.mark.control
def test_control_combine_in_arrival_order_is_detected() -> None:
    ops = resolve("torch", CPU)
    moe = mixture(ops, Routing(EXPERTS, 4), torch.float32, shared=False)
    x = rows(40, torch.float32)
    assert differs_between_batches(lambda x, moe: combine_by_arrival(ops, x, moe), moe, x)
    assert not differs_between_batches(ops.forward.moe, moe, x)


@pytest.mark.control
def test_control_ties_by_arrival_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal logits, ordered by how often the batch has selected an expert, give rows other experts."""
    ops = resolve("torch", CPU)
    moe = mixture(ops, Routing(EXPERTS, 2), torch.float32, shared=False)
    moe = replace(moe, router=ops.forward.pack_router(torch.zeros((EXPERTS, HIDDEN))))
    x = rows(12, torch.float32)
    assert not differs_between_batches(ops.forward.moe, moe, x)

    def by_arrival(scores: torch.Tensor, count: int) -> torch.Tensor:
        first = torch.arange(len(scores))[:, None] * count + torch.arange(count)
        return first % scores.shape[1]

    monkeypatch.setattr(torch_moe, "_best", by_arrival)
    assert differs_between_batches(ops.forward.moe, moe, x)


@pytest.mark.control
def test_control_router_that_depends_on_the_batch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router in bf16 with one scale for all rows of a batch moves weights, and sometimes experts."""
    ops = resolve("torch", CPU)
    moe = mixture(ops, Routing(EXPERTS, 2), torch.float32, shared=False)
    x = rows(40, torch.float32)
    exact = ops.forward.router_logits

    def scaled(x: torch.Tensor, packed: Any) -> torch.Tensor:
        scale = x.abs().max()
        return exact((x / scale).to(torch.bfloat16).float(), packed) * scale

    monkeypatch.setattr(ops.forward, "router_logits", scaled)
    assert differs_between_batches(ops.forward.moe, moe, x)
