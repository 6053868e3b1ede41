"""Multiply-add loop of all FMA kernels: C [rows, 64] += A [rows, steps] x B [steps, 64], and a transpose.

GEMM and both products of attention are this loop. An element of C is one chain of fused multiply-adds
over ascending steps whatever the number of rows, so its bits depend on its own row alone.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from draftproof.ops.cpu.jit.compile import F32, I16, I32, I64, PTR, device, emit_prefetch, i64, llvm, op, void
from draftproof.ops.cpu.jit.simd import LANES, VF, VH, load_value, widen_bf16

COLUMNS = 64  # columns per panel: 4 vectors
VECTORS = COLUMNS // LANES
MAX_ROWS = 4  # rows that share a pass over B
HAS_AVX512 = bool(binding.get_host_cpu_features().get("avx512f"))
UNROLL = 4  # steps whose elements of A are loaded at once, where an instruction multiplies by a lane
_PREFETCH = 4096  # bytes ahead in B; one row alone does not hide the memory latency


def _panel_of(rows: int, bf16: bool, prefetches: bool) -> Any:
    """Return an intrinsic (a, a_stride, b, b_stride, c, c_stride, steps) for a fixed number of rows."""
    # several passes are faster than more sums than the registers hold
    vectors = VECTORS if HAS_AVX512 or rows == 1 else 1

    def build(builder: Any, args: Any) -> None:
        if vectors == VECTORS:
            _Pass(builder, args, rows, bf16, VECTORS, prefetches).emit(1 if HAS_AVX512 else UNROLL)
            return
        a, a_stride, b, b_stride, c, c_stride, steps = args
        with cgutils.for_range(builder, I64(VECTORS), intp=I64) as loop:
            from_b = builder.add(b, builder.mul(loop.index, I64(LANES * (2 if bf16 else 4))))
            from_c = builder.add(c, builder.mul(loop.index, I64(LANES * 4)))
            part = a, a_stride, from_b, b_stride, from_c, c_stride, steps
            _Pass(builder, part, rows, bf16, 1, prefetches).emit(UNROLL)

    return op(void, [i64] * 7, build, f"panel_{'bf16' if bf16 else 'fp32'}_{rows}_{vectors}_{prefetches}")


class _Pass:
    """Emission of the loop over the steps for the first vectors of columns."""

    def __init__(
        self, builder: Any, args: Any, rows: int, bf16: bool, vectors: int, prefetches: bool
    ) -> None:
        self.builder, self.rows, self.columns = builder, rows, range(vectors)
        self.a, self.a_stride, self.b, self.b_stride, self.c, self.c_stride, self.steps = args
        self.bf16, self.size, self.prefetches = bf16, 2 if bf16 else 4, prefetches
        self.fma = llvm("llvm.fma.v16f32", VF, [VF, VF, VF])

    def emit(self, unroll: int) -> None:
        """Emit the loop over groups of `unroll` steps, then over the rest."""
        builder = self.builder
        slots, targets = [], []
        for row, vector in product(range(self.rows), self.columns):
            base = builder.add(self.c, builder.mul(self.c_stride, I64(row)))
            targets.append(builder.add(base, I64(64 * vector)))
            slots.append(cgutils.alloca_once(builder, VF))
            builder.store(load_value(builder, targets[-1], VF), slots[-1])
        whole = builder.and_(self.steps, I64(-unroll))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(unroll), intp=I64) as (index, _):
            self._steps(index, unroll, slots)
        if unroll > 1:
            with cgutils.for_range_slice(builder, whole, self.steps, I64(1), intp=I64) as (index, _):
                self._steps(index, 1, slots)
        for slot, where in zip(slots, targets, strict=True):
            builder.store(builder.load(slot, typ=VF), builder.inttoptr(where, PTR), align=1)

    def _steps(self, index: Any, count: int, slots: Any) -> None:
        """Emit `count` steps from `index` on."""
        builder = self.builder
        lines = []
        for row in range(self.rows):
            base = builder.add(self.a, builder.mul(self.a_stride, I64(row)))
            lines.append(self._row(builder.add(base, builder.mul(I64(self.size), index)), count))
        for step in range(count):
            b = builder.add(self.b, builder.mul(self.b_stride, builder.add(index, I64(step))))
            for line in range(0, len(self.columns) * LANES * self.size if self.prefetches else 0, 64):
                emit_prefetch(builder, builder.inttoptr(builder.add(b, I64(_PREFETCH + line)), PTR))
            vectors = [self._vector(builder.add(b, I64(LANES * self.size * i))) for i in self.columns]
            for i, slot in enumerate(slots):
                row, column = divmod(i, len(vectors))
                total = builder.load(slot, typ=VF)
                builder.store(self.fma(builder, [self._lane(lines[row], step), vectors[column], total]), slot)

    def _row(self, addr: Any, count: int) -> Any:
        """Emit `count` elements of a row as fp32."""
        builder = self.builder
        if not self.bf16:
            return load_value(builder, addr, ir.VectorType(F32, count))
        bits = builder.zext(load_value(builder, addr, ir.VectorType(I16, count)), ir.VectorType(I32, count))
        shift = ir.Constant(ir.VectorType(I32, count), [16] * count)
        return builder.bitcast(builder.shl(bits, shift), ir.VectorType(F32, count))

    def _lane(self, line: Any, lane: int) -> Any:
        """Emit one element in every lane of a vector."""
        index = ir.Constant(ir.VectorType(I32, LANES), [lane] * LANES)
        return self.builder.shuffle_vector(line, ir.Constant(line.type, ir.Undefined), index)

    def _vector(self, addr: Any) -> Any:
        """Emit 16 columns of B as fp32."""
        if not self.bf16:
            return load_value(self.builder, addr, VF)
        return widen_bf16(self.builder, load_value(self.builder, addr, VH))


def _panel(bf16: bool, prefetches: bool) -> Any:
    one, two, three, four = (_panel_of(rows, bf16, prefetches) for rows in (1, 2, 3, 4))

    @device
    def panel(
        rows: int, a: int, a_stride: int, b: int, b_stride: int, c: int, c_stride: int, steps: int
    ) -> None:
        """Multiply A and B, up to 4 rows."""
        if rows == 1:
            one(a, a_stride, b, b_stride, c, c_stride, steps)
        elif rows == 2:
            two(a, a_stride, b, b_stride, c, c_stride, steps)
        elif rows == 3:
            three(a, a_stride, b, b_stride, c, c_stride, steps)
        else:
            four(a, a_stride, b, b_stride, c, c_stride, steps)

    return panel


panel_f32, panel_bf16 = _panel(False, True), _panel(True, True)
panel_cached = _panel(False, False)  # where B is in the cache


def _exchange(builder: Any, lines: list[Any]) -> None:
    """Emit the transpose of a square of vectors: swap the off-diagonal blocks of each size."""
    count = len(lines)
    index, step = ir.VectorType(I32, count), count // 2
    while step:
        low = [i if not i & step else count + i - step for i in range(count)]
        high = [i + step if not i & step else count + i for i in range(count)]
        for i in range(count):
            if not i & step:
                a, b = lines[i], lines[i + step]
                lines[i] = builder.shuffle_vector(a, b, ir.Constant(index, low))
                lines[i + step] = builder.shuffle_vector(a, b, ir.Constant(index, high))
        step //= 2


def _transpose(builder: Any, args: Any) -> None:
    src, src_stride, dst, dst_stride = args
    lines = [load_value(builder, builder.add(src, builder.mul(src_stride, I64(i))), VF) for i in range(LANES)]
    _exchange(builder, lines)
    for i in range(LANES):
        where = builder.add(dst, builder.mul(dst_stride, I64(i)))
        builder.store(lines[i], builder.inttoptr(where, PTR), align=1)


def _transpose_bf16(builder: Any, args: Any) -> None:
    src, src_stride, dst, dst_stride = args
    half = ir.VectorType(I16, 8)
    lines = [load_value(builder, builder.add(src, builder.mul(src_stride, I64(i))), half) for i in range(8)]
    _exchange(builder, lines)
    zero = ir.Constant(half, [0] * 8)
    for i in range(8):
        for part in range(2):  # zeros below bf16 make fp32
            order = [j // 2 + 4 * part + (8 if j % 2 else 0) for j in range(8)]
            words = builder.shuffle_vector(zero, lines[i], ir.Constant(ir.VectorType(I32, 8), order))
            where = builder.add(builder.add(dst, builder.mul(dst_stride, I64(i))), I64(16 * part))
            builder.store(words, builder.inttoptr(where, PTR), align=1)


def _transpose_bf16_pairs(builder: Any, args: Any) -> None:
    """Emit a transpose that moves two elements at a time."""
    src, src_stride, dst, dst_stride = args
    words = ir.VectorType(I32, LANES)
    lines = [
        load_value(builder, builder.add(src, builder.mul(src_stride, I64(i))), words) for i in range(LANES)
    ]
    _exchange(builder, lines)
    for i, line in enumerate(lines):
        low = builder.shl(line, ir.Constant(words, [16] * LANES))
        high = builder.and_(line, ir.Constant(words, [0xFFFF0000 - 2**32] * LANES))
        for element, value in enumerate((low, high)):
            where = builder.add(dst, builder.mul(dst_stride, I64(2 * i + element)))
            builder.store(value, builder.inttoptr(where, PTR), align=1)


def _transpose_few(builder: Any, args: Any) -> None:
    """Emit a transpose of 16 lines of 4 elements."""
    src, src_stride, dst, dst_stride = args
    quad, index = ir.VectorType(F32, 4), ir.VectorType(I32, LANES)
    vectors = []
    for first in range(4):  # lines first, first + 4, ... side by side
        parts = [
            load_value(builder, builder.add(src, builder.mul(src_stride, I64(first + 4 * i))), quad)
            for i in range(4)
        ]
        pairs = [
            builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, 8), list(range(8))))
            for a, b in (parts[:2], parts[2:])
        ]
        vectors.append(builder.shuffle_vector(*pairs, ir.Constant(index, list(range(LANES)))))
    halves = []
    for a, b in ((vectors[0], vectors[1]), (vectors[2], vectors[3])):
        for part in range(2):
            order = [4 * (i // 4) + 2 * part + i % 4 // 2 + LANES * (i % 2) for i in range(LANES)]
            halves.append(builder.shuffle_vector(a, b, ir.Constant(index, order)))
    for column in range(4):
        a, b = halves[column // 2], halves[2 + column // 2]
        # lines 0 and 1 of the column are elements 0 and 1 of each quarter of a, or 2 and 3
        order = [4 * (i // 4) + 2 * (column % 2) + i % 2 + LANES * (i % 4 // 2) for i in range(LANES)]
        where = builder.add(dst, builder.mul(dst_stride, I64(column)))
        value = builder.shuffle_vector(a, b, ir.Constant(index, order))
        builder.store(value, builder.inttoptr(where, PTR), align=1)


# src, its stride, dst, its stride (bytes): fp32 [16, 16] to fp32, bf16 [8, 8] and bf16 [16, 32] to fp32
transpose, transpose_bf16 = op(void, [i64] * 4, _transpose), op(void, [i64] * 4, _transpose_bf16)
transpose_bf16_pairs = op(void, [i64] * 4, _transpose_bf16_pairs)
transpose_few = op(void, [i64] * 4, _transpose_few)  # fp32 [16, 4]
