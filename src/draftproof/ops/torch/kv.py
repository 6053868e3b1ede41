"""Access to the paged KV cache in torch: one layer's cache is [2, pages, page_size, num_kv, dim]."""

from __future__ import annotations

from torch import Tensor


def store_kv(cache: Tensor, index: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store keys and values [R, num_kv, dim] at token indices [R] (page * page_size + offset)."""
    flat = cache.flatten(1, 2)
    flat[0, index] = keys
    flat[1, index] = values


def load_kv(cache: Tensor, pages: Tensor, positions: Tensor) -> Tensor:
    """Load keys and values of positions [P] of the slot with these pages: [2, P, num_kv, dim] fp32."""
    page_size = cache.shape[2]
    index = pages[positions // page_size].long() * page_size + positions % page_size
    return cache.flatten(1, 2)[:, index].float()
