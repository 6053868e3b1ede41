"""Ops of latent attention on the GPU: checks and launches."""

from __future__ import annotations

from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import LatentAttention
from draftproof.ops.triton import kernel_utils
from draftproof.ops.triton.kernel_utils import FLOATS, FP32, LaunchContext, check_columns, check_rows
from draftproof.ops.triton.latent import kernels
from draftproof.types import Rows


class TritonLatent(ForwardOps):
    """Latent attention; the bits of a row do not depend on the other rows."""

    _launch: LaunchContext

    def pack_heads(self, weight: Tensor) -> Tensor:
        if weight.ndim != 3 or weight.dtype not in FLOATS:
            raise ConfigError(f"weights [H, N, K] are required, not {list(weight.shape)} {weight.dtype}")
        return weight  # any strides: key and value projections share the memory of one weight

    def head_linear(self, x: Tensor, packed: Tensor) -> Tensor:
        num_heads, width, depth = packed.shape
        x = kernel_utils.matrix("x", x, num_heads * depth, (packed.dtype,))
        return kernels.head_linear(x, packed, width, self._launch.early(x), None)

    def latent_store(
        self, qkv: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor, cache: Tensor
    ) -> Tensor:
        heads = attention.heads
        qkv = kernel_utils.matrix("qkv", qkv, attention.q_columns + heads.dim)
        rope = kernel_utils.matrix("rope", rope, attention.rope_dim, FP32)
        check_rows(rows, len(qkv), heads, cache, qkv.dtype)
        return kernels.latent_store(qkv, rows, attention, rope, cache, self._launch.early(qkv))

    def latent_queries(self, q: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor) -> Tensor:
        heads, key_up = attention.heads, attention.key_up
        width = heads.num_q * (attention.nope_dim + attention.rope_dim)
        if q.ndim != 2 or q.shape[1] != width or q.stride(1) != 1 or q.dtype != key_up.dtype:
            raise ConfigError(f"q must be [rows, {width}] {key_up.dtype}, not {list(q.shape)} {q.dtype}")
        rope = kernel_utils.matrix("rope", rope, attention.rope_dim, FP32)
        check_columns("positions", (rows.positions,), len(q))
        rotation = (rows, attention, rope)
        return kernels.head_linear(q, key_up, heads.dim, self._launch.early(q), rotation)
