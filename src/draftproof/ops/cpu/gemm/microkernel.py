"""Multiply-add loop of all FMA kernels: C [rows, 64] += A [rows, steps] x B [steps, 64], and a transpose.

GEMM and both products of attention are this loop. An element of C is one chain of fused multiply-adds
over ascending steps whatever the number of rows, so its bits depend on its own row alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from draftproof.ops.cpu.jit.compile import F32, I16, I32, I64, PTR, device, emit_prefetch, i64, llvm, op, void
from draftproof.ops.cpu.jit.simd import LANES, VF, VH, load_value, splat_value, widen_bf16

COLUMNS = 64  # columns per panel: 4 vectors
VECTORS = COLUMNS // LANES
_PREFETCH = 4096  # bytes ahead in B; one row alone does not hide the memory latency


def _scalar(builder: Any, addr: Any, bf16: bool) -> Any:
    pointer = builder.inttoptr(addr, PTR)
    if not bf16:
        return builder.load(pointer, typ=F32, align=1)
    bits = builder.zext(builder.load(pointer, typ=I16, align=1), I32)
    return builder.bitcast(builder.shl(bits, I32(16)), F32)


def _panel_of(rows: int, bf16: bool) -> Any:
    """Return an intrinsic (a, a_stride, b, b_stride, c, c_stride, steps) for a fixed number of rows."""
    size, b_vector = (2, VH) if bf16 else (4, VF)
    fma = llvm("llvm.fma.v16f32", VF, [VF, VF, VF])

    def build(builder: Any, args: Any) -> None:
        a, a_stride, b, b_stride, c, c_stride, steps = args
        sums = []
        for row in range(rows):
            base = builder.add(c, builder.mul(c_stride, I64(row)))
            for vector in range(VECTORS):
                where = builder.add(base, I64(64 * vector))
                slot = cgutils.alloca_once(builder, VF)
                builder.store(load_value(builder, where, VF), slot)
                sums.append((slot, where))
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            b_row = builder.add(b, builder.mul(b_stride, loop.index))
            a_column = builder.add(a, builder.mul(I64(size), loop.index))
            ahead = builder.inttoptr(builder.add(b_row, I64(_PREFETCH)), PTR)
            for line in range(COLUMNS * size // 64):
                emit_prefetch(builder, builder.gep(ahead, [I64(64 * line)], source_etype=ir.IntType(8)))
            vectors = []
            for vector in range(VECTORS):
                value = load_value(builder, builder.add(b_row, I64(LANES * size * vector)), b_vector)
                vectors.append(widen_bf16(builder, value) if bf16 else value)
            for row in range(rows):
                at = builder.add(a_column, builder.mul(a_stride, I64(row)))
                x = splat_value(builder, _scalar(builder, at, bf16), VF)
                for vector in range(VECTORS):
                    slot, _ = sums[row * VECTORS + vector]
                    total = builder.load(slot, typ=VF)
                    builder.store(fma(builder, [x, vectors[vector], total]), slot)
        for slot, where in sums:
            total = builder.load(slot, typ=VF)
            builder.store(total, builder.inttoptr(where, PTR), align=1)

    return op(void, [i64] * 7, build, f"panel_{'bf16' if bf16 else 'fp32'}_{rows}")


def _panel(bf16: bool) -> Any:
    one, two, three, four = (_panel_of(rows, bf16) for rows in (1, 2, 3, 4))

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


panel_f32, panel_bf16 = _panel(False), _panel(True)


def _transpose(builder: Any, args: Any) -> None:
    src, src_stride, dst, dst_stride = args
    lines = [load_value(builder, builder.add(src, builder.mul(src_stride, I64(i))), VF) for i in range(LANES)]
    index = ir.VectorType(I32, LANES)
    for step in (8, 4, 2, 1):  # swap the off-diagonal blocks of each size
        low = [i if not i & step else LANES + i - step for i in range(LANES)]
        high = [i + step if not i & step else LANES + i for i in range(LANES)]
        for i in range(LANES):
            if not i & step:
                a, b = lines[i], lines[i + step]
                lines[i] = builder.shuffle_vector(a, b, ir.Constant(index, low))
                lines[i + step] = builder.shuffle_vector(a, b, ir.Constant(index, high))
    for i in range(LANES):
        where = builder.add(dst, builder.mul(dst_stride, I64(i)))
        builder.store(lines[i], builder.inttoptr(where, PTR), align=1)


# src [16, 16], its stride, dst, its stride: 4 bytes per element, strides in bytes
transpose = op(void, [i64] * 4, _transpose)
