"""QK norm, rotary embedding and KV cache write in one kernel.

Compiled without contraction of multiply and add, so that the fused GEMM (`gemm/fused.py`) rotates with the
same bits. A row whose slot is negative is padding: its q is computed, its k and v are not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import Attention, Rows
from draftproof.ops.triton.attention.kv_cache import store_kv
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_launch_next, pdl_wait

HEADS_PER_PROGRAM = 16  # fixed, so that the norm of a head has one reduction tree


@triton.jit
def rope_store_kernel(
    qkv, positions, slots, kv_index, rope, cache, out, q_norm, k_norm, eps, plane,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rotate qkv [R, TOTAL * D]: q to out [R, NUM_Q * D], k and v to the cache.

    Everything but qkv is read before the wait: norm weights, position, rope row, slot, KV index. See
    `pdl_begin_pass`.
    """
    pdl_launch_next(PDL)
    TOTAL: tl.constexpr = NUM_Q + 2 * NUM_KV
    MIDDLE: tl.constexpr = D // 2
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)  # [HEADS]
    j = tl.arange(0, HALF)
    valid = (head < TOTAL)[:, None] & (j < MIDDLE)[None, :]
    if Q_NORM:
        w1 = tl.load(q_norm + j, mask=j < MIDDLE, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(q_norm + MIDDLE + j, mask=j < MIDDLE, other=0.0).to(tl.float32)[None, :]
    if K_NORM:
        w3 = tl.load(k_norm + j, mask=j < MIDDLE, other=0.0).to(tl.float32)[None, :]
        w4 = tl.load(k_norm + MIDDLE + j, mask=j < MIDDLE, other=0.0).to(tl.float32)[None, :]
    angle = rope + tl.load(positions + row) * D + j
    cos = tl.load(angle, mask=j < MIDDLE, other=0.0)[None, :]
    sin = tl.load(angle + MIDDLE, mask=j < MIDDLE, other=0.0)[None, :]
    index, slot = tl.load(kv_index + row), tl.load(slots + row)
    pdl_wait(PDL)
    is_q, is_v = head < NUM_Q, head >= NUM_Q + NUM_KV
    source = qkv + row * TOTAL * D + head[:, None] * D + j[None, :]
    first = tl.load(source, mask=valid, other=0.0).to(tl.float32)  # [HEADS, HALF]
    second = tl.load(source + MIDDLE, mask=valid, other=0.0).to(tl.float32)
    x, y = first, second
    if Q_NORM or K_NORM:
        scale = tl.rsqrt(tl.sum(x * x + y * y, axis=1) / D + eps)[:, None]
        x_unit, y_unit = (x * scale).to(dtype).to(tl.float32), (y * scale).to(dtype).to(tl.float32)
        if Q_NORM:
            x = tl.where(is_q[:, None], (x_unit * w1).to(dtype).to(tl.float32), x)
            y = tl.where(is_q[:, None], (y_unit * w2).to(dtype).to(tl.float32), y)
        if K_NORM:
            x = tl.where(is_q[:, None], x, (x_unit * w3).to(dtype).to(tl.float32))
            y = tl.where(is_q[:, None], y, (y_unit * w4).to(dtype).to(tl.float32))
    low = tl.where(is_v[:, None], first, x * cos - y * sin).to(dtype)
    high = tl.where(is_v[:, None], second, y * cos + x * sin).to(dtype)
    q_at = out + row * NUM_Q * D + head[:, None] * D + j[None, :]
    tl.store(q_at, low, mask=valid & is_q[:, None])
    tl.store(q_at + MIDDLE, high, mask=valid & is_q[:, None])
    kv_head = tl.where(is_v, head - NUM_KV, head) - NUM_Q
    stored = valid & (head >= NUM_Q)[:, None] & (slot >= 0)
    plane_offset = tl.where(is_v, plane, 0)[:, None]
    store_kv(cache, plane_offset, index, kv_head[:, None], j[None, :], low, high, stored, NUM_KV, D, PAGE)


def rope_store(
    qkv: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float, pdl: bool
) -> Tensor:
    """Return q [R, NUM_Q * D]; k and v are stored to `cache`."""
    heads, q_norm, k_norm = attention.heads, attention.q_norm, attention.k_norm
    total = heads.num_q + 2 * heads.num_kv
    out = torch.empty((len(qkv), heads.num_q * heads.dim), dtype=qkv.dtype, device=qkv.device)
    rope_store_kernel[(len(qkv), triton.cdiv(total, HEADS_PER_PROGRAM))](
        qkv, rows.positions, rows.slots, rows.kv_index, rope, cache, out,
        rope if q_norm is None else q_norm, rope if k_norm is None else k_norm, eps, cache.stride(0),
        NUM_Q=heads.num_q, NUM_KV=heads.num_kv, D=heads.dim, HALF=next_power_of_two(heads.dim // 2),
        PAGE=cache.shape[2], HEADS_PER_PROGRAM=HEADS_PER_PROGRAM,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        **launch_options(pdl, num_warps=4, enable_fp_fusion=False),
    )  # fmt: skip
    return out
