"""Vectors of 16 lanes for numba: types and operations of the kernels.

LLVM makes one AVX-512 instruction of an operation, or two of AVX2, or four of NEON. Written out like
this, the order of every floating-point operation is the source's and not an optimiser's.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from draftproof.ops.cpu.jit.compile import F32, F64, I1, I8, I16, I32, I64, PTR

LANES = 16


class Vector(types.Type):  # type: ignore[misc]
    def __init__(self, name: str, elem: ir.Type) -> None:
        self.elem = elem
        super().__init__(name=f"draftproof.{name}x{LANES}")


class VectorF32(Vector):
    pass


class VectorI32(Vector):
    pass


class VectorF64(Vector):
    pass


class VectorMask(Vector):
    pass


F = VectorF32("f32", F32)
I = VectorI32("i32", I32)  # noqa: E741
D = VectorF64("f64", F64)
M = VectorMask("i1", I1)
VF, VI, VD, VM = (ir.VectorType(elem, LANES) for elem in (F32, I32, F64, I1))
VH, VBYTES = (ir.VectorType(elem, LANES) for elem in (I16, I8))


def _model(vector: type[Vector]) -> None:
    @register_model(vector)
    class _Model(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, dmm: Any, fe_type: Any) -> None:
            super().__init__(dmm, fe_type, ir.VectorType(fe_type.elem, LANES))


for _vector in (VectorF32, VectorI32, VectorF64, VectorMask):
    _model(_vector)


def _op(result: Any, params: tuple[Any, ...], build: Any) -> Any:
    """Return an intrinsic of fixed types; `build(builder, args)` emits it."""
    sig = result(*params)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = build(builder, args)
        return context.get_dummy_value() if result is types.void else value

    # intrinsic() reads the number of parameters from the function's signature
    names = ", ".join(f"a{i}" for i in range(len(params)))
    scope: dict[str, Any] = {"sig": sig, "codegen": codegen}
    exec(f"def op(typingctx, {names}):\n    return sig, codegen", scope)
    return intrinsic(scope["op"])


def _llvm(name: str, result: ir.Type, params: list[ir.Type]) -> Any:
    def build(builder: Any, args: Any) -> Any:
        fn = builder.module.declare_intrinsic(name, (), ir.FunctionType(result, params))
        return builder.call(fn, args)

    return build


def _const(vector: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def splat_value(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """Emit a scalar in every lane."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
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
    pointer = builder.inttoptr(addr, PTR)
    return builder.call(fn, [pointer, I32(1), _first(builder, count), zero])


def _masked_store(builder: Any, addr: Any, value: Any, count: Any, name: str) -> None:
    fnty = ir.FunctionType(ir.VoidType(), [value.type, PTR, I32, VM])
    fn = builder.module.declare_intrinsic(f"llvm.masked.store.{name}.p0", (), fnty)
    builder.call(fn, [value, builder.inttoptr(addr, PTR), I32(1), _first(builder, count)])


_i64, _f32, _f64 = types.int64, types.float32, types.float64

# Loads and stores; `_n` touches the first n lanes only (the others read as 0).
vload = _op(F, (_i64,), lambda b, a: load_value(b, a[0], VF))
vload_bf16 = _op(F, (_i64,), lambda b, a: widen_bf16(b, load_value(b, a[0], VH)))
vload_n = _op(F, (_i64, _i64), lambda b, a: _masked_load(b, a[0], a[1], VF, "v16f32"))
vload_bf16_n = _op(F, (_i64, _i64), lambda b, a: widen_bf16(b, _masked_load(b, a[0], a[1], VH, "v16i16")))
vstore = _op(types.void, (_i64, F), lambda b, a: _store(b, a[0], a[1]))
vstore_bf16 = _op(types.void, (_i64, F), lambda b, a: _store(b, a[0], narrow_bf16(b, a[1])))
vstore_n = _op(types.void, (_i64, F, _i64), lambda b, a: _masked_store(b, a[0], a[1], a[2], "v16f32"))
vstore_bf16_n = _op(
    types.void,
    (_i64, F, _i64),
    lambda b, a: _masked_store(b, a[0], narrow_bf16(b, a[1]), a[2], "v16i16"),
)
vround_bf16 = _op(F, (F,), lambda b, a: widen_bf16(b, narrow_bf16(b, a[0])))

# Arithmetic on floats.
splat = _op(F, (_f32,), lambda b, a: splat_value(b, a[0], VF))
vadd = _op(F, (F, F), lambda b, a: b.fadd(a[0], a[1]))
vsub = _op(F, (F, F), lambda b, a: b.fsub(a[0], a[1]))
vmul = _op(F, (F, F), lambda b, a: b.fmul(a[0], a[1]))
vdiv = _op(F, (F, F), lambda b, a: b.fdiv(a[0], a[1]))
vfma = _op(F, (F, F, F), _llvm("llvm.fma.v16f32", VF, [VF, VF, VF]))
vround = _op(F, (F,), _llvm("llvm.rint.v16f32", VF, [VF]))


def _max(builder: Any, args: Any) -> Any:
    """Emit a where a > b, else b: one instruction on x86; NaN in `a` gives b."""
    return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])


def _min(builder: Any, args: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[0], args[1])


vmax = _op(F, (F, F), _max)
vmin = _op(F, (F, F), _min)

# Comparisons, masks, selections.
vgt = _op(M, (F, F), lambda b, a: b.fcmp_ordered(">", a[0], a[1]))
vge = _op(M, (F, F), lambda b, a: b.fcmp_ordered(">=", a[0], a[1]))
mask_and = _op(M, (M, M), lambda b, a: b.and_(a[0], a[1]))
mask_or = _op(M, (M, M), lambda b, a: b.or_(a[0], a[1]))
mask_first = _op(M, (_i64,), lambda b, a: _first(b, a[0]))
mask_not_first = _op(M, (_i64,), lambda b, a: b.not_(_first(b, a[0])))
mask_bits = _op(_i64, (M,), lambda b, a: b.zext(b.bitcast(a[0], I16), I64))
vselect = _op(F, (M, F, F), lambda b, a: b.select(a[0], a[1], a[2]))
iselect = _op(I, (M, I, I), lambda b, a: b.select(a[0], a[1], a[2]))
count_ones = _op(_i64, (_i64,), _llvm("llvm.ctpop.i64", I64, [I64]))
first_one = _op(_i64, (_i64,), lambda b, a: _llvm("llvm.cttz.i64", I64, [I64, I1])(b, [a[0], I1(0)]))

# Integers (32 bits a lane).
isplat = _op(I, (_i64,), lambda b, a: splat_value(b, b.trunc(a[0], I32), VI))
iload = _op(I, (_i64,), lambda b, a: load_value(b, a[0], VI))
iload_u16 = _op(I, (_i64,), lambda b, a: b.zext(load_value(b, a[0], VH), VI))
iload_u16_n = _op(I, (_i64, _i64), lambda b, a: b.zext(_masked_load(b, a[0], a[1], VH, "v16i16"), VI))
istore = _op(types.void, (_i64, I), lambda b, a: _store(b, a[0], a[1]))
istore_bytes = _op(types.void, (_i64, I), lambda b, a: _store(b, a[0], b.trunc(a[1], VBYTES)))
iadd = _op(I, (I, I), lambda b, a: b.add(a[0], a[1]))
ixor = _op(I, (I, I), lambda b, a: b.xor(a[0], a[1]))
iand = _op(I, (I, I), lambda b, a: b.and_(a[0], a[1]))
ior = _op(I, (I, I), lambda b, a: b.or_(a[0], a[1]))
ieq = _op(M, (I, I), lambda b, a: b.icmp_signed("==", a[0], a[1]))
ishl = _op(I, (I, I), lambda b, a: b.shl(a[0], a[1]))
as_int = _op(I, (F,), lambda b, a: b.bitcast(a[0], VI))
as_float = _op(F, (I,), lambda b, a: b.bitcast(a[0], VF))
to_int = _op(I, (F,), lambda b, a: b.fptosi(a[0], VI))
to_float = _op(F, (I,), lambda b, a: b.sitofp(a[0], VF))
unsigned_to_float = _op(F, (I,), lambda b, a: b.uitofp(a[0], VF))


def _mul_high(builder: Any, args: Any) -> Any:
    wide = ir.VectorType(I64, LANES)
    product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
    return builder.trunc(builder.lshr(product, _const(wide, 32)), VI)


imul = _op(I, (I, I), lambda b, a: b.mul(a[0], a[1]))
imul_high = _op(I, (I, I), _mul_high)


def _interleave(start: int) -> Any:
    lanes = [start + i // 2 + (LANES if i % 2 else 0) for i in range(LANES)]
    index = ir.Constant(ir.VectorType(I32, LANES), lanes)
    return lambda b, a: b.shuffle_vector(a[0], a[1], index)


interleave_low = _op(I, (I, I), _interleave(0))  # a0 b0 a1 b1 ... a7 b7
interleave_high = _op(I, (I, I), _interleave(LANES // 2))

# The upper halves of the lanes, stored as 16 bits each: bf16 by truncation.
istore_high = _op(
    types.void, (_i64, I), lambda b, a: _store(b, a[0], b.trunc(b.lshr(a[1], _const(VI, 16)), VH))
)

# Doubles, for sums over a vocabulary.
dzero = _op(D, (_i64,), lambda b, a: ir.Constant(VD, [0.0] * LANES))
dadd = _op(D, (D, D), lambda b, a: b.fadd(a[0], a[1]))
dselect = _op(D, (M, D, D), lambda b, a: b.select(a[0], a[1], a[2]))
to_double = _op(D, (F,), lambda b, a: b.fpext(a[0], VD))


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


vsum = _op(_f32, (F,), lambda b, a: _tree(b, a[0], b.fadd))
dsum = _op(_f64, (D,), lambda b, a: _tree(b, a[0], b.fadd))
vmax_lane = _op(_f32, (F,), lambda b, a: _tree(b, a[0], lambda x, y: _max(b, [x, y])))


def _prefetch(locality: int) -> Any:
    def build(builder: Any, args: Any) -> None:
        fnty = ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
        fn = builder.module.declare_intrinsic("llvm.prefetch.p0", (), fnty)
        pointer = builder.inttoptr(args[0], PTR)
        builder.call(fn, [pointer, I32(0), I32(locality), I32(1)])

    return build


prefetch = _op(types.void, (_i64,), _prefetch(3))
