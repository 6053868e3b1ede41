"""Cost of experts in steps that were timed on equal rows, which all select the same experts.

Steps with few rows take the time in which their weights are read. Rows of different tokens select different
experts, so the weights that a step reads grow with its rows until every expert is selected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from draftproof.models.config import ModelConfig
from draftproof.models.registry import expected_tensors
from draftproof.ops.contract.types import Routing

EMBEDDING = "model.embed_tokens.weight"


def expected_experts(routing: Routing, rows: int) -> float:
    """Return the expected number of different experts that so many rows select, each as likely as any."""
    return routing.num_experts * (1 - (1 - routing.top_k / routing.num_experts) ** rows)


def with_expert_cost(seconds: Mapping[int, float], config: ModelConfig) -> dict[int, float]:
    """Return the seconds of steps by rows, timed on equal rows, as those of rows that differ."""
    moe = config.moe
    if moe is None:
        return dict(seconds)
    sizes = {name: math.prod(shape) for name, shape in expected_tensors(config).items()}
    in_experts = sum(size for name, size in sizes.items() if f".{moe.experts}." in name)
    others = sum(sizes.values()) - in_experts
    if not config.tie_embeddings:  # of which a step reads a few rows
        others -= sizes[EMBEDDING]
    expert = in_experts / moe.routing.num_experts

    def read(num_experts: float) -> float:
        return others + num_experts * expert

    timed = read(moe.routing.top_k)
    return {rows: time * read(expected_experts(moe.routing, rows)) / timed for rows, time in seconds.items()}
