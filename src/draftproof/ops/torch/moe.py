"""Mixture of experts in torch: rows grouped by expert, combined in each row's own order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import ExpertOutputs, Moe, Routing
from draftproof.ops.reference.moe import MIN_WEIGHT_SUM
from draftproof.ops.torch.row_by_row import map_rows


def route(
    logits: Tensor,  # [R, E] fp32
    routing: Routing,
    correction: Tensor | None,  # [E] fp32
) -> tuple[Tensor, Tensor]:
    """Return the experts of each row [R, top_k] int64, best first, and their weights [R, top_k] fp32."""
    score = _softmax if routing.scoring == "softmax" else torch.sigmoid
    scores = map_rows(score, logits).view_as(logits)
    choice = scores if correction is None else scores + correction
    if routing.top_groups < routing.num_groups:
        groups = choice.view(len(choice), routing.num_groups, -1)
        best = groups.sort(-1, descending=True).values
        rank = best[..., 0] + best[..., 1] if routing.group_score == "top2_sum" else best[..., 0]
        allowed = torch.zeros_like(rank, dtype=torch.bool)
        allowed.scatter_(1, _best(rank, routing.top_groups), value=True)
        choice = groups.masked_fill(~allowed[..., None], -math.inf).flatten(1)
    experts = _best(choice, routing.top_k)
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights = weights / map_rows(torch.sum, weights).view(-1, 1).clamp(min=MIN_WEIGHT_SUM)
    return experts, weights * routing.scale


def _softmax(row: Tensor) -> Tensor:
    """Return the softmax of one row."""
    return torch.softmax(row, 0)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the columns with the largest scores of each row [R, count]; equal ones by ascending column."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def expert_outputs(ops: ForwardOps, x: Tensor, moe: Moe) -> ExpertOutputs:
    """Multiply the rows of x [R, hidden] that selected an expert by its weights, expert by expert."""
    experts, weights = route(ops.router_logits(x, moe.router), moe.routing, moe.correction)
    outputs = x.new_zeros((*experts.shape, x.shape[1]), dtype=torch.float32)  # [R, top_k, hidden]
    first, count = (0, moe.routing.num_experts) if moe.part is None else (moe.part.first, moe.part.count)
    for expert in experts.unique().tolist():
        if not first <= expert < first + count:
            continue
        rows, ranks = (experts == expert).nonzero(as_tuple=True)
        inner = ops.linear_act_mul(x[rows], moe.gate_up[expert - first], moe.activation)
        outputs[rows, ranks] = ops.linear(inner, moe.down[expert - first], torch.float32)
    return ExpertOutputs(outputs.flatten(0, 1), experts, weights)


def combine_experts(
    found: ExpertOutputs, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the sums of all experts of each row, [R, hidden]; see `ForwardOps.combine_experts`."""
    num_rows, top_k = found.weights.shape
    outputs = found.values.view(num_rows, top_k, -1)
    total = torch.zeros_like(outputs[:, 0])
    for rank in range(top_k):
        total = total + found.weights[:, rank, None] * outputs[:, rank]
    if shared is not None:
        if gate is not None:
            shared = shared * map_rows(torch.sigmoid, gate).view_as(gate)
        total = total + shared
    return total.to(dtype)
