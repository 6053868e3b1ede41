"""Storage of K and V: the dtype of the activations, or a quantised format with a scale per token and KV head.

The cache of a layer is [2, pages, page_size, num_kv, dim], K first, then V; or [1, pages, page_size, 1, dim]
where a value is part of its key, as in latent attention. In a quantised cache the last
dimension counts bytes and is longer by the bytes of a scale. A page of it holds its elements [page_size,
num_kv, dim], then their fp32 scales [num_kv, page_size], so that elements stay aligned and the scales of a
head are adjacent. `split_page_bytes` returns both.

A row (one token, one KV head) is quantised by its own largest magnitude when it is stored, so its bits depend
on nothing but the row. Every reader sees the quantised row: element times scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import ConfigError

SCALE_BYTES = 4  # of the fp32 scale of a quantised row
CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Quantised KV format. The scale of a row is its largest magnitude over `max_element`, in fp32.

    An element is the value divided by the scale, rounded to nearest even and clamped to `max_element`. A row
    whose scale is 0 has elements 0. A row with a value that is not finite has elements 0 and the scale NaN.
    """

    dtype: torch.dtype  # of an element, one byte
    max_element: float


# value of the option `kv_cache_dtype` -> format
KV_FORMATS = {
    "int8": KVFormat(torch.int8, 127.0),
    "fp8": KVFormat(torch.float8_e4m3fn, 448.0),
    "fp8_e4m3": KVFormat(torch.float8_e4m3fn, 448.0),
}
_BY_DTYPE = {form.dtype: form for form in KV_FORMATS.values()}


def kv_format(dtype: torch.dtype) -> KVFormat | None:
    """Return the quantised format that stores elements of `dtype`; None: rows are stored as they are."""
    return _BY_DTYPE.get(dtype)


def resolve_kv_dtype(option: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of cache elements; `dtype`: of the activations, which `auto` stores unchanged."""
    if option == "auto":
        return dtype
    if option not in KV_FORMATS:
        raise ConfigError(f"kv_cache_dtype must be one of auto, {', '.join(KV_FORMATS)}, got {option!r}")
    return KV_FORMATS[option].dtype


def row_elements(dim: int, dtype: torch.dtype) -> int:
    """Return the length of a cache's last dimension for heads of `dim`."""
    return dim if kv_format(dtype) is None else dim + SCALE_BYTES


def split_page_bytes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a quantised cache.

    These are the elements [2, pages, page_size, num_kv, dim] and the scales [2, pages, num_kv, page_size].
    """
    planes, pages, page_size, num_kv, row = cache.shape
    size = page_size * num_kv * (row - SCALE_BYTES)
    flat = cache.view(planes, pages, -1)
    scales = flat[..., size:].view(torch.int8).view(torch.float32)
    elements = flat[..., :size].unflatten(-1, (page_size, num_kv, row - SCALE_BYTES))
    return elements, scales.unflatten(-1, (num_kv, page_size))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Storage of K and V of a model: shape and dtype of one layer's cache, and how many layers have one."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of an element
    planes: int = 2  # K and V; 1: a value is part of its key

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes that one token takes in all layers, scales included."""
        row = row_elements(self.head_dim, self.dtype) * self.dtype.itemsize
        return self.planes * self.num_layers * self.num_kv_heads * row

    def shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache."""
        return self.planes, num_pages, page_size, self.num_kv_heads, row_elements(self.head_dim, self.dtype)

    def allocate(self, num_pages: int, page_size: int, device: torch.device) -> list[Tensor]:
        """Return zeroed caches, one per layer."""
        shape = self.shape(num_pages, page_size)
        return [_zeros(shape, self.dtype, device) for _ in range(self.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On the CPU pages of memory are mapped when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + CACHE_LINE_BYTES, dtype=np.uint8)
    skip = -raw.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(raw[skip : skip + size]).view(dtype).view(shape)
