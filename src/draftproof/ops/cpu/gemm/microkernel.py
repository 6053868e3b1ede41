"""Multiply-add loop of all FMA kernels: C [rows, 64] += A [rows, steps] x B [steps, 64], and a transpose.

GEMM and both products of attention are this loop. An element of C is one chain of fused multiply-adds
over ascending steps whatever the number of rows, so its bits depend on its own row alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from draftproof.ops.cpu.jit.compile import F32, I16, I32, I64, PTR, device
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


def _panel(rows: int, a_bf16: bool, b_bf16: bool) -> Any:
    """Return an intrinsic (a, a_stride, b, b_stride, c, c_stride, steps) for a fixed number of rows."""
    a_size, b_vector = (2 if a_bf16 else 4), (VH if b_bf16 else VF)
    b_bytes = LANES * (2 if b_bf16 else 4)

    @intrinsic
    def panel(
        typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, n: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            a, a_stride, b, b_stride, c, c_stride, steps = args
            fma = builder.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(VF, [VF, VF, VF]))
            prefetch = builder.module.declare_intrinsic(
                "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
            )
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
                a_column = builder.add(a, builder.mul(I64(a_size), loop.index))
                ahead = builder.inttoptr(builder.add(b_row, I64(_PREFETCH)), PTR)
                for line in range(VECTORS * b_bytes // 64):
                    pointer = builder.gep(ahead, [I64(64 * line)], source_etype=ir.IntType(8))
                    builder.call(prefetch, [pointer, I32(0), I32(3), I32(1)])
                vectors = []
                for vector in range(VECTORS):
                    at = builder.add(b_row, I64(b_bytes * vector))
                    value = load_value(builder, at, b_vector)
                    vectors.append(widen_bf16(builder, value) if b_bf16 else value)
                for row in range(rows):
                    at = builder.add(a_column, builder.mul(a_stride, I64(row)))
                    x = splat_value(builder, _scalar(builder, at, a_bf16), VF)
                    for vector in range(VECTORS):
                        slot, _ = sums[row * VECTORS + vector]
                        total = builder.load(slot, typ=VF)
                        builder.store(builder.call(fma, [x, vectors[vector], total]), slot)
            for slot, where in sums:
                total = builder.load(slot, typ=VF)
                builder.store(total, builder.inttoptr(where, PTR), align=1)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return panel


_f1, _f2, _f3, _f4 = (_panel(rows, False, False) for rows in (1, 2, 3, 4))
_h1, _h2, _h3, _h4 = (_panel(rows, True, True) for rows in (1, 2, 3, 4))


@device
def panel_f32(
    rows: int, a: int, a_stride: int, b: int, b_stride: int, c: int, c_stride: int, steps: int
) -> None:
    """Multiply fp32 A and B, up to 4 rows."""
    if rows == 1:
        _f1(a, a_stride, b, b_stride, c, c_stride, steps)
    elif rows == 2:
        _f2(a, a_stride, b, b_stride, c, c_stride, steps)
    elif rows == 3:
        _f3(a, a_stride, b, b_stride, c, c_stride, steps)
    else:
        _f4(a, a_stride, b, b_stride, c, c_stride, steps)


@device
def panel_bf16(
    rows: int, a: int, a_stride: int, b: int, b_stride: int, c: int, c_stride: int, steps: int
) -> None:
    """Multiply bf16 A and B, up to 4 rows."""
    if rows == 1:
        _h1(a, a_stride, b, b_stride, c, c_stride, steps)
    elif rows == 2:
        _h2(a, a_stride, b, b_stride, c, c_stride, steps)
    elif rows == 3:
        _h3(a, a_stride, b, b_stride, c, c_stride, steps)
    else:
        _h4(a, a_stride, b, b_stride, c, c_stride, steps)


@intrinsic
def transpose(typingctx: Any, src: Any, src_stride: Any, dst: Any, dst_stride: Any) -> Any:
    """Transpose src [16, 16] to dst, 4 bytes per element, strides in bytes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        src, src_stride, dst, dst_stride = args
        lines = [
            load_value(builder, builder.add(src, builder.mul(src_stride, I64(i))), VF) for i in range(LANES)
        ]
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
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
