"""Reference access to the paged KV cache of one layer; `ops/contract/kv_layout` defines its layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftproof.ops.contract.kv_layout import KVFormat, kv_format, split_page_bytes

# dtype of elements -> scaled values in fp32, at most `max_element`, rounded to nearest even
ROUNDING: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.int8: lambda scaled: scaled.round().to(torch.int8),
    torch.float8_e4m3fn: lambda scaled: scaled.to(torch.float8_e4m3fn),
}


def quantize_row(row: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Return the elements [dim] and the scale of one token and head [dim]; see `KVFormat`."""
    values = row.float()
    limit = torch.tensor(form.max_element)  # a tensor: torch divides by a number with two roundings
    scale = values.abs().max() / limit
    if not scale.isfinite():
        return torch.zeros_like(row, dtype=form.dtype), torch.tensor(torch.nan)
    scaled = values / scale if scale > 0 else torch.zeros_like(values)
    return ROUNDING[form.dtype](scaled.clamp(-limit, limit)), scale


def store_kv(cache: Tensor, index: int, keys: Tensor, values: Tensor) -> None:
    """Store keys and values [num_kv, dim] of one token at its index (page * page_size + offset)."""
    page, offset = divmod(index, cache.shape[2])
    form = kv_format(cache.dtype)
    if form is None:
        cache[0, page, offset] = keys
        cache[1, page, offset] = values
        return
    elements, scales = split_page_bytes(cache)
    for plane, rows in enumerate((keys, values)):
        for head, row in enumerate(rows):
            quantized, scale = quantize_row(row, form)
            elements[plane, page, offset, head] = quantized
            scales[plane, page, head, offset] = scale


def load_kv(cache: Tensor, pages: Tensor, positions: Sequence[int]) -> Tensor:
    """Load keys and values of positions of the slot whose pages are `pages`: [P, 2, num_kv, dim] fp64."""
    at = [(int(pages[position // cache.shape[2]]), position % cache.shape[2]) for position in positions]
    if kv_format(cache.dtype) is None:
        return torch.stack([cache[:, page, offset] for page, offset in at]).double()
    elements, scales = split_page_bytes(cache)
    rows = [elements[:, page, offset].double() * scales[:, page, :, offset, None] for page, offset in at]
    return torch.stack(rows)
