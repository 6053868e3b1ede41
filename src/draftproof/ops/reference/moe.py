"""Reference definition of a mixture of experts: one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import Moe, Routing

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


def moe_row(ops: ForwardOps, x: Tensor, moe: Moe) -> Tensor:
    """Apply a mixture of experts to one row x [1, hidden]."""
    experts, weights = route(ops.router_logits(x, moe.router)[0], moe.routing, moe.correction)
    total = torch.zeros((1, x.shape[1]))
    for expert, weight in zip(experts, weights, strict=True):
        inner = ops.linear_act_mul(x, moe.gate_up[expert], moe.activation)
        total = total + weight * ops.linear(inner, moe.down[expert], torch.float32)
    if moe.shared is not None:
        inner = ops.linear_act_mul(x, moe.shared.gate_up, moe.shared.activation)
        shared = ops.linear(inner, moe.shared.down, torch.float32)
        if moe.shared_gate is not None:
            shared = shared * (1 / (1 + torch.exp(-ops.router_logits(x, moe.shared_gate).double()))).float()
        total = total + shared
    return total.to(x.dtype)
