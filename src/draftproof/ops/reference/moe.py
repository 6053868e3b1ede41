"""Reference definition of a mixture of experts: one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import ExpertOutputs, Moe, Routing

MIN_WEIGHT_SUM = 1e-20  # divisor of the weights if all scores of a token are 0


def route(
    logits: Tensor,  # [E] fp32
    routing: Routing,
    correction: Tensor | None,  # [E] fp32
) -> tuple[list[int], Tensor]:
    """Return the experts of one row, best first, and their weights [top_k] fp32."""
    wide = logits.double()
    if routing.scoring == "softmax":
        exp = torch.exp(wide - wide.max())
        scores = (exp / exp.sum()).float()
    else:
        scores = (1 / (1 + torch.exp(-wide))).float()
    choice = scores if correction is None else scores + correction
    per_group = routing.num_experts // routing.num_groups
    groups = choice.view(routing.num_groups, per_group).tolist()
    rank = [_group_score(group, routing.group_score) for group in groups]
    allowed = _best(rank, range(routing.num_groups), routing.top_groups)
    candidates = [e for e in range(routing.num_experts) if e // per_group in allowed]
    experts = _best(choice.tolist(), candidates, routing.top_k)
    weights = scores[experts]
    if routing.normalize:
        total = torch.zeros(())
        for weight in weights:
            total = total + weight
        weights = weights / total.clamp(min=MIN_WEIGHT_SUM)
    return experts, weights * torch.tensor(routing.scale)


def _group_score(scores: list[float], rule: str) -> float:
    """Return the score of one group from the scores of its experts."""
    best = sorted(scores, reverse=True)[: 2 if rule == "top2_sum" else 1]
    return float(torch.tensor(best).sum())


def _best(scores: list[float], among: list[int] | range, count: int) -> list[int]:
    """Return the `count` indices of `among` with the largest scores; equal ones by ascending index."""
    return sorted(among, key=lambda index: (-scores[index], index))[:count]


def expert_outputs(ops: ForwardOps, x: Tensor, moe: Moe) -> ExpertOutputs:
    """Multiply each row of x [R, hidden] by the weights of its experts."""
    first, count = (0, moe.routing.num_experts) if moe.part is None else (moe.part.first, moe.part.count)
    chosen, weights = zip(
        *(route(logits, moe.routing, moe.correction) for logits in ops.router_logits(x, moe.router)),
        strict=True,
    )
    values = torch.zeros((len(x), moe.routing.top_k, x.shape[1]))
    for r, experts in enumerate(chosen):
        for rank, expert in enumerate(experts):
            if first <= expert < first + count:
                inner = ops.linear_act_mul(x[r : r + 1], moe.gate_up[expert - first], moe.activation)
                values[r, rank] = ops.linear(inner, moe.down[expert - first], torch.float32)[0]
    return ExpertOutputs(values.flatten(0, 1), torch.tensor(chosen), torch.stack(weights))


def combine_experts(
    found: ExpertOutputs, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Add the experts of each row by rank, then the shared expert: [R, hidden]."""
    num_rows, top_k = found.weights.shape
    totals = torch.zeros((num_rows, found.values.shape[1]))
    for r in range(num_rows):
        for rank in range(top_k):
            totals[r] = totals[r] + found.weights[r, rank] * found.values[r * top_k + rank]
        if shared is not None:
            scale = torch.ones(()) if gate is None else (1 / (1 + torch.exp(-gate[r, 0].double()))).float()
            totals[r] = totals[r] + (shared[r] if gate is None else shared[r] * scale)
    return totals.to(dtype)
