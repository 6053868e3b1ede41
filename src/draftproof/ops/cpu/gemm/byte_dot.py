"""Dot products of int8 rows: C [rows, 32] int32 = A [rows, 4 steps] x B [steps, 32, 4].

The sums are integers, so their order and the instructions that compute them do not affect the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from draftproof.ops.cpu.jit.compile import I8, I16, I32, I64, PTR, device, emit_prefetch, i64, llvm, op, void
from draftproof.ops.cpu.jit.simd import load_value

COLUMNS = 32  # columns per panel
GROUP = 4  # consecutive k of a column, multiplied by one instruction
STEP_BYTES = COLUMNS * GROUP
MAX_ROWS = 2  # rows that share a pass over the weights: more exceed the registers of NEON
PREFETCH_BYTES = 2048  # ahead in B
# LLVM reports no feature for some of these, but selects their instructions by name
DOT_PRODUCT_CPUS = ("neoverse-", "apple-m", "ampere1", "cortex-a76", "cortex-a78", "cortex-x")


@cache
def has_dot_product() -> bool:
    """Return whether this machine has the NEON instruction for four products of bytes."""
    if not binding.get_default_triple().startswith(("aarch64", "arm64")):
        return False
    known = binding.get_host_cpu_name().startswith(DOT_PRODUCT_CPUS)
    return known or bool(binding.get_host_cpu_features().get("dotprod"))


class _NeonDot:
    """Emission of sums in vectors of 4 columns, by the instruction `sdot`."""

    sums, products = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
    width = 4

    def weights(self, builder: Any, products: Any) -> Any:
        return products

    def row(self, builder: Any, word: Any) -> Any:
        return builder.bitcast(splat(builder, word, self.sums), self.products)

    def add(self, builder: Any, total: Any, weights: Any, row: Any) -> Any:
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        return llvm(name, self.sums, [self.sums, self.products, self.products])(
            builder, [total, weights, row]
        )


class _WideDot:
    """Emission of sums in vectors of 16 columns, by products of 16-bit integers added in pairs.

    Bytes 0 and 2 of each column, then 1 and 3, become 16-bit integers. LLVM selects `vpmaddwd` for the
    products on x86.
    """

    sums, products, halves = ir.VectorType(I32, 16), ir.VectorType(I8, 64), ir.VectorType(I16, 32)
    width = 16

    def _split(self, builder: Any, halves: Any) -> tuple[Any, Any]:
        eight = ir.Constant(self.halves, [8] * 32)
        return builder.ashr(builder.shl(halves, eight), eight), builder.ashr(halves, eight)

    def weights(self, builder: Any, products: Any) -> Any:
        return self._split(builder, builder.bitcast(products, self.halves))

    def row(self, builder: Any, word: Any) -> Any:
        return self._split(builder, builder.bitcast(splat(builder, word, self.sums), self.halves))

    def add(self, builder: Any, total: Any, weights: Any, row: Any) -> Any:
        wide = ir.VectorType(I32, 32)
        for w, x in zip(weights, row, strict=True):
            products = builder.mul(builder.sext(w, wide), builder.sext(x, wide))
            parts = [
                builder.shuffle_vector(
                    products,
                    ir.Constant(wide, ir.Undefined),
                    ir.Constant(ir.VectorType(I32, 16), list(range(first, 32, 2))),
                )
                for first in (0, 1)
            ]
            total = builder.add(total, builder.add(*parts))
        return total


def splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """Emit a scalar in every lane of a vector type."""
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, undefined, zeros)


def select_dot(dot_product: bool) -> Any:
    """Return the emission of dot products; `dot_product`: with the NEON instruction."""
    return _NeonDot() if dot_product else _WideDot()


def load_word(builder: Any, addr: Any) -> Any:
    """Emit the load of four int8."""
    return builder.load(builder.inttoptr(addr, PTR), typ=I32, align=1)


def _panel_of(rows: int, dot: Any) -> Any:
    """Return an intrinsic (a, a_stride, b, c, c_stride, steps) for a fixed number of rows."""
    vectors = COLUMNS // dot.width

    def build(builder: Any, args: Any) -> None:
        a, a_stride, b, c, c_stride, steps = args
        slots = []
        for _ in range(rows * vectors):
            slots.append(cgutils.alloca_once(builder, dot.sums))
            builder.store(ir.Constant(dot.sums, [0] * dot.width), slots[-1])
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            b_step = builder.add(b, builder.mul(I64(STEP_BYTES), loop.index))
            a_step = builder.add(a, builder.mul(I64(GROUP), loop.index))
            for line in range(0, STEP_BYTES, 64):
                emit_prefetch(builder, builder.inttoptr(builder.add(b_step, I64(PREFETCH_BYTES + line)), PTR))
            a_rows = [builder.add(a_step, builder.mul(a_stride, I64(row))) for row in range(rows)]
            values = [dot.row(builder, load_word(builder, addr)) for addr in a_rows]
            for vector in range(vectors):
                at = builder.add(b_step, I64(GROUP * dot.width * vector))
                weights = dot.weights(builder, load_value(builder, at, dot.products))
                for row in range(rows):
                    slot = slots[row * vectors + vector]
                    total = builder.load(slot, typ=dot.sums)
                    builder.store(dot.add(builder, total, weights, values[row]), slot)
        for i, slot in enumerate(slots):
            row, vector = divmod(i, vectors)
            base = builder.add(c, builder.mul(c_stride, I64(row)))
            where = builder.inttoptr(builder.add(base, I64(4 * dot.width * vector)), PTR)
            builder.store(builder.load(slot, typ=dot.sums), where, align=1)

    return op(void, [i64] * 6, build, f"byte_panel_{dot.width}_{rows}")


def make_panel(dot_product: bool) -> Any:
    """Return the device function for up to `MAX_ROWS` rows; `dot_product`: with the NEON instruction."""
    dot = select_dot(dot_product)
    one, two = _panel_of(1, dot), _panel_of(2, dot)

    @device
    def panel(rows: int, a: int, a_stride: int, b: int, c: int, c_stride: int, steps: int) -> None:
        """Multiply A and B, up to 2 rows."""
        if rows == 1:
            one(a, a_stride, b, c, c_stride, steps)
        else:
            two(a, a_stride, b, c, c_stride, steps)

    return panel
