"""Native code without a C compiler: lazily compiled kernels and scalar memory access for numba.

Kernels take raw addresses (int64), so that one calling convention fits every op and a program is a
plain table of integers. Each kernel is its own compilation unit: it is compiled when first used, and
numba's disk cache keeps it for the next start.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import _dynfunc, njit, types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from draftproof.numba_jit import LightCache
from draftproof.registry import no_collection

# (address of int64 arguments, rows, thread, threads, address of the thread's scratch)
KERNEL_SIGNATURE = types.void(*[types.int64] * 5)

# numba numbers functions from 1 in each process, and the number is all that distinguishes the symbols of two
# device functions made by one factory. A kernel from the disk cache and one compiled here may then have one
# symbol for different code, and the linker keeps the first. Random first numbers make symbols unique.
SYMBOL_NUMBER_BITS = 62


def new_symbol_numbers() -> None:
    """Give symbols of this process numbers from a random one on; needed again after a fork."""
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(SYMBOL_NUMBER_BITS))


new_symbol_numbers()

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


class DeviceLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Optimised LLVM code of a device function, from which no machine code is made."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


class DeviceCompiler(Compiler):  # type: ignore[misc]
    """Compiler of device functions, which are linked into kernels and never called by themselves."""

    def define_pipelines(self) -> Any:
        state = self.state
        state.flags.no_compile = True
        state.library = DeviceLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()

    def _compile_core(self) -> Any:
        compiled = super()._compile_core()
        fndesc, library = compiled.fndesc, compiled.library
        module, name = fndesc.lookup_module(), fndesc.qualname
        # The key by which callers find the code. Its address is 0, as that of any function without a wrapper.
        key = _dynfunc.make_function(module, name, name, 0, compiled.environment, (library,))
        self.state.targetctx.insert_user_function(key, fndesc, [library])
        return compiled._replace(entry_point=key)


# Only kernels call device functions: code to call them from Python would be compiled for each.
DEVICE_OPTIONS: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
PRIVATE_METHODS = ("_finalize_final_module", "_finalize_dynamic_globals", "_verify_declare_only_symbols")
if all(hasattr(JITCodeLibrary, name) for name in PRIVATE_METHODS) and hasattr(Compiler, "_compile_core"):
    DEVICE_OPTIONS["pipeline_class"] = DeviceCompiler  # else numba makes machine code that is never called


def device(fn: Callable[..., Any]) -> Any:
    """Mark a function that kernels call; it is compiled into each of them."""
    return njit(**DEVICE_OPTIONS)(fn)


def inlined(fn: Callable[..., Any]) -> Any:
    """Mark a small device function that must be inlined, so that constants fold."""
    return njit(forceinline=True, **DEVICE_OPTIONS)(fn)


class KernelFiles(IndexDataCacheFile):  # type: ignore[misc]
    """Cache index with one file per kernel, named by a hash of its sources.

    numba numbers the files of a function and keeps an index of the numbers: two processes that compile two
    variants at once take the same number, and one may later be given the other's code.
    """

    def _name(self, key: Any) -> str:
        made_from = repr((self._version, self._source_stamp, key))
        digest = hashlib.sha256(made_from.encode()).hexdigest()[:24]
        return f"{self._index_name.removesuffix('nbi')}{digest}.nbc"

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), data)

    def has(self, key: Any) -> bool:
        """Return whether there is a file for `key`."""
        return Path(self._data_path(self._name(key))).exists()

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(self._name(key))
        except OSError:  # the file does not exist
            return None


@cache
def _source_digest() -> str:
    """Return a hash of every file of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class SourceCache(LightCache):
    """Disk cache of numba, valid only while every file of this package is unchanged.

    numba looks at the file of the cached function alone, so an edited helper in another file would
    leave a stale kernel behind.
    """

    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)
        self._cache_file = KernelFiles(self._cache_path, self._impl.filename_base, _source_digest())

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return the key of a kernel; the key of numba has a random number for each device function."""
        return sig, codegen.magic_tuple(), _closure_key(self._py_func)

    def has(self, sig: Any, codegen: Any) -> bool:
        """Return whether the kernel is in the cache."""
        return self._cache_file.has(self._index_key(sig, codegen))


def _closure_key(fn: Callable[..., Any]) -> Any:
    """Return the module and name of a function, and the values in its closure, the same in every process."""
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    values = [_closure_key(cell.py_func) if hasattr(cell, "py_func") else repr(cell) for cell in cells]
    return fn.__module__, fn.__qualname__, *values


class Kernel:
    """C-callable function, compiled or read from the disk cache when its address is first needed."""

    def __init__(self, fn: Callable[..., None], signature: Any = KERNEL_SIGNATURE) -> None:
        self.fn, self.signature = fn, signature
        self._compiled: CFunc | None = None
        self._lock = threading.Lock()

    @cached_property
    def address(self) -> int:
        with self._lock:
            if self._compiled is None:
                self._compiled = self.compile()
            return int(self._compiled.address)

    @cached_property
    def _cache(self) -> SourceCache | None:
        """Return the disk cache; None without a writable folder: the kernel is compiled at every start."""
        try:
            return SourceCache(self.fn)
        except RuntimeError:
            return None

    @property
    def is_available(self) -> bool:
        """Return whether the kernel is loaded or cached, or no folder for the cache is writable."""
        if self._compiled is not None or self._cache is None:
            return True
        return self._cache.has(self.signature, cpu_target.target_context.codegen())

    def compile(self) -> CFunc:
        """Compile the function, or load it from the cache."""
        args, result = self.signature.args, self.signature.return_type
        made = CFunc(self.fn, (args, result), locals={}, options=dict(OPTIONS))
        if self._cache is not None:
            made._cache = self._cache
        with no_collection():
            made.compile()
        return made


kernel = Kernel  # as a decorator of `fn(args, rows, thread, threads, scratch)`


# --- intrinsics -----------------------------------------------------------------------------------

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()
i64, f32, f64, void = types.int64, types.float32, types.float64, types.void


def op(result: Any, params: Sequence[Any], build: Callable[[Any, Any], Any], name: str = "op") -> Any:
    """Return an intrinsic of fixed types; `build(builder, args)` emits it.

    The disk cache distinguishes kernels that capture an intrinsic by its `name`.
    """
    sig = result(*params)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = build(builder, args)
        return context.get_dummy_value() if result is void else value

    # intrinsic() reads the number of parameters from the function's signature
    names = ", ".join(["typingctx", *(f"a{i}" for i in range(len(params)))])
    scope: dict[str, Any] = {"sig": sig, "codegen": codegen}
    exec(f"def {name}({names}):\n    return sig, codegen", scope)
    return intrinsic(scope[name])


def llvm(name: str, result: ir.Type, params: Sequence[ir.Type]) -> Callable[[Any, Any], Any]:
    """Return a builder of a call to an LLVM intrinsic."""

    def build(builder: Any, args: Any) -> Any:
        fn = builder.module.declare_intrinsic(name, (), ir.FunctionType(result, params))
        return builder.call(fn, args)

    return build


def pointer(builder: Any, addr: Any) -> Any:
    return builder.inttoptr(addr, PTR)


def emit_prefetch(builder: Any, where: Any) -> None:
    """Emit a prefetch for reading, to all cache levels, of the line at a pointer."""
    llvm("llvm.prefetch.p0", ir.VoidType(), [PTR, I32, I32, I32])(builder, [where, I32(0), I32(3), I32(1)])


def _load(elem: ir.Type) -> Callable[[Any, Any], Any]:
    return lambda b, a: b.load(pointer(b, a[0]), typ=elem)


def _store(builder: Any, args: Any) -> None:
    builder.store(args[1], pointer(builder, args[0]))


prefetch = op(void, [i64], lambda b, a: emit_prefetch(b, pointer(b, a[0])))

_SCALARS = ((i64, I64), (f32, F32), (f64, F64))
load_i64, load_f32, load_f64 = (op(kind, [i64], _load(elem)) for kind, elem in _SCALARS)
load_i32 = op(i64, [i64], lambda b, a: b.sext(_load(I32)(b, a), I64))
load_u16 = op(i64, [i64], lambda b, a: b.zext(_load(I16)(b, a), I64))
store_i64, store_f32, store_f64 = (op(void, [i64, kind], _store) for kind, _ in _SCALARS)
store_i16 = op(void, [i64, i64], lambda b, a: _store(b, [a[0], b.trunc(a[1], I16)]))

bits_of_f32 = op(i64, [f32], lambda b, a: b.zext(b.bitcast(a[0], I32), I64))
f32_of_bits = op(f32, [i64], lambda b, a: b.bitcast(b.trunc(a[0], I32), F32))
f64_of_bits = op(f64, [i64], lambda b, a: b.bitcast(a[0], F64))  # float arguments are stored as int64


def _copy_bytes(builder: Any, args: Any) -> None:
    target, source = (pointer(builder, addr) for addr in args[:2])
    copy = llvm("llvm.memcpy.p0.p0.i64", ir.VoidType(), [PTR, PTR, I64, I1])
    copy(builder, [target, source, args[2], I1(0)])


copy_bytes = op(void, [i64, i64, i64], _copy_bytes)  # target, source, count


def _atomic_pointer(builder: Any, addr: Any) -> Any:
    return builder.inttoptr(addr, I64.as_pointer())


# returns the old value
atomic_add = op(i64, [i64, i64], lambda b, a: b.atomic_rmw("add", _atomic_pointer(b, a[0]), a[1], "seq_cst"))
atomic_load = op(i64, [i64], lambda b, a: b.load_atomic(pointer(b, a[0]), "acquire", 8, typ=I64))
atomic_store = op(void, [i64, i64], lambda b, a: b.store_atomic(a[1], _atomic_pointer(b, a[0]), "seq_cst", 8))


def _cpu_pause(builder: Any, args: Any) -> None:
    """Emit the spin-loop hint of the CPU, if it has one."""
    machine = builder.module.triple.split("-")[0]
    if machine in ("x86_64", "i686", "i386"):
        llvm("llvm.x86.sse2.pause", ir.VoidType(), [])(builder, [])
    elif machine in ("aarch64", "arm64"):
        llvm("llvm.aarch64.hint", ir.VoidType(), [I32])(builder, [I32(1)])


cpu_pause = op(void, [], _cpu_pause)


def _call_kernel(builder: Any, args: Any) -> None:
    kernel_type = ir.FunctionType(ir.VoidType(), [I64] * 5)
    builder.call(builder.inttoptr(args[0], ir.PointerType(kernel_type)), args[1:])


call_kernel = op(void, [i64] * 6, _call_kernel)  # address, args, rows, thread, threads, scratch


@device
def share(total: int, thread: int, threads: int) -> tuple[int, int]:
    """Return the thread's part [begin, end) of `total` units, split evenly and in order."""
    return total * thread // threads, total * (thread + 1) // threads
