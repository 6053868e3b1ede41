"""All layers of a decoder in one kernel, for few rows: a barrier in place of a launch.

With few rows a layer's ops are so short that launching them takes longer than running them. Here every
program walks through the layers and their five stages: norm, qkv, rotation and KV write; attention; out
projection and residual; norm, gate, up and activation; down projection and residual. A stage is cut into
items (tiles of columns, or spans of keys). Programs take items in turn, load their weights before they wait
for the stage before, and count what they finished in one counter that only grows; who waits, waits for the
number of items of all stages before its own. All programs are on the chip at once, one or two of them an SM.

Bits are those of the ops one by one: the same bodies, or the same partition of K and the same roundings.
A stage runs alone as well, without the barrier: for tests, where programs run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import Layer, Rows
from draftproof.ops.triton.attention import splitkv
from draftproof.ops.triton.fused.attention import attend, list_items
from draftproof.ops.triton.fused.barrier import wait
from draftproof.ops.triton.fused.gemm import add_linear, gate_stage, qkv_stage
from draftproof.ops.triton.gemm.dense import PackedLinear
from draftproof.ops.triton.runtime import ALIGNMENT, INTERPRETED, next_power_of_two

BM = 16  # rows of an item
BN = 32  # columns of an item; where columns come in pairs, half as many and their partners
PIECE = 64  # of K goes through the tensor core at a time; with more the registers overflow
PANEL = 1536  # columns of the down projection's weight that are held at a time
STAGES = (6, 1, 2, 3, 4, 5)  # in their order, for programs that run one after another
WAVE = 3  # spans that a tile walks through while one runs beside others, is stored and folded
FOLD = 2  # and while pieces of tiles are stored and folded, about; 0: tiles are whole
WARPS = 4  # more of them read the same rows once more each
COOPERATIVE = not INTERPRETED  # all programs are on the chip at once, or the launch fails
LINE = 32  # int32 of a line of memory: counters lie apart
SHARED = 160 << 10  # bytes of shared memory that a program may need
ALL_SHARED = 226 << 10  # and all those of an SM
FIELDS = 12  # of a layer in the table of addresses


class Form(NamedTuple):
    """How a number of rows is worked on: speed alone."""

    most: int  # rows
    widest: int  # columns of a layer: a tile of weights has to fit into shared memory together with its rows
    abreast: int  # programs of an SM
    tiles: bool  # where spans of keys do not fit all at once, tiles of rows walk through theirs
    gate: int  # columns of an item of gate and up
    room: int  # pieces of rows in shared memory beside the down projection's weight; 0: all


# One program an SM for few rows. With more, two: one waits while the other works.
FORMS = (
    Form(6, 1024, 1, False, 32, 0),
    Form(96, 704, 2, True, 64, 4),
    Form(16, 1024, 1, False, 32, 0),
)
MOST = max(form.most for form in FORMS)  # rows; with more the ops one by one are quicker


@triton.jit
def pointer(address, dtype: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def addresses(line):
    """Of the tensors that every layer has; see `_addresses`."""
    return (
        tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3), tl.load(line + 4),
        tl.load(line + 5), tl.load(line + 6),
    )  # fmt: skip


@triton.jit
def nobody(slots, R, ROWS: tl.constexpr):
    """Is every row padding?"""
    r = tl.arange(0, ROWS)
    return tl.max(tl.load(slots + r, mask=r < R, other=-1), axis=0) < 0


@triton.jit(do_not_specialize=["R", "first_layer", "last_layer", "max_pages", "spans", "room"])
def blocks_kernel(
    table, x, q, mixed, inner, positions, slots, kv_index, page_table, rope, parts, stats, arrived, listed,
    counter, taps, tokens, embedding, token_norm, R, first_layer, last_layer, max_pages, plane, spans, room,
    VOCAB, eps, scale,
    STAGE: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, PANELS: tl.constexpr,
    QKV_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr, TILES: tl.constexpr,
    WAVE: tl.constexpr, FOLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr,
    PIECE: tl.constexpr, ROOM: tl.constexpr, QM: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr,
    FIELDS: tl.constexpr, TAPS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """x [R, H] becomes the residual after the last of these layers.

    q, mixed [R, heads * D], inner [R, INNER]: scratch; table: see `_addresses`. STAGE 0: all stages.
    TAPS: of so many layers the residual also goes to taps [R, TAPS, H]. JOINED: the layers, which are one and
    a head's, read the norm of the tokens' embedding [VOCAB, H] before their own rows.
    """
    if JOINED:  # noqa: SIM102 - a constant, then a value on the device
        if nobody(slots, R, ROWS):  # a round of drafts may be; all programs see it before one of them counts
            return
    ALL: tl.constexpr = STAGE == 0
    dtype: tl.constexpr = x.dtype.element_ty
    if ALL or STAGE == 6:
        list_items(
            slots, positions, listed, counter, room, R, GROUP, QM, WINDOW, SPAN, TILES, WAVE, FOLD, ROWS, ALL
        )
    goal = R
    wait(counter, goal, ALL)
    now = addresses(table + first_layer * FIELDS)
    for layer in range(first_layer, last_layer):
        biases = table + layer * FIELDS + 7
        after = addresses(table + tl.minimum(layer + 1, last_layer - 1) * FIELDS)  # in time for the next turn
        cache = pointer(now[6], dtype)
        if ALL or STAGE == 1:
            goal = qkv_stage(
                x, pointer(now[0], dtype), pointer(now[1], dtype), biases, q, cache, positions, slots,
                kv_index, rope, plane, eps, counter, goal, R, tokens, embedding, token_norm, VOCAB,
                NUM_KV * GROUP, NUM_KV, D, H, PIECE, BM, BN, QKV_BIAS, JOINED, ALL,
            )  # fmt: skip
        if ALL or STAGE == 2:
            goal = attend(
                q, slots, positions, page_table, cache, mixed, parts, stats, arrived, counter, goal,
                listed, R, max_pages, plane, spans, scale, NUM_KV, GROUP, D, BD, QM, PAGE, WINDOW, KEYS, SPAN,
                ONES, TILES, FOLD != 0, ALL,
            )  # fmt: skip
        if ALL or STAGE == 3:
            goal = add_linear(
                mixed, pointer(now[2], dtype), biases + 1, x, x, -1, counter, goal, R, H, NUM_KV * GROUP * D,
                1, 0, PIECE, BM, BN, OUT_BIAS, 0, ALL,
            )  # fmt: skip
        if ALL or STAGE == 4:
            goal = gate_stage(
                x, pointer(now[3], dtype), pointer(now[4], dtype), biases + 2, inner, eps, counter, goal,
                R, INNER, H, PIECE, BM, GATE, UP_BIAS, ALL,
            )  # fmt: skip
        if ALL or STAGE == 5:
            tap = tl.load(biases + 4) if TAPS else -1
            goal = add_linear(
                inner, pointer(now[5], dtype), biases + 3, x, taps, tap, counter, goal, R, H, INNER, PANELS,
                ROOM, PIECE, BM, BN, DOWN_BIAS, TAPS, ALL,
            )  # fmt: skip
        now = after
    if ALL:  # the last to leave makes the counters ready for the next launch
        left = tl.atomic_add(counter + LINE, 1, sem="acq_rel", scope="gpu")
        if left == tl.num_programs(0) - 1:
            tl.store(counter, 0)
            tl.store(counter + LINE, 0)


class Blocks:
    """Launches the kernel; owns its scratch and the tables of addresses."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.programs, self.able = 3, True
        if not INTERPRETED:
            chip = torch.cuda.get_device_properties(device)
            self.programs = chip.multi_processor_count
            self.able = (
                chip.major >= 9
                and getattr(chip, "shared_memory_per_block_optin", 0) >= SHARED
                and getattr(chip, "shared_memory_per_multiprocessor", 0) >= ALL_SHARED
            )
        self._held: list[Tensor] = []  # captured graphs may still point at scratch that was outgrown
        self._scratch: dict[str, Tensor] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._counter = torch.zeros(2 * LINE, dtype=torch.int32, device=device)

    def takes(self, x: Tensor, layers: Sequence[Layer]) -> bool:
        """Whether this kernel does it: few rows of a small model in bf16, without norms of q and k."""
        if not self.able or not 0 < len(x) <= MOST or x.dtype != torch.bfloat16:
            return False
        if any(layer.token_norm is not None for layer in layers[1:]):
            return False
        return all(_form(layer, *x.shape) is not None for layer in layers)

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        found = self._scratch.get(name)
        if found is None or found.numel() < size:
            found = self._scratch[name] = torch.zeros(size, dtype=dtype, device=self.device)
            self._held.append(found)
        return found

    def _table(self, layers: Sequence[Layer], caches: Sequence[Tensor], taps: Sequence[int]) -> Tensor | None:
        """[layers, FIELDS] int64 on the device; None if it cannot be made: during a capture."""
        lines = [_addresses(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
        if any(address % ALIGNMENT for line in lines for address in line):
            return None
        for i, line in enumerate(lines):
            line.append(taps.index(i) if i in taps else -1)
        key = tuple(address for line in lines for address in line)
        if key not in self._tables:
            if not INTERPRETED and torch.cuda.is_current_stream_capturing():
                return None
            self._tables[key] = torch.tensor(lines, dtype=torch.int64).to(self.device)
        return self._tables[key]

    def __call__(
        self,
        x: Tensor,
        layers: Sequence[Layer],
        rows: Rows,
        rope: Tensor,
        caches: Sequence[Tensor],
        eps: float,
        taps: Sequence[int] = (),
        embedding: Tensor | None = None,
    ) -> Tensor | None:
        """x becomes the residual after the last layer; [R, taps, hidden]. None: nothing was done."""
        table = self._table(layers, caches, taps)
        if table is None or not all(map(_scratch_fits, layers, [rows] * len(layers), caches)):
            return None
        tapped = torch.empty((len(x), len(taps), x.shape[1]), dtype=x.dtype, device=x.device)
        first = 0
        for _, run in groupby(layers, key=_shape):
            last = first + len(list(run))
            one = layers[first], caches[first], tapped, embedding
            self._launch(table, x, rows, rope, eps, first, last, *one)
            first = last
        return tapped

    def _launch(
        self, table: Tensor, x: Tensor, rows: Rows, rope: Tensor, eps: float, first: int, last: int,
        layer: Layer, cache: Tensor, tapped: Tensor, embedding: Tensor | None,
    ) -> None:  # fmt: skip
        count, hidden = x.shape
        attention, mlp, form = layer.attention, layer.mlp, _form(layer, count, hidden)
        heads, depth = attention.heads, mlp.down.weight.shape[1]
        assert form is not None, "`takes` has said so"
        width, page_size = heads.num_q * heads.dim, cache.shape[2]
        max_pages, padded = rows.page_table.shape[1], max(16, next_power_of_two(heads.dim))
        group, programs = heads.num_q // heads.num_kv, self.programs * form.abreast
        spans = _spans(rows, cache)
        lines = form.most * heads.num_q * spans
        joined = layer.token_norm is not None
        assert not joined or embedding is not None
        launches = [(first, last, 0)]
        if INTERPRETED:
            launches = [(i, i + 1, s) for i in range(first, last) for s in STAGES]
        for begin, end, stage in launches:
            blocks_kernel[(programs,)](
                table, x, self._buffer("q", MOST * width, x.dtype),
                self._buffer("mixed", MOST * width, x.dtype), self._buffer("inner", MOST * depth, x.dtype),
                rows.positions, rows.slots, rows.kv_index, rows.page_table, rope,
                self._buffer("parts", lines * padded, torch.float32),
                self._buffer("stats", lines * 2, torch.float32),
                self._buffer("arrived", MOST * heads.num_kv, torch.int32),
                self._buffer("listed", (1 + form.most * spans) * 8, torch.int32), self._counter,
                tapped if tapped.numel() else x,
                rows.tokens, x if embedding is None else embedding, layer.token_norm if joined else x,
                count, begin, end, max_pages, cache.stride(0), spans, programs // heads.num_kv,
                len(embedding) if embedding is not None else 0, eps, heads.scale * splitkv.LOG2_E,
                STAGE=stage, H=hidden, INNER=depth, PANELS=_panels(mlp.down),
                QKV_BIAS=attention.qkv.bias is not None, OUT_BIAS=attention.out.bias is not None,
                UP_BIAS=mlp.gate_up.bias is not None, DOWN_BIAS=mlp.down.bias is not None,
                NUM_KV=heads.num_kv, GROUP=group, D=heads.dim, BD=padded, PAGE=page_size, WINDOW=heads.window,
                KEYS=splitkv.KEYS, SPAN=splitkv.SPAN, ONES=splitkv.ONES, TILES=form.tiles, WAVE=WAVE,
                FOLD=FOLD, BM=BM, BN=BN, GATE=form.gate, PIECE=PIECE, ROOM=form.room,
                QM=max(16, next_power_of_two(group)), ROWS=max(16, next_power_of_two(form.most)), LINE=LINE,
                FIELDS=FIELDS, TAPS=tapped.shape[1], JOINED=joined,
                num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
                **({"launch_cooperative_grid": True} if COOPERATIVE else {}),
            )  # fmt: skip


def _spans(rows: Rows, cache: Tensor) -> int:
    return triton.cdiv(rows.page_table.shape[1] * cache.shape[2], splitkv.SPAN)


def _scratch_fits(layer: Layer, rows: Rows, cache: Tensor) -> bool:
    heads = layer.attention.heads
    size = MOST * heads.num_q * _spans(rows, cache) * max(16, next_power_of_two(heads.dim)) * 4
    return size <= splitkv.MOST_SCRATCH


def _panels(packed: PackedLinear) -> int:
    """In how many parts the rows of a weight pass through shared memory; 0: no number fits."""
    depth = packed.weight.shape[1]
    return next((n for n in range(1, 9) if depth % (n * 64) == 0 and depth // n <= PANEL), 0)


def _projections(layer: Layer) -> tuple[PackedLinear, ...]:
    """Return the layer's packed weights in the order of its address table."""
    return layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down


def _shape(layer: Layer) -> tuple[object, ...]:
    shapes = ((p.weight.shape, p.split, p.bias is None) for p in _projections(layer))
    return layer.attention.heads, layer.token_norm is None, *shapes


def _form(layer: Layer, rows: int, hidden: int) -> Form | None:
    """How this kernel works on so many rows of a layer; None: it does not."""
    attention, heads = layer.attention, layer.attention.heads
    width = heads.num_q * heads.dim
    if attention.q_norm is not None or attention.k_norm is not None or heads.dim % BN:
        return None
    if layer.attention_norm is None or layer.residual_is_normed:
        return None
    if hidden % 64 or width % 64 or not _panels(layer.mlp.down):
        return None
    if any(p.split > 1 for p in _projections(layer)):
        return None
    fitting = (f for f in FORMS if rows <= f.most and max(hidden, width) <= f.widest)
    return next(fitting, None)


def _addresses(layer: Layer, cache: Tensor) -> list[int]:
    """A layer's line of the table: norm, qkv, out, norm, gate and up, down, cache, four biases."""
    assert layer.attention_norm is not None, "`takes` has said so"
    packed = _projections(layer)
    norms, w = (
        (layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr()),
        [p.weight.data_ptr() for p in packed],
    )
    biases = [0 if p.bias is None else p.bias.data_ptr() for p in packed]
    return [norms[0], w[0], w[1], norms[1], w[2], w[3], cache.data_ptr(), *biases]
