"""Weighted sum of the outputs of a row's experts, in the order of their ranks, plus the shared expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.elementwise import rms_normed
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_sync

MAX_BLOCK = 512  # columns of a program


@triton.jit
def weighted_sum(
    outputs, weights, shared, gate, row, column, ok, D, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Return the sum over the experts of a row [BLOCK] in fp32; the shared expert is added last."""
    total = tl.zeros(column.shape, tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = row * TOP_K + rank
        output = tl.load(outputs + pair * D + column, mask=ok, other=0.0)
        total = total + tl.load(weights + pair) * output
    if HAS_SHARED:
        extra = tl.load(shared + row * D + column, mask=ok, other=0.0)
        if HAS_GATE:
            extra = extra * (1.0 / (1.0 + tl.exp(-tl.load(gate + row))))
        total = total + extra
    return total


@triton.jit
def combine_kernel(
    outputs, weights, shared, gate, out, D, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine outputs [R * TOP_K, D] with weights [R, TOP_K] and shared [R, D], gate [R] -> out [R, D]."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < D
    total = weighted_sum(outputs, weights, shared, gate, row, column, ok, D, TOP_K, HAS_SHARED, HAS_GATE)
    tl.store(out + row * D + column, total.to(out.dtype.element_ty), mask=ok)


def combine(
    outputs: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    gate: Tensor | None,
    dtype: torch.dtype,
    pdl: bool,
) -> Tensor:
    """Return the combined rows [R, D] of outputs [R * top_k, D] fp32, rounded once to `dtype`.

    `shared` [R, D] fp32 is the output of the shared expert, `gate` [R, 1] fp32 the logit of its weight.
    """
    (rows, top_k), width = weights.shape, outputs.shape[1]
    out = torch.empty((rows, width), dtype=dtype, device=outputs.device)
    block = min(MAX_BLOCK, next_power_of_two(width))
    combine_kernel[(rows, triton.cdiv(width, block))](
        outputs, weights, outputs if shared is None else shared, weights if gate is None else gate, out,
        width, TOP_K=top_k, BLOCK=block, HAS_SHARED=shared is not None, HAS_GATE=gate is not None,
        **launch_options(pdl, num_warps=4, enable_fp_fusion=False),
    )  # fmt: skip
    return out


@triton.jit
def combine_add_norm_kernel(
    outputs, weights, shared, gate, residual, norm, out, summed, eps, D: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine, add to the residual and norm, one row a program, with the bits of the separate kernels."""
    pdl_sync(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok, here = column < D, row * D + column
    before = tl.load(residual + here, mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(norm + column, mask=ok, other=0.0).to(tl.float32)
    combined = weighted_sum(outputs, weights, shared, gate, row, column, ok, D, TOP_K, HAS_SHARED, HAS_GATE)
    total = (combined.to(dtype).to(tl.float32) + before).to(dtype)
    tl.store(summed + here, total, mask=ok)
    tl.store(out + here, rms_normed(total.to(tl.float32), scale, eps, D, dtype).to(dtype), mask=ok)


def combine_add_norm(
    outputs: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None, residual: Tensor,
    norm: Tensor, eps: float, pdl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the RMS norm of `combine` plus residual [R, D], and the sum."""
    out, summed, (rows, width) = torch.empty_like(residual), torch.empty_like(residual), residual.shape
    block = next_power_of_two(width)
    combine_add_norm_kernel[(rows,)](
        outputs, weights, outputs if shared is None else shared, weights if gate is None else gate, residual,
        norm, out, summed, eps, D=width, TOP_K=weights.shape[1], BLOCK=block, HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        **launch_options(pdl, num_warps=max(1, min(8, block // 256)), enable_fp_fusion=False),
    )  # fmt: skip
    return out, summed
