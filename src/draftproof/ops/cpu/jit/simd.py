"""Vectors of 16 lanes for numba, imported as `v`: types, loads and stores, arithmetic, exp and sigmoid.

LLVM makes one AVX-512 instruction of an operation, or two of AVX2, or four of NEON. Written out like
this, the order of every floating-point operation is the source's and not an optimiser's. Names with `i` are
operations on 32-bit integers, with `d` on doubles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.datamodel import models
from numba.extending import register_model

from draftproof.ops.cpu.jit.compile import F32, F64, I1, I16, I32, I64, PTR, copy_bytes, inlined, llvm, op

LANES = 16
i64, f32, f64, void = types.int64, types.float32, types.float64, types.void


class Vector(types.Type):  # type: ignore[misc]
    def __init__(self, name: str, elem: ir.Type) -> None:
        self.elem = elem
        super().__init__(name=f"draftproof.{name}x{LANES}")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(fe_type.elem, LANES))


F, D = Vector("f32", F32), Vector("f64", F64)
I, M = Vector("i32", I32), Vector("i1", I1)  # noqa: E741
VF, VI, VD, VM = (ir.VectorType(elem, LANES) for elem in (F32, I32, F64, I1))
VH, VBYTES = (ir.VectorType(elem, LANES) for elem in (I16, ir.IntType(8)))


def _const(vector: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def splat_value(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """Emit a scalar in every lane."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def load_value(builder: Any, addr: Any, vector: ir.VectorType) -> Any:
    """Emit an unaligned load."""
    return builder.load(builder.inttoptr(addr, PTR), typ=vector, align=1)


def widen_bf16(builder: Any, halves: Any) -> Any:
    """Emit 16 bf16 as fp32: exact, a shift."""
    return builder.bitcast(builder.shl(builder.zext(halves, VI), _const(VI, 16)), VF)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


VB = ir.VectorType(_BFloat(), LANES)


def narrow_bf16(builder: Any, x: Any) -> Any:
    """Emit 16 fp32 rounded to bf16, to nearest even; NaN stays NaN."""
    if binding.get_host_cpu_features().get("avx512bf16"):
        # one instruction there; elsewhere LLVM may emit a call to a missing library function
        return builder.bitcast(builder.fptrunc(x, VB), VH)
    bits = builder.bitcast(x, VI)
    odd = builder.and_(builder.lshr(bits, _const(VI, 16)), _const(VI, 1))
    rounded = builder.add(bits, builder.add(odd, _const(VI, 0x7FFF)))
    nan = builder.fcmp_unordered("uno", x, x)
    rounded = builder.select(nan, _const(VI, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, _const(VI, 16)), VH)


def _store(builder: Any, addr: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(addr, PTR), align=1)


def _first(builder: Any, count: Any) -> Any:
    """Emit a mask of the lanes below an int64 count."""
    lanes = ir.Constant(VI, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat_value(builder, builder.trunc(count, I32), VI))


def _masked_load(builder: Any, addr: Any, count: Any, vector: ir.VectorType, name: str) -> Any:
    fnty = ir.FunctionType(vector, [PTR, I32, VM, vector])
    fn = builder.module.declare_intrinsic(f"llvm.masked.load.{name}.p0", (), fnty)
    zero = ir.Constant(vector, [0] * LANES)
    return builder.call(fn, [builder.inttoptr(addr, PTR), I32(1), _first(builder, count), zero])


def _masked_store(builder: Any, addr: Any, value: Any, count: Any, name: str) -> None:
    fnty = ir.FunctionType(ir.VoidType(), [value.type, PTR, I32, VM])
    fn = builder.module.declare_intrinsic(f"llvm.masked.store.{name}.p0", (), fnty)
    builder.call(fn, [value, builder.inttoptr(addr, PTR), I32(1), _first(builder, count)])


# Loads and stores; `_n` touches the first n lanes only (the others read as 0).
load = op(F, (i64,), lambda b, a: load_value(b, a[0], VF))
load_bf16 = op(F, (i64,), lambda b, a: widen_bf16(b, load_value(b, a[0], VH)))
load_n = op(F, (i64, i64), lambda b, a: _masked_load(b, a[0], a[1], VF, "v16f32"))
load_bf16_n = op(F, (i64, i64), lambda b, a: widen_bf16(b, _masked_load(b, a[0], a[1], VH, "v16i16")))
store = op(void, (i64, F), lambda b, a: _store(b, a[0], a[1]))
store_bf16 = op(void, (i64, F), lambda b, a: _store(b, a[0], narrow_bf16(b, a[1])))
store_n = op(void, (i64, F, i64), lambda b, a: _masked_store(b, a[0], a[1], a[2], "v16f32"))
store_bf16_n = op(
    void, (i64, F, i64), lambda b, a: _masked_store(b, a[0], narrow_bf16(b, a[1]), a[2], "v16i16")
)
round_bf16 = op(F, (F,), lambda b, a: widen_bf16(b, narrow_bf16(b, a[0])))

# Arithmetic on floats.
splat = op(F, (f32,), lambda b, a: splat_value(b, a[0], VF))
add = op(F, (F, F), lambda b, a: b.fadd(a[0], a[1]))
sub = op(F, (F, F), lambda b, a: b.fsub(a[0], a[1]))
mul = op(F, (F, F), lambda b, a: b.fmul(a[0], a[1]))
div = op(F, (F, F), lambda b, a: b.fdiv(a[0], a[1]))
fma = op(F, (F, F, F), llvm("llvm.fma.v16f32", VF, [VF, VF, VF]))
rint = op(F, (F,), llvm("llvm.rint.v16f32", VF, [VF]))


def _best(order: str) -> Any:
    """Return a builder of `a` where a > b (or a < b), else b: one instruction on x86; NaN in `a` gives b."""
    return lambda b, a: b.select(b.fcmp_ordered(order, a[0], a[1]), a[0], a[1])


maximum, minimum = op(F, (F, F), _best(">")), op(F, (F, F), _best("<"))

# Comparisons, masks, selections.
gt = op(M, (F, F), lambda b, a: b.fcmp_ordered(">", a[0], a[1]))
ge = op(M, (F, F), lambda b, a: b.fcmp_ordered(">=", a[0], a[1]))
mask_and = op(M, (M, M), lambda b, a: b.and_(a[0], a[1]))
mask_first = op(M, (i64,), lambda b, a: _first(b, a[0]))
mask_not_first = op(M, (i64,), lambda b, a: b.not_(_first(b, a[0])))
mask_bits = op(i64, (M,), lambda b, a: b.zext(b.bitcast(a[0], I16), I64))
select = op(F, (M, F, F), lambda b, a: b.select(a[0], a[1], a[2]))
iselect = op(I, (M, I, I), lambda b, a: b.select(a[0], a[1], a[2]))
count_ones = op(i64, (i64,), llvm("llvm.ctpop.i64", I64, [I64]))
first_one = op(i64, (i64,), lambda b, a: llvm("llvm.cttz.i64", I64, [I64, I1])(b, [a[0], I1(0)]))

# Integers (32 bits a lane).
isplat = op(I, (i64,), lambda b, a: splat_value(b, b.trunc(a[0], I32), VI))
iload = op(I, (i64,), lambda b, a: load_value(b, a[0], VI))
iload_bytes = op(I, (i64,), lambda b, a: b.zext(load_value(b, a[0], VBYTES), VI))
iload_i8 = op(I, (i64,), lambda b, a: b.sext(load_value(b, a[0], VBYTES), VI))
iload_i8_n = op(I, (i64, i64), lambda b, a: b.sext(_masked_load(b, a[0], a[1], VBYTES, "v16i8"), VI))
istore = op(void, (i64, I), lambda b, a: _store(b, a[0], a[1]))
istore_bytes = op(void, (i64, I), lambda b, a: _store(b, a[0], b.trunc(a[1], VBYTES)))
istore_bytes_n = op(
    void, (i64, I, i64), lambda b, a: _masked_store(b, a[0], b.trunc(a[1], VBYTES), a[2], "v16i8")
)
iadd = op(I, (I, I), lambda b, a: b.add(a[0], a[1]))
isub = op(I, (I, I), lambda b, a: b.sub(a[0], a[1]))
ixor = op(I, (I, I), lambda b, a: b.xor(a[0], a[1]))
iand = op(I, (I, I), lambda b, a: b.and_(a[0], a[1]))
ior = op(I, (I, I), lambda b, a: b.or_(a[0], a[1]))
ishl = op(I, (I, I), lambda b, a: b.shl(a[0], a[1]))
ishr = op(I, (I, I), lambda b, a: b.lshr(a[0], a[1]))
as_int = op(I, (F,), lambda b, a: b.bitcast(a[0], VI))
as_float = op(F, (I,), lambda b, a: b.bitcast(a[0], VF))
to_int = op(I, (F,), lambda b, a: b.fptosi(a[0], VI))
to_float = op(F, (I,), lambda b, a: b.sitofp(a[0], VF))
unsigned_to_float = op(F, (I,), lambda b, a: b.uitofp(a[0], VF))


def _mul_high(builder: Any, args: Any) -> Any:
    wide = ir.VectorType(I64, LANES)
    product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
    return builder.trunc(builder.lshr(product, _const(wide, 32)), VI)


imul = op(I, (I, I), lambda b, a: b.mul(a[0], a[1]))
imul_high = op(I, (I, I), _mul_high)


def _interleave(start: int) -> Any:
    lanes = [start + i // 2 + (LANES if i % 2 else 0) for i in range(LANES)]
    index = ir.Constant(ir.VectorType(I32, LANES), lanes)
    return lambda b, a: b.shuffle_vector(a[0], a[1], index)


interleave_low = op(I, (I, I), _interleave(0))  # a0 b0 a1 b1 ... a7 b7
interleave_high = op(I, (I, I), _interleave(LANES // 2))


def _join_quarters(start: int) -> Any:
    """Return an emitter of quarters of two vectors in turn, from a quarter on."""
    lanes = [4 * (start + i // 8) + i % 4 + (LANES if i // 4 % 2 else 0) for i in range(LANES)]
    index = ir.Constant(ir.VectorType(I32, LANES), lanes)
    return lambda b, a: b.shuffle_vector(a[0], a[1], index)


quarters_low = op(F, (F, F), _join_quarters(0))  # a0..3 b0..3 a4..7 b4..7
quarters_high = op(F, (F, F), _join_quarters(2))

# The upper halves of the lanes, stored as 16 bits each: bf16 by truncation.
istore_high = op(void, (i64, I), lambda b, a: _store(b, a[0], b.trunc(b.lshr(a[1], _const(VI, 16)), VH)))

# Doubles, for sums over a vocabulary.
dzero = op(D, (i64,), lambda b, a: ir.Constant(VD, [0.0] * LANES))
dadd = op(D, (D, D), lambda b, a: b.fadd(a[0], a[1]))
dselect = op(D, (M, D, D), lambda b, a: b.select(a[0], a[1], a[2]))
to_double = op(D, (F,), lambda b, a: b.fpext(a[0], VD))


def _tree(builder: Any, x: Any, combine: Any) -> Any:
    """Emit a fold of halves (16, 8, 4, 2, 1): the one fixed tree of every reduction."""
    width = LANES
    while width > 1:
        width //= 2
        undef = ir.Constant(x.type, ir.Undefined)
        index = ir.VectorType(I32, width)
        low = builder.shuffle_vector(x, undef, ir.Constant(index, list(range(width))))
        high = builder.shuffle_vector(x, undef, ir.Constant(index, list(range(width, 2 * width))))
        x = combine(low, high)
    return builder.extract_element(x, I32(0))


def _fold_four(builder: Any, vectors: Any, combine: Any) -> Any:
    """Emit the folds of four vectors, vector i in lanes 4i to 4i + 3, in another order than `_tree`."""
    index = ir.VectorType(I32, LANES)

    def halves(a: Any, b: Any, width: int) -> Any:
        lanes = [i for i in range(2 * LANES) if i // width % 2 == 0]
        parts = [ir.Constant(index, [i + offset for i in lanes]) for offset in (0, width)]
        return combine(*(builder.shuffle_vector(a, b, part) for part in parts))

    x = halves(halves(*vectors[:2], 8), halves(*vectors[2:], 8), 4)
    for width in (2, 1):
        swapped = ir.Constant(index, [i ^ width for i in range(LANES)])
        x = combine(x, builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), swapped))
    return x


# where the order does not affect the result: maximums, and sums of small integers
sums_of_four = op(F, (F, F, F, F), lambda b, a: _fold_four(b, a, b.fadd))
maximums_of_four = op(F, (F, F, F, F), lambda b, a: _fold_four(b, a, lambda *pair: _best(">")(b, pair)))


def _splat_lane(lane: int) -> Any:
    index, undefined = ir.Constant(ir.VectorType(I32, LANES), [lane] * LANES), ir.Constant(VF, ir.Undefined)
    return op(F, (F,), lambda b, a: b.shuffle_vector(a[0], undefined, index), f"lane_{lane}")


# the result of one of four vectors in every lane
splat_first, splat_second, splat_third, splat_fourth = (_splat_lane(4 * i) for i in range(4))

sum_lanes = op(f32, (F,), lambda b, a: _tree(b, a[0], b.fadd))
dsum_lanes = op(f64, (D,), lambda b, a: _tree(b, a[0], b.fadd))
max_lane = op(f32, (F,), lambda b, a: _tree(b, a[0], lambda *pair: _best(">")(b, pair)))


# Tensors of fp32 or bf16. `bf16` is a compile-time constant of the kernel, so the branches are removed.


@inlined
def tload(addr: int, index: int, count: int, bf16: bool) -> Any:
    """Load elements [index, index + min(count, 16)) of the tensor at `addr` as fp32, then zeros."""
    if bf16:
        if count >= 16:
            return load_bf16(addr + 2 * index)
        return load_bf16_n(addr + 2 * index, count)
    if count >= 16:
        return load(addr + 4 * index)
    return load_n(addr + 4 * index, count)


@inlined
def tstore(addr: int, index: int, x: Any, count: int, bf16: bool) -> None:
    """Store the first min(count, 16) lanes, rounded to the tensor's type."""
    if bf16:
        if count >= 16:
            store_bf16(addr + 2 * index, x)
        else:
            store_bf16_n(addr + 2 * index, x, count)
    elif count >= 16:
        store(addr + 4 * index, x)
    else:
        store_n(addr + 4 * index, x, count)


@inlined
def tround(x: Any, bf16: bool) -> Any:
    """Round lanes as a store and a load would."""
    if bf16:
        return round_bf16(x)
    return x


@inlined
def copy_bf16(target: int, source: int, count: int) -> None:
    """Copy `count` bf16."""
    if count % 32 == 0:
        for at in range(0, count * 2, 64):
            istore(target + at, iload(source + at))
    else:
        copy_bytes(target, source, count * 2)


# exp and sigmoid with the same bits on every machine, independent of a math library.

_F = np.float32
LOG2E = _F(1.44269504088896341)
ROUNDING = _F(1.5 * 2**23)
LN2_HIGH = _F(-0.693359375)
LN2_LOW = _F(2.12194440e-4)
SMALLEST = _F(-87.33654)  # exp below this is less than the smallest normal number: 0
LARGEST = _F(88.37626)
C1, C2, C3 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
C4, C5, C6 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
SIGMOID_ZERO_BELOW = _F(-88.0)
ONE, ZERO = _F(1.0), _F(0.0)


@inlined
def exp(x: Any) -> Any:
    """Return exp of 16 floats, relative error about 1e-7; exactly 0 below -87.3 and for NaN."""
    inside = ge(x, splat(SMALLEST))
    x = minimum(maximum(x, splat(SMALLEST)), splat(LARGEST))
    shifted = add(mul(x, splat(LOG2E)), splat(ROUNDING))  # rounds to an integer, which is its lowest bits
    n = sub(shifted, splat(ROUNDING))
    r = fma(n, splat(LN2_LOW), fma(n, splat(LN2_HIGH), x))
    y = fma(splat(C1), r, splat(C2))
    y = fma(y, r, splat(C3))
    y = fma(y, r, splat(C4))
    y = fma(y, r, splat(C5))
    y = fma(y, r, splat(C6))
    y = add(fma(y, mul(r, r), r), splat(ONE))
    power = as_float(ishl(iadd(as_int(shifted), isplat(127)), isplat(23)))
    return select(inside, mul(y, power), splat(ZERO))


@inlined
def mul_sigmoid(x: Any, z: Any) -> Any:
    """Return x * sigmoid(z); 0 where the sigmoid is below the smallest normal number."""
    y = div(x, add(splat(ONE), exp(sub(splat(ZERO), z))))
    return select(gt(splat(SIGMOID_ZERO_BELOW), z), splat(ZERO), y)
