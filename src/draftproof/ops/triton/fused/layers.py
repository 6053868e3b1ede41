"""All layers of a decoder in one cooperative kernel, for few rows: a grid barrier replaces the launches.

With few rows the ops of a layer are shorter than their launches. Here every program runs all layers and
their five stages: norm, QKV, rotary embedding and KV write; attention; output projection and residual; norm,
gate, up and SiLU-mul; down projection and residual. A stage is divided into items (tiles of columns, or spans
of keys). A program loads the weights of its item before it waits for the previous stage. One counter counts
the finished items of all stages; a stage waits until it has reached the number of all items before the stage.
All programs are resident, one or two per SM.

Bits equal those of the separate ops: the same functions, or the same partition of K and the same roundings.
The interpreter runs programs one after another, so there each stage is a launch of its own without barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import LatentAttention, Layer, Mlp, Rows
from draftproof.ops.triton.attention import splitkv
from draftproof.ops.triton.fused.address_tables import AddressTables
from draftproof.ops.triton.fused.attention import attention_stage, list_work_items
from draftproof.ops.triton.fused.barrier import wait
from draftproof.ops.triton.fused.gemm import add_linear_stage, gate_up_stage, qkv_stage
from draftproof.ops.triton.gemm.select import Epilogue, supports_fused
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import INTERPRETED, Chip, next_power_of_two

BM = 16  # rows of an item
BN = 32  # columns of an item; of paired columns half as many and their partners
PIECE_DEPTH = 64  # of K in one tensor core operation; with more the registers spill
MAX_PANEL_DEPTH = 1536  # columns of the down projection's weight in shared memory at a time
STAGE_ORDER = (6, 1, 2, 3, 4, 5)  # for the interpreter
WAVE_COST = 3  # spans of a tile that take as long as one wave of parallel spans with its merge
MERGE_COST = 2  # spans of a tile that take as long as the merge of pieces; 0: no pieces
NUM_WARPS = 4  # each further warp would read the same rows again
COUNTER_STRIDE = 32  # int32 elements, so that counters are on different cache lines
MIN_SHARED_PER_PROGRAM = 160 << 10  # bytes of shared memory
MIN_SHARED_PER_SM = 226 << 10  # bytes of shared memory
TABLE_FIELDS = 12  # of a layer in the address table


class RowConfig(NamedTuple):
    """Configuration of the kernel for a number of rows; speed only."""

    max_rows: int
    max_width: int  # columns of a layer: a weight tile and its rows must fit into shared memory
    programs_per_sm: int
    tiles: bool  # attention items may be tiles where not all spans fit on the chip
    gate_columns: int  # columns of an item of gate and up
    resident_pieces: int  # pieces of rows in shared memory beside the down projection's weight; 0: all


# One program per SM for few rows. With more rows two: one computes while the other waits.
ROW_CONFIGS = (
    RowConfig(6, 1024, 1, False, 32, 0),
    RowConfig(96, 704, 2, True, 64, 4),
    RowConfig(16, 1024, 1, False, 32, 0),
)
MAX_ROWS = max(config.max_rows for config in ROW_CONFIGS)  # above it separate ops are faster


@triton.jit
def to_pointer(address, dtype: tl.constexpr):
    """Return an aligned pointer to `address`."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def load_addresses(line):
    """Load the addresses of the tensors that every layer has; see `_addresses`."""
    return (
        tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3), tl.load(line + 4),
        tl.load(line + 5), tl.load(line + 6),
    )  # fmt: skip


@triton.jit
def all_rows_padding(slots, R, ROWS: tl.constexpr):
    """Return whether every row is padding."""
    r = tl.arange(0, ROWS)
    return tl.max(tl.load(slots + r, mask=r < R, other=-1), axis=0) < 0


@triton.jit(do_not_specialize=["R", "first_layer", "last_layer", "max_pages", "spans", "max_parallel"])
def fused_layers_kernel(
    table, x, q, mixed, inner, positions, slots, kv_index, page_table, rope, parts, stats, tile_counters,
    work_items, counter, taps, tokens, embedding, token_norm, R, first_layer, last_layer, max_pages, plane,
    spans, max_parallel, VOCAB, eps, scale,
    STAGE: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, PANELS: tl.constexpr,
    QKV_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr, TILES: tl.constexpr,
    WAVE_COST: tl.constexpr, MERGE_COST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr,
    PIECE_DEPTH: tl.constexpr, RESIDENT_PIECES: tl.constexpr, QM: tl.constexpr, ROWS: tl.constexpr,
    COUNTER_STRIDE: tl.constexpr, TABLE_FIELDS: tl.constexpr, TAPS: tl.constexpr,
    HAS_TOKEN_NORM: tl.constexpr,
):  # fmt: skip
    """Run layers first_layer..last_layer on x [R, H] in place.

    q, mixed [R, heads * D] and inner [R, INNER] are scratch; table: see `_addresses`. STAGE 0: all stages.
    TAPS: store the residual after that many layers to taps [R, TAPS, H] too. HAS_TOKEN_NORM: the layers, one
    layer of a draft head, also read the norm of the tokens' embedding [VOCAB, H], before their own rows.
    """
    if HAS_TOKEN_NORM:  # noqa: SIM102 - a constant, then a value on the device
        if all_rows_padding(slots, R, ROWS):  # a draft round without live rows: return before any arrival
            return
    GRID_SYNC: tl.constexpr = STAGE == 0
    dtype: tl.constexpr = x.dtype.element_ty
    if GRID_SYNC or STAGE == 6:
        list_work_items(
            slots, positions, work_items, counter, max_parallel, R,
            GROUP, QM, WINDOW, SPAN, TILES, WAVE_COST, MERGE_COST, ROWS, GRID_SYNC,
        )  # fmt: skip
    goal = R
    wait(counter, goal, GRID_SYNC)
    current = load_addresses(table + first_layer * TABLE_FIELDS)
    for layer in range(first_layer, last_layer):
        biases = table + layer * TABLE_FIELDS + 7
        # loaded early, so that the next iteration does not wait
        following = load_addresses(table + tl.minimum(layer + 1, last_layer - 1) * TABLE_FIELDS)
        cache = to_pointer(current[6], dtype)
        if GRID_SYNC or STAGE == 1:
            goal = qkv_stage(
                x, to_pointer(current[0], dtype), to_pointer(current[1], dtype), biases, q, cache, positions,
                slots, kv_index, rope, plane, eps, counter, goal, R, tokens, embedding, token_norm, VOCAB,
                NUM_KV * GROUP, NUM_KV, D, H, PIECE_DEPTH, BM, BN, QKV_BIAS, HAS_TOKEN_NORM, GRID_SYNC,
            )  # fmt: skip
        if GRID_SYNC or STAGE == 2:
            goal = attention_stage(
                q, slots, positions, page_table, cache, mixed, parts, stats, tile_counters, counter, goal,
                work_items, R, max_pages, plane, spans, scale, NUM_KV, GROUP, D, BD, QM, PAGE, WINDOW, KEYS,
                SPAN, ONES, TILES, MERGE_COST != 0, GRID_SYNC,
            )  # fmt: skip
        if GRID_SYNC or STAGE == 3:
            goal = add_linear_stage(
                mixed, to_pointer(current[2], dtype), biases + 1, x, x, -1, counter, goal, R, H,
                NUM_KV * GROUP * D, 1, 0, PIECE_DEPTH, BM, BN, OUT_BIAS, 0, GRID_SYNC,
            )  # fmt: skip
        if GRID_SYNC or STAGE == 4:
            goal = gate_up_stage(
                x, to_pointer(current[3], dtype), to_pointer(current[4], dtype), biases + 2, inner, eps,
                counter, goal, R, INNER, H, PIECE_DEPTH, BM, GATE, UP_BIAS, GRID_SYNC,
            )  # fmt: skip
        if GRID_SYNC or STAGE == 5:
            tap = tl.load(biases + 4) if TAPS else -1
            goal = add_linear_stage(
                inner, to_pointer(current[5], dtype), biases + 3, x, taps, tap, counter, goal, R, H, INNER,
                PANELS, RESIDENT_PIECES, PIECE_DEPTH, BM, BN, DOWN_BIAS, TAPS, GRID_SYNC,
            )  # fmt: skip
        current = following
    if GRID_SYNC:  # the last program resets the counters for the next launch
        num_left = tl.atomic_add(counter + COUNTER_STRIDE, 1, sem="acq_rel", scope="gpu")
        if num_left == tl.num_programs(0) - 1:
            tl.store(counter, 0)
            tl.store(counter + COUNTER_STRIDE, 0)


class FusedLayersKernel:
    """Launcher of the kernel; it owns the scratch and the address tables."""

    def __init__(self, device: torch.device, chip: Chip) -> None:
        self.device = device
        self.programs = chip.num_sms
        self.is_supported = INTERPRETED or (
            chip.capability >= (9, 0)
            and chip.shared_per_program >= MIN_SHARED_PER_PROGRAM
            and chip.shared_per_sm >= MIN_SHARED_PER_SM
        )
        self._held: list[Tensor] = []  # captured graphs may still use replaced scratch
        self._scratch: dict[str, Tensor] = {}
        self._tables = AddressTables(device)
        self._counter = torch.zeros(2 * COUNTER_STRIDE, dtype=torch.int32, device=device)

    def supports(self, x: Tensor, layers: Sequence[Layer]) -> bool:
        """Return whether the kernel runs these layers: few rows of a small bf16 model without QK norms."""
        if not self.is_supported or not 0 < len(x) <= MAX_ROWS or x.dtype != torch.bfloat16:
            return False
        if any(layer.token_norm is not None for layer in layers[1:]):
            return False
        if any(isinstance(layer.attention, LatentAttention) for layer in layers):
            return False
        return all(_row_config(layer, *x.shape) is not None for layer in layers)

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return the scratch of a name with at least `size` elements."""
        found = self._scratch.get(name)
        if found is None or found.numel() < size:
            found = self._scratch[name] = torch.zeros(size, dtype=dtype, device=self.device)
            self._held.append(found)
        return found

    def __call__(
        self, x: Tensor, layers: Sequence[Layer], rows: Rows, ropes: Sequence[Tensor],
        caches: Sequence[Tensor], eps: float, taps: Sequence[int] = (), embedding: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Run all layers on x in place and return the taps [R, taps, hidden]; None: nothing was run."""
        if any(rope is not ropes[0] for rope in ropes):
            return None
        addresses = [_addresses(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
        table = self._tables.table(addresses, taps)
        fits = (
            splitkv.scratch_fits(MAX_ROWS, layer.attention.heads, _spans(rows, cache))
            for layer, cache in zip(layers, caches, strict=True)
        )
        if table is None or not all(fits):
            return None
        tapped = torch.empty((len(x), len(taps), x.shape[1]), dtype=x.dtype, device=x.device)
        first = 0
        for _, run in groupby(layers, key=_layer_shape):
            last = first + len(list(run))
            one = layers[first], caches[first], tapped, embedding
            self._launch(table, x, rows, ropes[0], eps, first, last, *one)
            first = last
        return tapped

    def _launch(
        self, table: Tensor, x: Tensor, rows: Rows, rope: Tensor, eps: float, first: int, last: int,
        layer: Layer, cache: Tensor, tapped: Tensor, embedding: Tensor | None,
    ) -> None:  # fmt: skip
        """Launch the kernel for layers first..last of one shape."""
        count, hidden = x.shape
        attention, mlp, config = layer.attention, layer.mlp, _row_config(layer, count, hidden)
        assert config is not None and isinstance(mlp, Mlp), "checked by `supports`"
        heads, depth = attention.heads, mlp.down.weight.shape[1]
        width, page_size = heads.num_q * heads.dim, cache.shape[2]
        max_pages, padded = rows.page_table.shape[1], splitkv.padded_dim(heads)
        group, programs = heads.num_q // heads.num_kv, self.programs * config.programs_per_sm
        spans = _spans(rows, cache)
        lines = config.max_rows * heads.num_q * spans
        has_token_norm = layer.token_norm is not None
        assert not has_token_norm or embedding is not None
        launches = [(first, last, 0)]
        if INTERPRETED:
            launches = [(i, i + 1, s) for i in range(first, last) for s in STAGE_ORDER]
        for begin, end, stage in launches:
            fused_layers_kernel[(programs,)](
                table, x, self._buffer("q", MAX_ROWS * width, x.dtype),
                self._buffer("mixed", MAX_ROWS * width, x.dtype),
                self._buffer("inner", MAX_ROWS * depth, x.dtype),
                rows.positions, rows.slots, rows.kv_index, rows.page_table, rope,
                self._buffer("parts", lines * padded, torch.float32),
                self._buffer("stats", lines * 2, torch.float32),
                self._buffer("arrived", MAX_ROWS * heads.num_kv, torch.int32),
                self._buffer("listed", (1 + config.max_rows * spans) * 8, torch.int32), self._counter,
                tapped if tapped.numel() else x,
                rows.tokens, x if embedding is None else embedding, layer.token_norm if has_token_norm else x,
                count, begin, end, max_pages, cache.stride(0), spans, programs // heads.num_kv,
                len(embedding) if embedding is not None else 0, eps, heads.scale * splitkv.LOG2_E,
                STAGE=stage, H=hidden, INNER=depth, PANELS=_panels(mlp.down),
                QKV_BIAS=attention.qkv.bias is not None, OUT_BIAS=attention.out.bias is not None,
                UP_BIAS=mlp.gate_up.bias is not None, DOWN_BIAS=mlp.down.bias is not None,
                NUM_KV=heads.num_kv, GROUP=group, D=heads.dim, BD=padded, PAGE=page_size, WINDOW=heads.window,
                KEYS=splitkv.KEYS, SPAN=splitkv.SPAN, ONES=splitkv.ONES, TILES=config.tiles,
                WAVE_COST=WAVE_COST, MERGE_COST=MERGE_COST, BM=BM, BN=BN, GATE=config.gate_columns,
                PIECE_DEPTH=PIECE_DEPTH, RESIDENT_PIECES=config.resident_pieces,
                QM=max(16, next_power_of_two(group)), ROWS=max(16, next_power_of_two(config.max_rows)),
                COUNTER_STRIDE=COUNTER_STRIDE, TABLE_FIELDS=TABLE_FIELDS, TAPS=tapped.shape[1],
                HAS_TOKEN_NORM=has_token_norm, num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=False,
                **({} if INTERPRETED else {"launch_cooperative_grid": True}),
            )  # fmt: skip


def _spans(rows: Rows, cache: Tensor) -> int:
    """Return the maximum number of spans of a slot."""
    return triton.cdiv(rows.page_table.shape[1] * cache.shape[2], splitkv.SPAN)


def _panels(packed: PackedLinear) -> int:
    """Return the number of panels in which a weight passes through shared memory; 0: none fits."""
    depth = packed.weight.shape[1]
    return next((n for n in range(1, 9) if depth % (n * 64) == 0 and depth // n <= MAX_PANEL_DEPTH), 0)


def _projections(layer: Layer) -> tuple[PackedLinear, ...]:
    """Return the layer's packed weights in the order of its address table."""
    assert isinstance(layer.mlp, Mlp), "checked by `supports`"
    return layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down


def _layer_shape(layer: Layer) -> tuple[object, ...]:
    """Return what layers of one launch have in common."""
    shapes = ((p.weight.shape, p.bias is None) for p in _projections(layer))
    return layer.attention.heads, layer.token_norm is None, *shapes


def _row_config(layer: Layer, rows: int, hidden: int) -> RowConfig | None:
    """Return the configuration for `rows` rows of a layer; None: not supported."""
    attention, heads = layer.attention, layer.attention.heads
    if not isinstance(layer.mlp, Mlp):
        return None
    width = heads.num_q * heads.dim
    if attention.q_norm is not None or attention.k_norm is not None or heads.dim % BN:
        return None
    if attention.q_row_norm is not None or attention.sinks is not None:
        return None
    if layer.attention_norm is None or layer.mlp_norm is None or layer.residual_is_normed:
        return None
    if layer.attention_output_norm is not None or layer.mlp_output_norm is not None:
        return None
    if layer.mlp.activation != "silu" or layer.residual_scale != 1.0:
        return None
    if hidden % 64 or width % 64 or not _panels(layer.mlp.down):
        return None
    if not all(supports_fused(packed, rows, Epilogue.LAYERS) for packed in _projections(layer)):
        return None
    fitting = (f for f in ROW_CONFIGS if rows <= f.max_rows and max(hidden, width) <= f.max_width)
    return next(fitting, None)


def _addresses(layer: Layer, cache: Tensor) -> list[int]:
    """Return the table row of a layer: norm, qkv, out, norm, gate and up, down, cache, four biases."""
    assert layer.attention_norm is not None, "checked by `supports`"
    packed = _projections(layer)
    qkv, out, gate_up, down = (p.weight for p in packed)
    tensors = (layer.attention_norm, qkv, out, layer.mlp_norm, gate_up, down, cache)
    biases = (0 if p.bias is None else p.bias.data_ptr() for p in packed)
    return [*(tensor.data_ptr() for tensor in tensors), *biases]
