"""Triton's interpreter with the arithmetic of the checks, and with less work at each operation.

Import it before the kernels: it enables the interpreter. Results are those of the interpreter but for what
`_dot`, `_cast` and `_to_e4m3` replace; the rest leaves out conversions that change nothing.
"""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import replace
from numbers import Number
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
    def wide(x) -> np.ndarray:  # type: ignore[no-untyped-def]
        data = x.data
        if x.dtype.scalar == tl.bfloat16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        if x.dtype.scalar == tl.float8e4nv:
            data = torch.from_numpy(data.copy()).view(torch.float8_e4m3fn).float().numpy()
        return data.astype(np.float64)

    return interpreter.TensorHandle((wide(a) @ wide(b) + d.data).astype(np.float32), d.dtype.scalar)


def _cast(self, src, dst_type):  # type: ignore[no-untyped-def]
    """Round to nearest even where the result is bf16; the interpreter truncates."""
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        rounded = torch.from_numpy(np.array(src.data, dtype=np.float32)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
    return _plain_cast(self, src, dst_type)


def _to_e4m3(self, src, dst_type, rounding_mode):  # type: ignore[no-untyped-def]
    """Round fp32 to the nearest e4m3; the interpreter differs for small numbers."""
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.float8e4nv:
        return _plain_convert(self, src, dst_type, rounding_mode)
    rounded = torch.from_numpy(np.array(src.data, dtype=np.float32)).to(torch.float8_e4m3fn)
    return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)


def _patch_tensor(tensor, scope):  # type: ignore[no-untyped-def]
    """Convert scalars, arrays of one element in the interpreter, to int; numpy no longer does."""
    _plain_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


# Types of tensors are made anew at each operation, which took a quarter of the time.
_types: dict[Any, dict[str, Any]] = {}  # element type and shape -> attributes of the block type
_numpy_types: dict[str, np.dtype] = {}


def _init_block_type(self, element_ty, shape):  # type: ignore[no-untyped-def]
    pointer = (element_ty.address_space, element_ty.const) if element_ty.is_ptr() else None
    sizes = (size.value if isinstance(size, tl.constexpr) else size for size in shape)
    key = element_ty.name, pointer, *sizes
    if key not in _types:
        _plain_block_type(self, element_ty, shape)
        tensor = tl.tuple([tl.constexpr(size) for size in self.shape]), tl.constexpr(self.numel)
        _types[key] = {**vars(self), "tensor": tensor, "sizes": key[2:], "key": key}
    self.__dict__.update(_types[key])


_SCALAR = tl.tuple([]), tl.constexpr(1)  # shape and number of elements


def _init_tensor(self, handle, type):  # type: ignore[no-untyped-def]
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.tensor if type.is_block() else _SCALAR


def _init_handle(self, data, dtype, attr=None):  # type: ignore[no-untyped-def]
    """Store the fields; the interpreter compares the sizes of elements once more."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _numpy_type(kind):  # type: ignore[no-untyped-def]
    scalar = kind.scalar
    if scalar.name not in _numpy_types:
        _numpy_types[scalar.name] = _plain_numpy_type(scalar)
    return _numpy_types[scalar.name]


_plain_block_type, tl.block_type.__init__ = tl.block_type.__init__, _init_block_type
tl.tensor.__init__ = _init_tensor
interpreter.TensorHandle.__init__ = _init_handle
_plain_numpy_type, interpreter._get_np_dtype = interpreter._get_np_dtype, _numpy_type


class _Launch:
    """Patches of the language during one launch.

    The interpreter repeats them at each call of a device function, which took half of the time.
    """

    scope: Any = None
    modules: set[str] = set()  # triton.language and parts of it that are patched
    names: dict[str, set[str]] = {}  # module of functions -> those that it refers to

    def patch(self, function):  # type: ignore[no-untyped-def]
        """Patch the modules that a function refers to, unless this launch has done so."""
        if self.scope is None or not self.scope._changes:  # restored: that launch has ended
            self.scope, self.modules = interpreter._LangPatchScope(), set()
        if function.__module__ not in self.names:
            used = (value for value in function.__globals__.values() if value is tl or value is tl.core)
            self.names[function.__module__] = {value.__name__ for value in used}
        names = self.names[function.__module__]
        if not names <= self.modules:
            self.scope._changes += _plain_patch_lang(function)._changes
            self.modules |= names
        return self.scope


_plain_patch_lang, interpreter._patch_lang = interpreter._patch_lang, _Launch().patch
_plain_cast, _plain_patch = interpreter.InterpreterBuilder.cast_impl, interpreter._patch_lang_tensor
interpreter._patch_lang_tensor = _patch_tensor
interpreter.InterpreterBuilder.cast_impl = _cast
_plain_convert = interpreter.InterpreterBuilder.create_fp_to_fp
interpreter.InterpreterBuilder.create_fp_to_fp = _to_e4m3
interpreter.InterpreterBuilder.create_dot = _dot
# Checks of integers for overflow took a fifth of the time; no index of these sizes is near 2^31.
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)


# --- operands ---------------------------------------------------------------------------------------------

_HALVES = (tl.float16, tl.bfloat16)  # quotients of them are fp32
_constants: dict[Any, tuple[Any, Any]] = {}  # number and type of the other operand -> dtype, constant


def _shaped(value, sizes):  # type: ignore[no-untyped-def]
    """Return a tensor or scalar broadcast to `sizes`, which it fits."""
    handle, kind = value.handle, value.dtype
    if value.type.is_block():
        data = np.broadcast_to(handle.data, sizes)
    else:
        data = np.full(sizes, handle.data, dtype=interpreter._get_np_dtype(handle.dtype))
    return tl.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), tl.block_type(kind, list(sizes)))


def _broadcast(self, lhs, rhs):  # type: ignore[no-untyped-def]
    """Return operands of one shape, which most have."""
    left, right = lhs.type, rhs.type
    if not left.is_block() and not right.is_block():
        return lhs, rhs
    if left.is_block() != right.is_block():
        return (lhs, _shaped(rhs, left.sizes)) if left.is_block() else (_shaped(lhs, right.sizes), rhs)
    if left.sizes == right.sizes:
        return lhs, rhs
    pairs = list(zip(left.sizes, right.sizes, strict=False))
    if len(left.sizes) != len(right.sizes) or any(a != b and a != 1 and b != 1 for a, b in pairs):
        return _plain_broadcast(self, lhs, rhs)
    sizes = tuple(b if a == 1 else a for a, b in pairs)
    lhs = lhs if left.sizes == sizes else _shaped(lhs, sizes)
    return lhs, rhs if right.sizes == sizes else _shaped(rhs, sizes)


def _check_operands(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic_check=True, div_or_mod=False):  # type: ignore[no-untyped-def]
    """Return operands of one type and shape: equal types need no conversion, and constants are kept."""
    is_left, is_right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
    if is_left and is_right:
        left, right = lhs.dtype, rhs.dtype
        if left is right and not left.is_ptr() and not (div_or_mod and left in _HALVES):
            return _broadcast(self, lhs, rhs)
        if lhs_ptr and left.is_ptr() and right.is_int():
            return _broadcast(self, lhs, rhs)
    elif (is_left or is_right) and arithmetic_check:
        tensor, number = (lhs, rhs) if is_left else (rhs, lhs)
        if not tensor.dtype.is_ptr() and isinstance(number, Number):
            kind = tensor.type.key if tensor.type.is_block() else tensor.dtype.name
            key = type(number), number, math.copysign(1, number), div_or_mod, is_left, kind  # -0.0 equals 0.0
            if key not in _constants:
                pair = _plain_operands(self, lhs, rhs, lhs_ptr, rhs_ptr, True, div_or_mod)
                cast, constant = pair if is_left else pair[::-1]
                constant.handle.data.setflags(write=False)
                _constants[key] = cast.dtype, constant
            dtype, constant = _constants[key]
            cast = self.cast(tensor, dtype)
            return (cast, constant) if is_left else (constant, cast)
    return _plain_operands(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic_check, div_or_mod)


def _cast_tensor(self, value, dtype, rounding=None):  # type: ignore[no-untyped-def]
    return value if value.dtype is dtype.scalar else _plain_cast_tensor(self, value, dtype, rounding)


def _to_tensor(self, x, check_type=True):  # type: ignore[no-untyped-def]
    return x if isinstance(x, tl.tensor) else _plain_to_tensor(self, x, check_type)


_PLAIN = frozenset({tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)})


def _unwrap(value):  # type: ignore[no-untyped-def]
    kind = type(value)
    return value if kind in _PLAIN else value.value if kind is tl.constexpr else _plain_unwrap(value)


_plain_broadcast, TritonSemantic.broadcast_impl_value = TritonSemantic.broadcast_impl_value, _broadcast
_plain_operands = TritonSemantic.binary_op_type_checking_impl
TritonSemantic.binary_op_type_checking_impl = _check_operands
_plain_cast_tensor, TritonSemantic.cast = TritonSemantic.cast, _cast_tensor
_plain_to_tensor, TritonSemantic.to_tensor = TritonSemantic.to_tensor, _to_tensor
_plain_unwrap, tl.core._unwrap_if_constexpr = tl.core._unwrap_if_constexpr, _unwrap

# --- calls of the language ----------------------------------------------------------------------------------

_builtins: dict[Any, list[tuple[str, Any]]] = {}  # module or class -> names and functions that replace them


def _interpreted(function):  # type: ignore[no-untyped-def]
    """Return a function of the language that computes, without the wrapper that checks `_semantic`."""
    inner = getattr(function, "__wrapped__", function)
    inner = function if tl.core.is_builtin(inner) else inner

    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    return call


def _patch_builtin(package, builder, scope):  # type: ignore[no-untyped-def]
    """Replace the functions of the language, which are searched for once."""
    if package not in _builtins:
        members = inspect.getmembers(package)
        _builtins[package] = [(name, _interpreted(one)) for name, one in members if tl.core.is_builtin(one)]
    for name, function in _builtins[package]:
        scope.set_attr(package, name, function)


interpreter._patch_builtin = _patch_builtin
