"""Ops of latent attention on the CPU: checks, then one or two kernel calls each."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import LatentAttention
from draftproof.ops.cpu.argument_checks import check_cache, check_rows, check_tensor, is_bf16
from draftproof.ops.cpu.attention import latent
from draftproof.ops.cpu.executor import SINGLE_THREAD_ELEMENTS, Executor
from draftproof.ops.cpu.jit.huge_pages import WeightMemory
from draftproof.types import Rows

PackedHeads = tuple[Tensor, int, int, int]  # panels, then H, N and K


class CpuLatent(ForwardOps):
    """Latent attention; a row has the same bits whatever the other rows and the thread count."""

    _run: Executor
    _memory: WeightMemory

    def pack_heads(self, weight: Tensor) -> PackedHeads:
        weight = check_tensor("weight", weight.detach(), 3)
        num_heads, width, depth = weight.shape
        return self._memory.hold(latent.pack_heads(weight)), num_heads, width, depth

    def head_linear(self, x: Tensor, packed: PackedHeads) -> Tensor:
        weight, num_heads, width, depth = packed
        x = check_tensor("x", x, 2, num_heads * depth, weight.dtype)
        out = self._run.new((x.shape[0], num_heads * width), x.dtype)
        self._multiply_heads(x, packed, out, x_width=depth, out_width=width)
        return out

    def _multiply_heads(
        self, x: Tensor, packed: PackedHeads, out: Tensor, *, x_width: int, out_width: int
    ) -> None:
        """Multiply the first columns of each head of x to the first columns of the head in `out`."""
        weight, num_heads, width, depth = packed
        small = x.shape[0] * num_heads * width * depth < SINGLE_THREAD_ELEMENTS
        sizes = (weight, num_heads, width, depth, x_width, out_width)
        kernel = latent.HEAD_LINEAR[is_bf16(x.dtype)]
        self._run.call(kernel, x.shape[0], [out], [x], sizes, small=small)

    def latent_store(
        self, qkv: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor, cache: Tensor
    ) -> Tensor:
        heads, columns = attention.heads, attention.q_columns
        qkv = check_tensor("qkv", qkv, 2, columns + heads.dim)
        rope = check_tensor("rope", rope, 2, attention.rope_dim, torch.float32)
        check_cache(cache, heads, qkv.dtype)
        check_tensor("norm", attention.latent_norm, 1, heads.value_dim, qkv.dtype)
        if attention.q_norm is not None:
            check_tensor("norm", attention.q_norm, 1, columns, qkv.dtype)
        count = qkv.shape[0]
        positions, kv_index = check_rows(rows, count, "positions", "kv_index")
        q = self._run.new((count, columns), qkv.dtype)
        places = cache.shape[1] * cache.shape[2]
        sizes = (columns, heads.value_dim, attention.rope_dim, rope.shape[0], places)
        options = (int(attention.rope_pairs), float(attention.norm_eps))
        constants = (rope, cache, attention.q_norm, attention.latent_norm, *sizes, *options)
        small = qkv.numel() < SINGLE_THREAD_ELEMENTS
        kernel = latent.LATENT_STORE[is_bf16(qkv.dtype)]
        self._run.call(kernel, count, [q], [qkv, positions, kv_index], constants, small=small)
        return q

    def latent_queries(self, q: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor) -> Tensor:
        heads, width = attention.heads, attention.nope_dim + attention.rope_dim
        q = check_tensor("q", q, 2, heads.num_q * width)
        rope = check_tensor("rope", rope, 2, attention.rope_dim, torch.float32)
        (positions,) = check_rows(rows, q.shape[0], "positions")
        out = self._run.new((q.shape[0], heads.num_q * heads.dim), q.dtype)
        self._multiply_heads(q, attention.key_up, out, x_width=width, out_width=heads.dim)
        sizes = (heads.num_q, width, heads.dim, attention.rope_dim, rope.shape[0], int(attention.rope_pairs))
        kernel, small = latent.ROTATE_QUERIES[is_bf16(q.dtype)], q.numel() < SINGLE_THREAD_ELEMENTS
        self._run.call(kernel, q.shape[0], [out], [q, positions], (rope, *sizes), small=small)
        return out
