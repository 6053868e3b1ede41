"""Reference access to the paged KV cache: one layer's cache is [2, pages, page_size, num_kv, dim]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def store_kv(cache: Tensor, index: int, keys: Tensor, values: Tensor) -> None:
    """Store keys and values [num_kv, dim] of one token at its index (page * page_size + offset)."""
    page, offset = divmod(index, cache.shape[2])
    cache[0, page, offset] = keys
    cache[1, page, offset] = values


def load_kv(cache: Tensor, pages: Tensor, positions: Sequence[int]) -> Tensor:
    """Load keys and values of positions of the slot whose pages are `pages`: [P, 2, num_kv, dim] fp64."""
    at = [divmod(position, cache.shape[2]) for position in positions]
    return torch.stack([cache[:, int(pages[page]), offset] for page, offset in at]).double()
