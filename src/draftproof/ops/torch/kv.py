"""Access to the paged KV cache of one layer in torch; `ops/contract/kv_layout` defines its layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.ops.contract.kv_layout import KVFormat, kv_format, split_page_bytes

# dtype of elements -> scaled values in fp32, at most `max_element`, rounded to nearest even
ROUNDING: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.int8: lambda scaled: scaled.round_().to(torch.int8),
    torch.float8_e4m3fn: lambda scaled: scaled.to(torch.float8_e4m3fn),
}


def quantize_rows(rows: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Return the elements [R, num_kv, dim] and scales [R, num_kv] of rows; see `KVFormat`."""
    values = rows.float()
    limit = values.new_tensor(form.max_element)
    scales = values.abs().amax(-1) / limit
    is_finite = scales.isfinite()
    scaled = (values / scales[..., None]).clamp_(-limit, limit)
    scaled = torch.where((is_finite & (scales > 0))[..., None], scaled, 0.0)
    return ROUNDING[form.dtype](scaled), torch.where(is_finite, scales, torch.nan)


def store_kv(cache: Tensor, index: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store keys and values [R, num_kv, dim] at token indices [R] (page * page_size + offset)."""
    page_size, form = cache.shape[2], kv_format(cache.dtype)
    page, offset = index // page_size, index % page_size
    if form is None:
        cache[0, page, offset] = keys
        cache[1, page, offset] = values
        return
    elements, scales = split_page_bytes(cache)
    for plane, rows in enumerate((keys, values)):
        quantized, scale = quantize_rows(rows, form)
        elements[plane].view(torch.int8)[page, offset] = quantized.view(torch.int8)
        scales[plane][page, :, offset] = scale


def load_kv(cache: Tensor, pages: Tensor, positions: Tensor) -> Tensor:
    """Load keys and values of positions [P] of the slot with these pages: [2, P, num_kv, dim] fp32."""
    page_size = cache.shape[2]
    page, offset = pages[positions // page_size].long(), positions % page_size
    if kv_format(cache.dtype) is None:
        return cache[:, page, offset].float()
    elements, scales = split_page_bytes(cache)
    found = elements.view(torch.int8)[:, page, offset].view(cache.dtype).float()  # [2, P, num_kv, dim]
    return found * scales.transpose(2, 3)[:, page, offset][..., None]
