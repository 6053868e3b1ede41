"""Launcher of the kernel in `layers.py`: what it supports, its scratch and its address tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from draftproof.ops import Attention, Layer, Mlp, Rows
from draftproof.ops.triton.attention.online_softmax import LOG2_E
from draftproof.ops.triton.fused_dense.attention import COLUMNS
from draftproof.ops.triton.fused_dense.copies import OUTPUT_TILE, WINDOW_UNIT
from draftproof.ops.triton.fused_dense.layers import fused_dense_kernel
from draftproof.ops.triton.fused_dense.pool import UNIT
from draftproof.ops.triton.fused_dense.rows import FEW_COLUMNS, PIECE
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import next_power_of_two
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

MAX_SPANS = 128  # of a page table: with more tokens the separate ops, made for long contexts, are used
MIN_STAGES, MAX_STAGES = 8, 12  # stages of the ring
MAX_QKV_TILE = 64  # columns of q, k and v in a stage
MIN_HIDDEN, MAX_HIDDEN = 1024, 4096  # above and up to which; `fused/` runs narrower ones
STAGE_ELEMENTS = STAGE_ROWS.value * CHUNK.value


class Shape(NamedTuple):
    """Sizes of a layer that the kernel is compiled for."""

    hidden: int
    inner: int
    num_q: int
    num_kv: int
    dim: int
    has_bias: bool  # of q, k and v
    has_q_norm: bool
    has_k_norm: bool
    has_output_norm: bool  # norms of the outputs of attention and MLP
    activation: str
    scale: float  # of the scores of attention

    @property
    def width(self) -> int:
        """Return the columns of all query heads."""
        return self.num_q * self.dim

    @property
    def qkv(self) -> int:
        """Return the columns of q, k and v."""
        return (self.num_q + 2 * self.num_kv) * self.dim

    @property
    def weight_sizes(self) -> list[tuple[int, int]]:
        """Return the sizes of the weights: QKV, output, gate and up, down."""
        return [
            (self.qkv, self.hidden),
            (self.hidden, self.width),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]

    @property
    def qkv_tile(self) -> int:
        """Return the columns of q, k and v of a program, padded for a stage of the ring."""
        return FEW_COLUMNS.value if self.qkv // PROGRAMS <= FEW_COLUMNS.value else MAX_QKV_TILE

    @property
    def num_own_units(self) -> int:
        """Return the units of gate and up of a program; the others, an eighth or more, are in the pool."""
        return self.inner // PROGRAMS * 7 // 8 // UNIT.value

    @property
    def stages(self) -> int:
        """Return the number of stages of the ring for which shared memory is left."""
        padded, piece = next_power_of_two(self.hidden), PIECE.value
        row = max(padded, self.width, self.inner, 2 * HEAD_ROWS.value * self.dim)
        used = 2 * (triton.cdiv(row, piece) * piece + padded) + OTHER_SHARED_BYTES
        return min((SHARED_BYTES - used) // (2 * STAGE_ELEMENTS), MAX_STAGES)


def shape_of(layer: Layer) -> Shape | None:
    """Return the shape of a layer if the kernel supports it."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, Mlp) or not isinstance(attention, Attention):
        return None
    weights = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    if not all(isinstance(each, PackedLinear) and is_plain(each) for each in weights):
        return None
    if any(each.bias is not None for each in weights[1:]):
        return None
    output_norms = (layer.attention_output_norm, layer.mlp_output_norm)
    absent = (attention.q_row_norm, attention.sinks, layer.token_norm)
    present = (layer.attention_norm, layer.mlp_norm)
    if any(each is not None for each in absent) or any(each is None for each in present):
        return None
    if len({each is None for each in output_norms}) > 1 or layer.residual_is_normed:
        return None
    heads = attention.heads
    if heads.value_dim or mlp.activation not in ("silu", "gelu_tanh"):
        return None
    shape = Shape(
        mlp.down.columns, mlp.down.depth, heads.num_q, heads.num_kv, heads.dim,
        attention.qkv.bias is not None, attention.q_norm is not None, attention.k_norm is not None,
        output_norms[0] is not None, mlp.activation, heads.scale,
    )  # fmt: skip
    sizes = [tuple(each.weight.shape) for each in weights]
    is_same = layer.residual_scale == 1.0 and sizes == shape.weight_sizes
    is_same &= are_plain_norms(
        *((norm, shape.hidden) for norm in (*present, *output_norms)),
        *((norm, shape.dim) for norm in (attention.q_norm, attention.k_norm)),
    )
    return shape if is_same and fits(shape) else None


def is_plain(packed: PackedLinear) -> bool:
    """Return whether a weight is in bf16."""
    return packed.format is None and packed.weight.dtype == torch.bfloat16


def fits(shape: Shape) -> bool:
    """Return whether the products of a layer can be divided between programs and stages of the ring."""
    output_depth = STAGE_ELEMENTS // OUTPUT_TILE.value
    return (
        shape.dim in (COLUMNS.value, 2 * COLUMNS.value)
        and MIN_HIDDEN < shape.hidden <= MAX_HIDDEN
        and shape.hidden % (STAGE_ELEMENTS // (2 * UNIT.value)) == 0
        and shape.hidden % (STAGE_ELEMENTS // shape.qkv_tile) == 0
        and shape.qkv // PROGRAMS <= MAX_QKV_TILE
        and shape.num_q % shape.num_kv == 0
        and shape.num_q // shape.num_kv <= MMA_COLUMNS.value
        and shape.width <= MAX_HIDDEN
        and shape.width % output_depth == 0
        and shape.inner % output_depth == 0
        and shape.num_own_units > 0
        and shape.stages >= MIN_STAGES
    )


def addresses(layer: Layer, cache: Tensor, rope: Tensor) -> tuple[list[int], list[int]]:
    """Return the table lines of the attention and of the MLP of a layer; fields: see `copies.py`."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, Mlp) and isinstance(attention, Attention), "checked by `supports`"

    def line(*tensors: Tensor | None) -> list[int]:
        """Return the addresses of tensors."""
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    window = attention.heads.window * WINDOW_UNIT.value
    weights = (attention.qkv.weight, attention.out.weight, cache)
    inputs = (attention.q_norm, attention.k_norm, rope, attention.qkv.bias)
    first = [
        *line(layer.attention_norm, layer.attention_output_norm, *weights), window, *line(*inputs)
    ]  # fmt: skip
    second = line(layer.mlp_norm, layer.mlp_output_norm, mlp.gate_up.weight, mlp.down.weight)
    return first, second + [0] * (len(first) - len(second))


class FusedDenseLayers(OneRowLayers[Shape]):
    """Launcher of the kernel."""

    def shape_of(self, layer: Layer) -> Shape | None:
        return shape_of(layer)

    def make_scratch(self, shape: Shape, spans: int) -> list[Tensor]:
        """Return output, qkv, wide, parts, stats; see the kernel."""
        bf16, fp32 = torch.bfloat16, torch.float32
        sizes = (
            (shape.hidden, bf16), (shape.qkv, bf16), (max(shape.width, shape.inner), bf16),
            (shape.width * spans, fp32), (shape.num_q * spans * 2, fp32),
        )  # fmt: skip
        return [self._launch.empty((size,), dtype) for size, dtype in sizes]

    def __call__(
        self, x: Tensor, layers: Sequence[Layer], rows: Rows, ropes: Sequence[Tensor],
        caches: Sequence[Tensor], eps: float, taps: Sequence[int] = (), embedding: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Run all layers on x [1, hidden] in place; return the taps [1, taps, hidden].

        None: nothing was run. No supported layer reads `embedding`.
        """
        shape, cache = shape_of(layers[0]), caches[0]
        assert shape is not None, "checked by `supports`"
        spans = self.num_spans(layers, rows, caches)
        if not 0 < spans <= MAX_SPANS:
            return None
        pairs = [addresses(*each) for each in zip(layers, caches, ropes, strict=True)]
        lines = [line for pair in pairs for line in pair]
        table = self._tables.table(lines, [2 * tap + 1 for tap in taps])  # the MLP ends a layer
        scratch = self.scratch(shape, spans)
        if table is None or scratch is None:
            return None
        tapped = torch.empty((1, len(taps), x.shape[1]), dtype=x.dtype, device=x.device)
        fused_dense_kernel[(PROGRAMS,)](
            table, x, *scratch, tapped if taps else x, rows.positions, rows.slots, rows.kv_index,
            rows.page_table, self._counter, len(layers), rows.page_table.shape[1], cache.stride(0), spans,
            shape.num_own_units, eps, shape.scale * LOG2_E,
            H=shape.hidden, PADDED=next_power_of_two(shape.hidden), INNER=shape.inner, NUM_KV=shape.num_kv,
            GROUP=shape.num_q // shape.num_kv, D=shape.dim, PAGE=cache.shape[2],
            QKV=shape.qkv // PROGRAMS, QKV_TILE=shape.qkv_tile,
            HAS_BIAS=shape.has_bias, HAS_Q_NORM=shape.has_q_norm, HAS_K_NORM=shape.has_k_norm,
            HAS_OUTPUT_NORM=shape.has_output_norm, ACTIVATION=shape.activation, STAGES=shape.stages,
            COPY_REGISTERS=COPY_REGISTERS, num_warps=4, enable_fp_fusion=False, maxnreg=REGISTERS,
            launch_cooperative_grid=True,
        )  # fmt: skip
        return tapped
