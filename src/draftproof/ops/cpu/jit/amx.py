"""AMX tile operations as intrinsics, for machines where `available()` is true.

Tile numbers are part of an instruction, so each pattern of use is emitted whole: `run_*` for GEMM,
`tiles_dot` for attention.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from draftproof.ops.cpu.jit.compile import (
    I8,
    I64,
    PTR,
    device,
    emit_prefetch,
    i64,
    op,
    store_i16,
    store_i64,
    void,
)

_TILE_DATA = 18  # XSAVE component that a process must request
_ARCH_PRCTL, _REQ_XCOMP_PERM = 158, 0x1023
TILE_BYTES = 1024
PREFETCH_BYTES = 8 * TILE_BYTES  # how far ahead GEMM prefetches weights


def available() -> bool:
    """Return whether AMX with bf16 is available; requests the permission from the operating system."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _TILE_DATA) == 0)


def takes_bytes() -> bool:
    """Return whether int8 tiles are available as well."""
    return bool(available() and binding.get_host_cpu_features().get("amx-int8"))


def _call(builder: Any, name: str, *args: Any) -> None:
    fnty = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), fnty), args)


def _pointer(builder: Any, addr: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(addr, I64(offset)), PTR)


# GEMM. Tiles: sums 0 and 1 (first 16 rows, two tiles of columns), 2 and 3 (the next 16 rows); rows of x
# 4 and 5; weights 6 and 7.


def _tiles_run(row_tiles: int, stream: bool, product: str = "tdpbf16ps") -> Any:
    """Return an intrinsic that adds x [rows, 64 bytes per step] times `steps` pairs of weight tiles."""

    def build(builder: Any, args: Any) -> None:
        x, x_stride, weight, steps = args
        lower = builder.add(x, builder.mul(x_stride, I64(16)))
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            along = builder.mul(loop.index, I64(64))
            w = builder.add(weight, builder.mul(loop.index, I64(2 * TILE_BYTES)))
            for tile, rows in enumerate((x, lower)[:row_tiles]):
                where = _pointer(builder, builder.add(rows, along))
                _call(builder, "tileloadd64", I8(4 + tile), where, x_stride)
            for tile in range(2):
                _call(builder, "tileloadd64", I8(6 + tile), _pointer(builder, w, 1024 * tile), I64(64))
                for rows in range(row_tiles):
                    _call(builder, product, I8(2 * rows + tile), I8(4 + rows), I8(6 + tile))
            if stream:
                for line in range(0, 2 * TILE_BYTES, 64):
                    emit_prefetch(builder, _pointer(builder, w, PREFETCH_BYTES + line))

    return op(void, [i64] * 4, build)


run_1, run_1_stream = _tiles_run(1, False), _tiles_run(1, True)
run_2, run_2_stream = _tiles_run(2, False), _tiles_run(2, True)
run_bytes_1, run_bytes_2 = _tiles_run(1, True, "tdpbssd"), _tiles_run(2, True, "tdpbssd")


def _zero(builder: Any, args: Any) -> None:
    for tile in range(4):
        _call(builder, "tilezero", I8(tile))


def _store(builder: Any, args: Any) -> None:
    for tile in range(2):
        _call(builder, "tilestored64", I8(tile), _pointer(builder, args[0], 64 * tile), I64(128))
    with builder.if_then(builder.icmp_signed(">", args[1], I64(1))):
        for tile in range(2):
            where = _pointer(builder, args[0], 16 * 128 + 64 * tile)
            _call(builder, "tilestored64", I8(2 + tile), where, I64(128))


tiles_zero = op(void, [], _zero)
tiles_store = op(void, [i64, i64], _store)  # the sums to c [16 or 32, 32] fp32; row tiles
tiles_configure = op(void, [i64], lambda b, a: _call(b, "ldtilecfg", _pointer(b, a[0])))
tiles_release = op(void, [], lambda b, a: _call(b, "tilerelease"))


@device
def configure_rows(config: int, count: int) -> None:
    """Set the tile shapes for `count` rows, 1 to 32 (all tiles whole); `config` is 64 bytes of scratch."""
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


# Attention. Scores: sums in tile 0, keys in 4, queries in 6.


def _dot_keys(builder: Any, args: Any) -> None:
    keys, key_stride, queries, steps, c = args
    _call(builder, "tilezero", I8(0))
    with cgutils.for_range(builder, steps, intp=I64) as loop:
        along = builder.mul(loop.index, I64(64))
        _call(builder, "tileloadd64", I8(4), _pointer(builder, builder.add(keys, along)), key_stride)
        at = builder.add(queries, builder.mul(loop.index, I64(TILE_BYTES)))
        _call(builder, "tileloadd64", I8(6), _pointer(builder, at), I64(64))
        _call(builder, "tdpbf16ps", I8(0), I8(4), I8(6))
    _call(builder, "tilestored64", I8(0), _pointer(builder, c), I64(64))


# c [16 keys, 16 queries] fp32 = keys [16, 32 steps] x queries [steps, 16 pairs, 16 queries, 2]
tiles_dot_keys = op(void, [i64] * 5, _dot_keys)


# Weighted values. Tiles: sums 0 to 3; two terms of the weights 4 and 5; values 6 and 7.


def _dot_values(builder: Any, args: Any) -> None:
    high, low, stride, values, steps, c, c_stride = args
    _zero(builder, ())
    with cgutils.for_range(builder, steps, intp=I64) as loop:
        along = builder.mul(loop.index, I64(64))
        for i, base in enumerate((high, low)):
            where = _pointer(builder, builder.add(base, along))
            _call(builder, "tileloadd64", I8(4 + i), where, stride)
        at = builder.add(values, builder.mul(loop.index, I64(4 * TILE_BYTES)))
        for tile in range(4):
            _call(builder, "tileloadd64", I8(6 + tile % 2), _pointer(builder, at, TILE_BYTES * tile), I64(64))
            for i in range(2):
                _call(builder, "tdpbf16ps", I8(tile), I8(4 + i), I8(6 + tile % 2))
    for tile in range(4):
        _call(builder, "tilestored64", I8(tile), _pointer(builder, c, 64 * tile), c_stride)


# c [16, 64] fp32 = (high + low) [16, 32 steps] x values [steps, 4 tiles, 16 pairs, 16, 2]
tiles_dot_values = op(void, [i64] * 7, _dot_values)
