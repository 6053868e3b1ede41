"""Mixture of experts in torch: rows grouped by expert, combined in each row's own order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import Moe, Routing
from draftproof.ops.reference.moe import MIN_WEIGHT_SUM
from draftproof.ops.torch.row_map import map_rows


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


def moe_forward(ops: ForwardOps, x: Tensor, moe: Moe) -> Tensor:
    """Apply a mixture of experts to rows x [R, hidden]; each expert multiplies the rows that selected it."""
    experts, weights = route(ops.router_logits(x, moe.router), moe.routing, moe.correction)
    outputs = x.new_zeros((*experts.shape, x.shape[1]), dtype=torch.float32)  # [R, top_k, hidden]
    for expert in experts.unique().tolist():
        rows, ranks = (experts == expert).nonzero(as_tuple=True)
        inner = ops.linear_act_mul(x[rows], moe.gate_up[expert], moe.activation)
        outputs[rows, ranks] = ops.linear(inner, moe.down[expert], torch.float32)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for rank in range(experts.shape[1]):
        total = total + weights[:, rank, None] * outputs[:, rank]
    if moe.shared is not None:
        inner = ops.linear_act_mul(x, moe.shared.gate_up, moe.shared.activation)
        shared = ops.linear(inner, moe.shared.down, torch.float32)
        if moe.shared_gate is not None:
            gate = ops.router_logits(x, moe.shared_gate)  # [R, 1]
            shared = shared * map_rows(torch.sigmoid, gate).view_as(gate)
        total = total + shared
    return total.to(x.dtype)
