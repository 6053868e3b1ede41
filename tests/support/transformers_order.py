"""Shared parts of test_transformers and the tests that reuse them."""

from __future__ import annotations

from torch import Tensor


def check_order(ids: list[int], row: Tensor, gap: float = 1e-4) -> None:
    """`ids` are the best of `row` in their order, except where two values are nearer than `gap`."""
    order = row.topk(len(ids))
    for place, token in enumerate(ids):
        if token != int(order.indices[place]):
            assert abs(float(row[token] - order.values[place])) < gap
    assert len(set(ids)) == len(ids)
