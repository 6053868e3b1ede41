"""Dot products of int8 rows with weights in blocks: integer sums per group, added in fp32 by ascending K.

A strip of columns (as many as one vector of sums) is stored block by block. A block covers 32 consecutive k
and holds the scales of its groups, their minimums where the weight has some, then the integers: bytes, or two
of 4 bits in a byte. With two levels of scales, 8 blocks follow their fp16 bases, and the scales of a block
are int8 factors. Rows are stored in tiles: block by block, and row by row inside a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from draftproof.ops.contract.block_scales import BASE_BYTES, SUPER_BLOCK
from draftproof.ops.cpu.gemm.byte_dot import GROUP, Dot, emit_chains, emit_prefetches, emit_row_counts
from draftproof.ops.cpu.jit.compile import F32, I8, I64, PTR, i64, llvm, op, void
from draftproof.ops.cpu.jit.simd import load_value, splat_value

BLOCK = 32  # k of a block, which share one scale of the activations
SUPER_BLOCKS = SUPER_BLOCK // BLOCK  # blocks that share a base
SCALE_BYTES = {"fp16": 2, "fp32": 4, "int8": 1}
STEPS = BLOCK // GROUP


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Storage of a strip's blocks."""

    is_4bit: bool  # integers 0..15, two in a byte: steps s and s + 4
    group: int  # k that share a scale of the weights: 16 or 32
    has_min: bool
    scales: str  # type of scales and minimums, of SCALE_BYTES; int8: factors of fp16 bases
    columns: int  # of a strip

    @property
    def num_groups(self) -> int:
        """Return the groups of a block."""
        return BLOCK // self.group

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales, or of the minimums, of one group."""
        return self.columns * SCALE_BYTES[self.scales]

    @property
    def has_bases(self) -> bool:
        """Return whether scales are factors of bases."""
        return self.scales == "int8"

    @property
    def base_bytes(self) -> int:
        """Return the bytes of the bases in front of 8 blocks."""
        return self.columns * BASE_BYTES * (2 if self.has_min else 1) if self.has_bases else 0

    def strip_bytes(self, blocks: int) -> int:
        """Return the bytes of a strip of so many blocks."""
        return blocks * self.block_bytes + blocks // SUPER_BLOCKS * self.base_bytes

    @property
    def integers_at(self) -> int:
        """Return the offset of the integers in a block."""
        return self.num_groups * self.scale_bytes * (2 if self.has_min else 1)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return self.integers_at + self.columns * BLOCK // (2 if self.is_4bit else 1)

    @property
    def row_floats(self) -> int:
        """Return the floats of an activation block: its scale, then scale times sum of each group."""
        return 1 + self.num_groups


class _BlockEmitter:
    """Emission of the loop over the blocks of a strip, for a tile of 1 to `TILE_ROWS` rows."""

    def __init__(self, layout: BlockLayout, dot: Dot) -> None:
        self.layout, self.dot = layout, dot
        self.floats, self.floats_bytes = ir.VectorType(F32, dot.width), 4 * layout.row_floats
        self.fma = llvm(f"llvm.fma.v{dot.width}f32", self.floats, [self.floats] * 3)

    def build(self, builder: Any, args: Any) -> None:
        """Emit one loop for each number of rows."""
        rows, a, scales, b, c, blocks = args

        def emit(count: int) -> None:
            def body(index: Any, totals: list[Any]) -> list[Any]:
                block, bases = self._addresses(builder, b, index)
                x = builder.add(a, builder.mul(I64(count * BLOCK), index))
                f = builder.add(scales, builder.mul(I64(count * self.floats_bytes), index))
                return self._block(builder, block, bases, x, f, totals)

            emit_chains(builder, count, self.floats, blocks, c, body)

        emit_row_counts(builder, rows, emit)

    def _addresses(self, builder: Any, strip: Any, index: Any) -> tuple[Any, Any]:
        """Emit the address of a block, and that of its bases where the weight has some."""
        layout = self.layout
        block = builder.add(strip, builder.mul(I64(layout.block_bytes), index))
        if not layout.has_bases:
            return block, None
        group = builder.udiv(index, I64(SUPER_BLOCKS))
        block = builder.add(block, builder.mul(I64(layout.base_bytes), builder.add(group, I64(1))))
        return block, builder.add(strip, builder.mul(I64(layout.strip_bytes(SUPER_BLOCKS)), group))

    def _block(
        self, builder: Any, block: Any, bases: Any, x: Any, scales: Any, totals: list[Any]
    ) -> list[Any]:
        """Emit the totals of the rows plus the sums of one block."""
        emit_prefetches(builder, block, self.layout.block_bytes)
        integers, factors = self._integers(builder, block), self._factors(builder, block, bases)
        starts, steps = [], self.layout.group // GROUP
        for first in range(0, STEPS, steps):
            correction = self.dot.correction(builder, integers[first : first + steps])
            starts.append(self.dot.small_zero() if correction is None else correction)
        found: list[Any] = []
        for first in range(0, len(totals), self.dot.interleave):
            some = range(first, min(first + self.dot.interleave, len(totals)))
            words = [self.dot.row(builder, builder.add(x, I64(BLOCK * row)), STEPS) for row in some]
            floats = [builder.add(scales, I64(self.floats_bytes * row)) for row in some]
            old = [totals[row] for row in some]
            found += self._add(builder, old, starts, integers, factors, words, floats)
        return found

    def _float(self, builder: Any, addr: Any, index: int) -> Any:
        """Emit one float of an activation block in every lane."""
        where = builder.inttoptr(builder.add(addr, I64(4 * index)), PTR)
        return splat_value(builder, builder.load(where, typ=F32, align=1), self.floats)

    def _factors(self, builder: Any, block: Any, bases: Any) -> list[Any]:
        """Emit the scales of the groups, then their minimums where the weight has some, as fp32."""
        layout, found = self.layout, []
        stored = ir.VectorType(
            {"fp16": ir.HalfType(), "fp32": F32, "int8": I8}[layout.scales], layout.columns
        )
        halves = ir.VectorType(ir.HalfType(), layout.columns)
        for index in range(layout.integers_at // layout.scale_bytes):
            value = load_value(builder, builder.add(block, I64(index * layout.scale_bytes)), stored)
            if layout.scales == "fp16":
                value = builder.fpext(value, self.floats)
            elif layout.has_bases:
                at = builder.add(bases, I64(index // layout.num_groups * layout.columns * BASE_BYTES))
                base = builder.fpext(load_value(builder, at, halves), self.floats)
                value = builder.fmul(base, builder.sitofp(value, self.floats))
            found.append(value)
        return found

    def _integers(self, builder: Any, block: Any) -> list[Any]:
        """Emit the integers of the columns, one entry per step."""
        dot, products = self.dot, self.dot.products
        base, is_4bit = builder.add(block, I64(self.layout.integers_at)), self.layout.is_4bit
        loads = [
            load_value(builder, builder.add(base, I64(GROUP * dot.width * step)), products)
            for step in range(STEPS // 2 if is_4bit else STEPS)
        ]
        if is_4bit:
            low, high = (ir.Constant(products, [value] * products.count) for value in (15, 4))
            loads = [builder.and_(x, low) for x in loads] + [builder.lshr(x, high) for x in loads]
        return [dot.weights(builder, value) for value in loads]

    def _add(
        self, builder: Any, totals: Any, starts: Any, integers: Any, factors: Any, words: Any, floats: Any
    ) -> Any:
        """Emit the totals of some rows plus the sums of their groups over a block."""
        layout, dot, steps = self.layout, self.dot, self.layout.group // GROUP
        row_scales = [self._float(builder, at, 0) for at in floats]
        for group in range(layout.num_groups):
            sums = [starts[group]] * len(totals)
            for step in range(group * steps, (group + 1) * steps):
                sums = [
                    dot.add(builder, s, integers[step], w[step]) for s, w in zip(sums, words, strict=True)
                ]
            scaled = [builder.fmul(dot.small_to_float(builder, s), factors[group]) for s in sums]
            totals = [self.fma(builder, list(part)) for part in zip(scaled, row_scales, totals, strict=True)]
            if layout.has_min:
                row_sums = [self._float(builder, at, 1 + group) for at in floats]
                minimum = [factors[layout.num_groups + group]] * len(totals)
                totals = [
                    self.fma(builder, list(part)) for part in zip(minimum, row_sums, totals, strict=True)
                ]
        return totals


def strip_blocks(layout: BlockLayout, dot: Dot) -> Any:
    """Return an intrinsic (rows, a, scales, b, c, blocks) for a tile of rows and a strip of columns."""
    emitter = _BlockEmitter(layout, dot)
    parts = int(layout.is_4bit), layout.group, int(layout.has_min), layout.scales, layout.columns
    return op(void, [i64] * 6, emitter.build, f"strip_{dot.name}_" + "_".join(map(str, parts)))
