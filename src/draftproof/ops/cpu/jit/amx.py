"""AMX tile operations as intrinsics, for machines where `available()` is true.

Tile numbers are part of an instruction, so each pattern of use is emitted whole: `tiles_run` for GEMM,
`tiles_dot` for attention.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from draftproof.ops.cpu.jit.compile import I8, I32, I64, PTR, device, store_i16, store_i64

_TILE_DATA = 18  # XSAVE component that a process must request
_ARCH_PRCTL, _REQ_XCOMP_PERM = 158, 0x1023
TILE_BYTES = 1024
AHEAD = 8 * TILE_BYTES  # how far ahead GEMM prefetches weights


def available() -> bool:
    """Return whether AMX with bf16 is available; requests the permission from the operating system."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _TILE_DATA) == 0)


# GEMM. Tiles: sums 0 and 1 (first 16 rows, two tiles of columns), 2 and 3 (the next 16 rows); rows of x
# 4 and 5; weights 6 and 7.


def _call(builder: Any, name: str, args: list[Any]) -> None:
    fnty = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), fnty), args)


def _pointer(builder: Any, addr: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(addr, I64(offset)), PTR)


def takes_bytes() -> bool:
    """Return whether int8 tiles are available as well."""
    return bool(available() and binding.get_host_cpu_features().get("amx-int8"))


def _tiles_run(row_tiles: int, stream: bool, product: str = "tdpbf16ps") -> Any:
    @intrinsic
    def run(typingctx: Any, x: Any, x_stride: Any, weight: Any, steps: Any) -> Any:
        """Add x [rows, 64 bytes per step] times `steps` pairs of weight tiles to the sums."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x, x_stride, weight, steps = args
            lower = builder.add(x, builder.mul(x_stride, I64(16)))
            prefetch = builder.module.declare_intrinsic(
                "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
            )
            with cgutils.for_range(builder, steps, intp=I64) as loop:
                along = builder.mul(loop.index, I64(64))
                w = builder.add(weight, builder.mul(loop.index, I64(2 * TILE_BYTES)))
                _call(
                    builder,
                    "tileloadd64",
                    [I8(4), _pointer(builder, builder.add(x, along)), x_stride],
                )
                if row_tiles == 2:
                    _call(
                        builder,
                        "tileloadd64",
                        [I8(5), _pointer(builder, builder.add(lower, along)), x_stride],
                    )
                for tile in range(2):
                    where = _pointer(builder, w, 1024 * tile)
                    _call(builder, "tileloadd64", [I8(6 + tile), where, I64(64)])
                    for rows in range(row_tiles):
                        sums = [I8(2 * rows + tile), I8(4 + rows), I8(6 + tile)]
                        _call(builder, product, sums)
                if stream:
                    for line in range(0, 2 * TILE_BYTES, 64):
                        ahead = _pointer(builder, w, AHEAD + line)
                        builder.call(prefetch, [ahead, I32(0), I32(3), I32(1)])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return run


run_1, run_1_stream = _tiles_run(1, False), _tiles_run(1, True)
run_2, run_2_stream = _tiles_run(2, False), _tiles_run(2, True)
run_bytes_1, run_bytes_2 = _tiles_run(1, True, "tdpbssd"), _tiles_run(2, True, "tdpbssd")


@intrinsic
def tiles_zero(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for tile in range(4):
            _call(builder, "tilezero", [I8(tile)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def tiles_store(typingctx: Any, c: Any, row_tiles: Any) -> Any:
    """Store the sums to c [16 or 32, 32] fp32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for tile in range(2):
            where = _pointer(builder, args[0], 64 * tile)
            _call(builder, "tilestored64", [I8(tile), where, I64(128)])
        with builder.if_then(builder.icmp_signed(">", args[1], I64(1))):
            for tile in range(2):
                where = _pointer(builder, args[0], 16 * 128 + 64 * tile)
                _call(builder, "tilestored64", [I8(2 + tile), where, I64(128)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def tiles_configure(typingctx: Any, config: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "ldtilecfg", [_pointer(builder, args[0])])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def tiles_release(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen


@device
def configure_rows(config: int, count: int) -> None:
    """Set the tile shapes for `count` rows (1 to 32); `config` is 64 bytes of scratch."""
    upper = min(count, 16)
    lower = max(count - 16, 1)
    store_i64(config, 1)  # palette 1, start at row 0
    store_i64(config + 8, 0)
    for tile in range(16):
        store_i16(config + 16 + 2 * tile, 64 if tile < 8 else 0)  # bytes of a row
    # one byte per tile: 0 1 4 are upper, 2 3 5 lower, 6 7 always whole
    rows = upper | upper << 8 | lower << 16 | lower << 24 | upper << 32 | lower << 40 | 16 << 48 | 16 << 56
    store_i64(config + 48, rows)
    store_i64(config + 56, 0)
    tiles_configure(config)


@device
def configure_full(config: int) -> None:
    """Set all tiles to 16 rows of 64 bytes."""
    configure_rows(config, 32)


# Attention. Tiles: sums 0 to 3; left 4 and 5; right 6 and 7.


def _tiles_dot(lefts: int) -> Any:
    """Return an intrinsic: c [16, 64] fp32 = sum over `lefts` of left [16, 32 steps] x right."""

    @intrinsic
    def dot(
        typingctx: Any, left: Any, other: Any, left_stride: Any, right: Any, steps: Any, c: Any, c_stride: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            left, other, left_stride, right, steps, c, c_stride = args
            for tile in range(4):
                _call(builder, "tilezero", [I8(tile)])
            with cgutils.for_range(builder, steps, intp=I64) as loop:
                along = builder.mul(loop.index, I64(64))
                for i, base in enumerate((left, other)[:lefts]):
                    where = _pointer(builder, builder.add(base, along))
                    _call(builder, "tileloadd64", [I8(4 + i), where, left_stride])
                at = builder.add(right, builder.mul(loop.index, I64(4 * TILE_BYTES)))
                for tile in range(4):
                    where = _pointer(builder, at, TILE_BYTES * tile)
                    _call(builder, "tileloadd64", [I8(6 + tile % 2), where, I64(64)])
                    for i in range(lefts):
                        _call(builder, "tdpbf16ps", [I8(tile), I8(4 + i), I8(6 + tile % 2)])
            for tile in range(4):
                _call(builder, "tilestored64", [I8(tile), _pointer(builder, c, 64 * tile), c_stride])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return dot


tiles_dot, tiles_dot_pair = _tiles_dot(1), _tiles_dot(2)
