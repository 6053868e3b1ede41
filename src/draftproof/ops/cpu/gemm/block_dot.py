"""Dot products of int8 rows with weights in blocks: integer sums per group, added in fp32 by ascending K.

A panel of 32 columns is stored block by block. A block covers 32 consecutive k and holds the scales of its
groups, their minimums where the weight has some, then the integers: bytes, or two of 4 bits in a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from draftproof.ops.cpu.gemm.byte_dot import COLUMNS, GROUP, load_word, select_dot, splat
from draftproof.ops.cpu.jit.compile import F32, I64, PTR, emit_prefetch, i64, llvm, op, void
from draftproof.ops.cpu.jit.simd import load_value

BLOCK = 32  # k of a block, which share one scale of the activations
STEPS = BLOCK // GROUP
PREFETCH_BYTES = 2048  # ahead in the weights


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Storage of a panel's blocks."""

    is_4bit: bool  # integers 0..15, two in a byte: steps s and s + 4
    group: int  # k that share a scale of the weights: 16 or 32
    has_min: bool
    is_fp16: bool  # scales and minimums are exact in fp16; otherwise fp32

    @property
    def num_groups(self) -> int:
        """Return the groups of a block."""
        return BLOCK // self.group

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales, or of the minimums, of one group."""
        return COLUMNS * (2 if self.is_fp16 else 4)

    @property
    def integers_at(self) -> int:
        """Return the offset of the integers in a block."""
        return self.num_groups * self.scale_bytes * (2 if self.has_min else 1)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return self.integers_at + COLUMNS * BLOCK // (2 if self.is_4bit else 1)

    @property
    def row_floats(self) -> int:
        """Return the floats of an activation block: its scale, then scale times sum of each group."""
        return 1 + self.num_groups


class _BlockEmitter:
    """Emission of the loop over the blocks of a panel for a fixed number of rows."""

    def __init__(self, layout: BlockLayout, rows: int, dot_product: bool) -> None:
        self.layout, self.rows, self.dot = layout, rows, select_dot(dot_product)
        self.vectors = COLUMNS // self.dot.width
        self.floats = ir.VectorType(F32, self.dot.width)
        name = f"llvm.fma.v{self.dot.width}f32"
        self.fma = llvm(name, self.floats, [self.floats] * 3)

    def build(self, builder: Any, args: Any) -> None:
        a, a_stride, scales, scale_stride, b, c, c_stride, blocks = args
        totals = []
        for _ in range(self.rows * self.vectors):
            totals.append(cgutils.alloca_once(builder, self.floats))
            builder.store(ir.Constant(self.floats, [0.0] * self.dot.width), totals[-1])
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            block = builder.add(b, builder.mul(I64(self.layout.block_bytes), loop.index))
            for line in range(0, self.layout.block_bytes, 64):
                where = builder.add(block, I64(PREFETCH_BYTES + line))
                emit_prefetch(builder, builder.inttoptr(where, PTR))
            words, factors = [], []
            for row in range(self.rows):
                base = builder.add(builder.add(a, builder.mul(a_stride, I64(row))),
                                   builder.mul(I64(BLOCK), loop.index))  # fmt: skip
                words.append([load_word(builder, builder.add(base, I64(GROUP * s))) for s in range(STEPS)])
                at = builder.add(builder.add(scales, builder.mul(scale_stride, I64(row))),
                                 builder.mul(I64(4 * self.layout.row_floats), loop.index))  # fmt: skip
                factors.append([self._float(builder, at, i) for i in range(self.layout.row_floats)])
            for vector in range(self.vectors):
                self._add_vector(builder, block, vector, words, factors, totals)
        for i, total in enumerate(totals):
            row, vector = divmod(i, self.vectors)
            base = builder.add(c, builder.mul(c_stride, I64(row)))
            where = builder.inttoptr(builder.add(base, I64(4 * self.dot.width * vector)), PTR)
            builder.store(builder.load(total, typ=self.floats), where, align=1)

    def _float(self, builder: Any, addr: Any, index: int) -> Any:
        """Emit one float of an activation block in every lane."""
        where = builder.inttoptr(builder.add(addr, I64(4 * index)), PTR)
        return splat(builder, builder.load(where, typ=F32, align=1), self.floats)

    def _weight_scale(self, builder: Any, block: Any, index: int, vector: int) -> Any:
        """Emit the scales (or minimums, by `index`) of the columns of a vector as fp32."""
        size = 2 if self.layout.is_fp16 else 4
        at = builder.add(block, I64(index * self.layout.scale_bytes + vector * self.dot.width * size))
        if not self.layout.is_fp16:
            return load_value(builder, at, self.floats)
        halves = load_value(builder, at, ir.VectorType(ir.HalfType(), self.dot.width))
        return builder.fpext(halves, self.floats)

    def _integers(self, builder: Any, block: Any, vector: int) -> list[Any]:
        """Emit the integers of the columns of a vector, one entry per step."""
        dot, products = self.dot, self.dot.products
        base = builder.add(block, I64(self.layout.integers_at + vector * GROUP * dot.width))
        loads = [
            load_value(builder, builder.add(base, I64(COLUMNS * GROUP * step)), products)
            for step in range(STEPS // 2 if self.layout.is_4bit else STEPS)
        ]
        if self.layout.is_4bit:
            low, high = (ir.Constant(products, [value] * products.count) for value in (15, 4))
            loads = [builder.and_(x, low) for x in loads] + [builder.lshr(x, high) for x in loads]
        return [dot.weights(builder, value) for value in loads]

    def _add_vector(
        self, builder: Any, block: Any, vector: int, words: Any, factors: Any, totals: Any
    ) -> None:
        """Emit the sums of one vector of columns over a block, and add them to the totals of every row."""
        layout, dot = self.layout, self.dot
        integers, steps = self._integers(builder, block, vector), layout.group // GROUP
        for group in range(layout.num_groups):
            scale = self._weight_scale(builder, block, group, vector)
            minimum = None
            if layout.has_min:
                minimum = self._weight_scale(builder, block, layout.num_groups + group, vector)
            for row in range(self.rows):
                found = ir.Constant(dot.sums, [0] * dot.width)
                for s in range(group * steps, (group + 1) * steps):
                    found = dot.add(builder, found, integers[s], dot.row(builder, words[row][s]))
                slot = totals[row * self.vectors + vector]
                total = builder.load(slot, typ=self.floats)
                scaled = builder.fmul(builder.sitofp(found, self.floats), scale)
                total = self.fma(builder, [scaled, factors[row][0], total])
                if minimum is not None:
                    total = self.fma(builder, [minimum, factors[row][1 + group], total])
                builder.store(total, slot)


def panel_blocks(layout: BlockLayout, rows: int, dot_product: bool) -> Any:
    """Return an intrinsic (a, a_stride, scales, scale_stride, b, c, c_stride, blocks) for `rows` rows."""
    emitter = _BlockEmitter(layout, rows, dot_product)
    parts = layout.is_4bit, layout.group, layout.has_min, layout.is_fp16, emitter.dot.width, rows
    return op(void, [i64] * 8, emitter.build, "block_panel_" + "_".join(str(int(part)) for part in parts))
