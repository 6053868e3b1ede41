"""Argument checks of the CPU ops: shapes, dtypes and devices that the kernels rely on."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops.contract.kv_layout import kv_format, row_elements
from draftproof.ops.contract.types import AttentionShape
from draftproof.types import Rows


def is_bf16(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the cpu backend computes in float32 or bfloat16, not {dtype}")
    return dtype == torch.bfloat16


def check_tensor(
    name: str, x: Tensor, dims: int, width: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return x, contiguous, after checking what the kernels rely on."""
    is_bf16(x.dtype)
    if x.dim() != dims or (width is not None and x.shape[-1] != width) or x.device.type != "cpu":
        expected = f"{dims} dimensions" + ("" if width is None else f", the last of {width}")
        raise ValueError(f"{name} is {tuple(x.shape)} on {x.device}; expected {expected}, on the cpu")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}; expected {dtype}")
    return x.contiguous()


def check_norm(weight: Tensor, x: Tensor, width: int) -> Tensor:
    """Return the weight [width] of a norm of x, contiguous; it has x's dtype, or is bf16 beside fp32."""
    return check_tensor("weight", weight, 1, width, None if x.dtype == torch.float32 else x.dtype)


def check_ints(name: str, x: Tensor, rows: int | None = None) -> Tensor:
    if x.dim() != 1 or (rows is not None and x.shape[0] != rows) or x.device.type != "cpu":
        raise ValueError(f"{name} is {tuple(x.shape)} on {x.device}; expected [{rows}] on the cpu")
    return x.to(torch.int64).contiguous()


def check_rows(rows: Rows, count: int, *names: str) -> list[Tensor]:
    return [check_ints(name, getattr(rows, name), count) for name in names]


def check_doubles(x: Tensor, rows: int) -> Tensor:
    if x.shape != (rows,):
        raise ValueError(f"a limit is {tuple(x.shape)}; expected [{rows}]")
    return x.to(torch.float64).contiguous()


def check_cache(cache: Tensor, heads: AttentionShape, dtype: torch.dtype) -> None:
    row = row_elements(heads.dim, cache.dtype)
    planes = 1 if heads.value_dim else 2
    if cache.dim() != 5 or cache.shape[0] != planes or cache.shape[3:] != (heads.num_kv, row):
        raise ValueError(
            f"cache is {tuple(cache.shape)}; expected [{planes}, pages, page_size, {heads.num_kv}, {row}]"
        )
    has_dtype = cache.dtype == dtype or kv_format(cache.dtype) is not None
    if not has_dtype or not cache.is_contiguous() or cache.numel() == 0:
        raise ValueError(f"cache must be contiguous and {dtype} or quantised, not {cache.dtype}")
    if heads.num_q % heads.num_kv or heads.dim % 2:
        raise ValueError(f"{heads} does not divide evenly")


def check_logits(x: Tensor) -> tuple[Tensor, int, int]:
    if x.dim() != 2 or x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[1] == 0:
        raise ValueError(f"logits are {tuple(x.shape)} {x.dtype} on {x.device}; expected fp32 [R, V]")
    return x.contiguous(), x.shape[0], x.shape[1]
