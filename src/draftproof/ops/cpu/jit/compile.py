"""Native code without a C compiler: lazily compiled kernels and scalar memory access for numba.

Kernels take raw addresses (int64), so that one calling convention fits every op and a program is a
plain table of integers. Each kernel is its own compilation unit: it is compiled when first used, and
numba's disk cache keeps it for the next start.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

# (address of int64 arguments, rows, thread, threads, address of the thread's scratch)
KERNEL_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64, types.int64)

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def device(fn: Callable[..., Any]) -> Any:
    """Mark a function that kernels call; it is compiled into each of them."""
    return njit(**OPTIONS)(fn)


def inlined(fn: Callable[..., Any]) -> Any:
    """Mark a small device function that must be inlined, so that constants fold."""
    return njit(forceinline=True, **OPTIONS)(fn)


class KernelFiles(IndexDataCacheFile):  # type: ignore[misc]
    """Cache index with one file per kernel, named by a hash of its sources.

    numba numbers the files of a function and keeps an index of the numbers: two processes that compile two
    variants at once take the same number, and one may later be given the other's code.
    """

    def _name(self, key: Any) -> str:
        made_from = repr((self._version, self._source_stamp, key))
        return (
            self._index_name.removesuffix("nbi")
            + hashlib.sha256(made_from.encode()).hexdigest()[:24]
            + ".nbc"
        )

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), data)

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(self._name(key))
        except OSError:  # the file does not exist
            return None


class SourceCache(FunctionCache):  # type: ignore[misc]
    """Disk cache of numba, valid only while every file of this package is unchanged.

    numba looks at the file of the cached function alone, so an edited helper in another file would
    leave a stale kernel behind.
    """

    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parents[1].rglob("*.py")):
            digest.update(path.read_bytes())
        self._cache_file = KernelFiles(self._cache_path, self._impl.filename_base, digest.hexdigest())


class Kernel:
    """C-callable function, compiled or read from the disk cache when its address is first needed."""

    def __init__(self, fn: Callable[..., None], signature: Any = KERNEL_SIGNATURE) -> None:
        self.fn = fn
        self.signature = signature
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__
        self._compiled: CFunc | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        with self._lock:
            if self._compiled is None:
                args, result = self.signature.args, self.signature.return_type
                compiled = CFunc(self.fn, (args, result), locals={}, options=dict(OPTIONS))
                with suppress(RuntimeError):  # no writable folder: compiled at every start
                    compiled._cache = SourceCache(self.fn)
                compiled.compile()
                self._compiled = compiled
            return int(self._compiled.address)


def kernel(fn: Callable[..., None]) -> Kernel:
    """Mark `fn(args, rows, thread, threads, scratch)` as a kernel of a program."""
    return Kernel(fn)


# --- scalar memory --------------------------------------------------------------------------------

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()


def _loader(elem: ir.Type, result: Any, widen: str | None = None) -> Any:
    @intrinsic
    def load(typingctx: Any, addr: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[0], PTR), typ=elem)
            return getattr(builder, widen)(value, I64) if widen else value

        return result(types.int64), codegen

    return load


def _storer(elem: ir.Type, value_type: Any, narrow: bool = False) -> Any:
    @intrinsic
    def store(typingctx: Any, addr: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.trunc(args[1], elem) if narrow else args[1]
            builder.store(value, builder.inttoptr(args[0], PTR))
            return context.get_dummy_value()

        return types.void(types.int64, value_type), codegen

    return store


load_i64 = _loader(I64, types.int64)
load_i32 = _loader(I32, types.int64, "sext")
load_f32 = _loader(F32, types.float32)
load_f64 = _loader(F64, types.float64)
store_i64 = _storer(I64, types.int64)
store_i16 = _storer(I16, types.int64, narrow=True)
store_f32 = _storer(F32, types.float32)
store_f64 = _storer(F64, types.float64)


@intrinsic
def bits_of_f32(typingctx: Any, x: Any) -> Any:
    """Return the bits of a float32, zero-extended to int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.bitcast(args[0], I32), I64)

    return types.int64(types.float32), codegen


@intrinsic
def f32_of_bits(typingctx: Any, x: Any) -> Any:
    """Return the float32 whose bits are the low half of an int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return types.float32(types.int64), codegen


@intrinsic
def f64_of_bits(typingctx: Any, x: Any) -> Any:
    """Return the float64 with these bits; float arguments are stored in an int64 table."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F64)

    return types.float64(types.int64), codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy bytes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        fnty = ir.FunctionType(ir.VoidType(), [PTR, PTR, I64, I1])
        fn = builder.module.declare_intrinsic("llvm.memcpy.p0.p0.i64", (), fnty)
        target, source = (builder.inttoptr(addr, PTR) for addr in args[:2])
        builder.call(fn, [target, source, args[2], I1(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


# --- threads --------------------------------------------------------------------------------------


@intrinsic
def atomic_add(typingctx: Any, addr: Any, value: Any) -> Any:
    """Add to the int64 at `addr` atomically and return its old value."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx: Any, addr: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], PTR)
        return builder.load_atomic(pointer, "acquire", 8, typ=I64)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx: Any, addr: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def cpu_pause(typingctx: Any) -> Any:
    """Emit the spin-loop hint of the CPU, if it has one."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        machine = builder.module.triple.split("-")[0]
        if machine in ("x86_64", "i686", "i386"):
            fnty = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), fnty), [])
        elif machine in ("aarch64", "arm64"):
            fnty = ir.FunctionType(ir.VoidType(), [I32])
            builder.call(builder.module.declare_intrinsic("llvm.aarch64.hint", (), fnty), [I32(1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_kernel(
    typingctx: Any, address: Any, args: Any, rows: Any, thread: Any, threads: Any, scratch: Any
) -> Any:
    """Call the kernel at `address`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        fnty = ir.FunctionType(ir.VoidType(), [I64] * 5)
        pointer = builder.inttoptr(args[0], ir.PointerType(fnty))
        builder.call(pointer, args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@device
def share(total: int, thread: int, threads: int) -> tuple[int, int]:
    """Return the thread's part [begin, end) of `total` units, split evenly and in order."""
    return total * thread // threads, total * (thread + 1) // threads
