"""Launcher of the kernel in `layers.py`: what it supports, its scratch and its address tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.ops import Attention, Layer, Moe, Rows
from draftproof.ops.triton.attention.online_softmax import LOG2_E
from draftproof.ops.triton.fused_moe.experts import INNER_WIDTH, ROUTER_COLUMNS, UNSET
from draftproof.ops.triton.fused_moe.layers import fused_moe_kernel
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import next_power_of_two
from draftproof.ops.triton.moe.op import PackedRouter
from draftproof.ops.triton.one_row.launcher import (
    COPY_REGISTERS,
    OTHER_SHARED_BYTES,
    PROGRAMS,
    REGISTERS,
    SHARED_BYTES,
    OneRowLayers,
    are_plain_norms,
)
from draftproof.ops.triton.one_row.ring import CHUNK, MMA_COLUMNS, STAGE_ROWS
from draftproof.ops.triton.one_row.spans import HEAD_ROWS

STAGES = 11  # stages of the ring
LOGITS = 5  # index of the logits in the scratch
TABLE_FIELDS = 11  # fields of a layer in the address table


class Shape(NamedTuple):
    """Sizes of a layer that the kernel is compiled for."""

    hidden: int
    num_experts: int
    top_k: int
    inner: int
    num_q: int
    num_kv: int
    dim: int
    has_q_norm: bool
    has_k_norm: bool
    normalizes: bool
    scale: float  # of the scores of attention
    route_scale: float

    @property
    def width(self) -> int:
        """Return the columns of all query heads."""
        return self.num_q * self.dim

    @property
    def weight_sizes(self) -> list[tuple[int, int]]:
        """Return the sizes of the weights: QKV, output, router, gate and up, down."""
        return [
            ((self.num_q + 2 * self.num_kv) * self.dim, self.hidden),
            (self.hidden, self.width),
            (self.num_experts, self.hidden),
            (self.num_experts * 2 * self.inner, self.hidden),
            (self.num_experts * self.hidden, self.inner),
        ]

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a program."""
        row = max(self.hidden, self.width, HEAD_ROWS.value * self.dim)
        inner = max(self.top_k, MMA_COLUMNS.value) * self.inner
        return 2 * (STAGES * STAGE_ROWS.value * CHUNK.value + row + inner) + OTHER_SHARED_BYTES

    @property
    def columns(self) -> tuple[int, int, int]:
        """Return the columns of a program: of the output, of gate, and of q, k and v."""
        heads = self.num_q + 2 * self.num_kv
        return (
            self.hidden // PROGRAMS,
            self.top_k * self.inner // PROGRAMS,
            heads * self.dim // PROGRAMS,
        )


def shape_of(layer: Layer) -> Shape | None:
    """Return the shape of a layer if the kernel supports it."""
    attention, moe = layer.attention, layer.mlp
    if (
        not isinstance(moe, Moe)
        or not isinstance(attention, Attention)
        or not isinstance(moe.router, PackedRouter)
    ):
        return None
    weights = (attention.qkv, attention.out, moe.router.linear, moe.gate_up, moe.down)
    if not all(isinstance(each, PackedLinear) and is_plain(each) for each in weights):
        return None
    rule, heads = moe.routing, attention.heads
    if (rule.scoring, rule.num_groups) != ("softmax", 1) or moe.activation != "silu":
        return None
    absent = (
        moe.correction, moe.shared, moe.part, attention.q_row_norm, attention.sinks, layer.token_norm,
        layer.attention_output_norm, layer.mlp_output_norm,
    )  # fmt: skip
    if any(each is not None for each in absent) or heads.window or heads.value_dim:
        return None
    if layer.attention_norm is None or layer.mlp_norm is None or layer.residual_is_normed:
        return None
    shape = Shape(
        moe.down.columns // rule.num_experts, rule.num_experts, rule.top_k, moe.down.depth, heads.num_q,
        heads.num_kv, heads.dim, attention.q_norm is not None, attention.k_norm is not None, rule.normalize,
        heads.scale, rule.scale,
    )  # fmt: skip
    sizes = [tuple(each.weight.shape) for each in weights]
    is_same = layer.residual_scale == 1.0 and sizes == shape.weight_sizes
    is_same &= are_plain_norms(
        (layer.attention_norm, shape.hidden), (layer.mlp_norm, shape.hidden),
        (attention.q_norm, shape.dim), (attention.k_norm, shape.dim),
    )  # fmt: skip
    return shape if is_same and fits(shape) else None


def is_plain(packed: PackedLinear) -> bool:
    """Return whether a weight is in bf16 and has no bias."""
    return packed.format is None and packed.bias is None and packed.weight.dtype == torch.bfloat16


def fits(shape: Shape) -> bool:
    """Return whether the products of a layer can be divided between programs and stages of the ring."""
    out, gate, qkv = shape.columns
    products = (shape.top_k * shape.inner, (shape.num_q + 2 * shape.num_kv) * shape.dim)
    return (
        shape.dim == 128
        and shape.shared_bytes <= SHARED_BYTES
        and shape.num_q == next_power_of_two(shape.num_q)
        and shape.num_q % shape.num_kv == 0
        and shape.num_q // shape.num_kv + 2 <= HEAD_ROWS.value
        and all(columns % PROGRAMS == 0 for columns in products)
        and out * shape.top_k == STAGE_ROWS.value
        and out in (8, 16, 32)
        and shape.hidden % 1024 == 0
        and shape.width % 1024 == 0
        and shape.width // PROGRAMS <= shape.dim
        and shape.inner % INNER_WIDTH.value == 0
        and shape.inner % gate == 0
        and max(gate, qkv) <= STAGE_ROWS.value // 2
        and shape.num_experts in (32, 64, 128, 256)
        and PROGRAMS % (shape.num_experts // ROUTER_COLUMNS.value) == 0
        and PROGRAMS % shape.num_kv == 0
    )


def addresses(layer: Layer, cache: Tensor) -> list[int]:
    """Return the table row of a layer: norms, norms of q and k, cache, weights in the order of stages."""
    attention, moe = layer.attention, layer.mlp
    assert isinstance(moe, Moe) and isinstance(attention, Attention), "checked by `supports`"
    tensors = (
        layer.attention_norm, layer.mlp_norm, attention.q_norm, attention.k_norm, cache,
        attention.qkv.weight, attention.out.weight, moe.router.linear.weight, moe.gate_up.weight,
        moe.down.weight,
    )  # fmt: skip
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


class FusedMoeLayers(OneRowLayers[Shape]):
    """Launcher of the kernel."""

    def shape_of(self, layer: Layer) -> Shape | None:
        return shape_of(layer)

    def make_scratch(self, shape: Shape, spans: int) -> list[Tensor]:
        """Return middle, qkv, mixed, parts, stats, logits, inner; see the kernel."""
        bf16, fp32 = torch.bfloat16, torch.float32
        sizes = (
            (shape.hidden, bf16), ((shape.num_q + 2 * shape.num_kv) * shape.dim, bf16),
            (shape.width, bf16), (shape.width * spans, fp32), (shape.num_q * spans * 2, fp32),
            (shape.num_experts, fp32), (shape.top_k * shape.inner, bf16),
        )  # fmt: skip
        made = [self._launch.empty((size,), dtype) for size, dtype in sizes]
        made[LOGITS].view(torch.int32).fill_(UNSET.value)
        return made

    def __call__(
        self, x: Tensor, layers: Sequence[Layer], rows: Rows, ropes: Sequence[Tensor],
        caches: Sequence[Tensor], eps: float, taps: Sequence[int] = (), embedding: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Run all layers on x [1, hidden] in place; return the taps [1, taps, hidden].

        None: nothing was run. No supported layer reads `embedding`.
        """
        shape = shape_of(layers[0])
        assert shape is not None, "checked by `supports`"
        spans, cache = self.num_spans(layers, rows, caches), caches[0]
        if not spans or any(rope is not ropes[0] for rope in ropes):
            return None
        lines = [addresses(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
        table, scratch = self._tables.table(lines, taps), self.scratch(shape, spans)
        if table is None or scratch is None:
            return None
        tapped = torch.empty((1, len(taps), x.shape[1]), dtype=x.dtype, device=x.device)
        out, gate, qkv = shape.columns
        fused_moe_kernel[(PROGRAMS,)](
            table, x, *scratch, tapped if taps else x, rows.positions, rows.slots,
            rows.kv_index, rows.page_table, ropes[0], self._counter, len(layers), rows.page_table.shape[1],
            cache.stride(0), spans, shape.top_k, shape.inner // INNER_WIDTH.value, eps, shape.scale * LOG2_E,
            shape.route_scale,
            H=shape.hidden, E=shape.num_experts, TOP_K=shape.top_k, INNER=shape.inner, NUM_KV=shape.num_kv,
            GROUP=shape.num_q // shape.num_kv, D=shape.dim, PAGE=cache.shape[2], OUT=out, GATE=gate, QKV=qkv,
            Q_NORM=shape.has_q_norm, K_NORM=shape.has_k_norm, NORMALIZE=shape.normalizes, STAGES=STAGES,
            FIELDS=TABLE_FIELDS, COPY_REGISTERS=COPY_REGISTERS, num_warps=4, enable_fp_fusion=False,
            maxnreg=REGISTERS, launch_cooperative_grid=True,
        )  # fmt: skip
        return tapped
