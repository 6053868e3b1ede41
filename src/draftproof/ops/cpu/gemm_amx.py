"""Linear layers in bf16 on AMX tiles, for one row as for a thousand.

Weights [N, K] are packed as [N / 32, K / 32, 2, 16, 16, 2]: pairs of 1 KiB tiles in the order in which
they are multiplied, so a thread streams its weights from memory in one line. An output is one chain of
tdpbf16ps over ascending K; a tile row never meets another one, so neither the number of rows nor a
row's place touches its bits.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from draftproof.ops.cpu.gemm import ROW_CHUNK, finish
from draftproof.ops.cpu.native import (
    I8,
    I32,
    I64,
    PTR,
    Kernel,
    copy_bytes,
    device,
    kernel,
    load_i64,
    share,
    store_i16,
    store_i64,
)

WIDTH = 32  # columns of a block: two tiles
DEPTH = 32  # K of a step
STEP_BYTES = 2 * WIDTH * DEPTH
_AHEAD = 4 * STEP_BYTES  # how far ahead weights are prefetched
_TILE_DATA = 18  # the XSAVE component that a process must ask for
_ARCH_PRCTL, _REQ_XCOMP_PERM = 158, 0x1023


def available() -> bool:
    """Does this machine have AMX with bf16, and does the kernel let us use it? (Asks for it.)"""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _TILE_DATA) == 0)


def pack_tiles(weight: Tensor) -> Tensor:
    """[N, K] bf16 -> [N / 32, K / 32, 2, 16 pairs of k, 16 n, 2], padded with zeros."""
    columns, depth = weight.shape
    blocks, steps = -(-columns // WIDTH), -(-depth // DEPTH)
    padded = torch.zeros(blocks * WIDTH, steps * DEPTH, dtype=weight.dtype)
    padded[:columns, :depth] = weight
    return padded.view(blocks, 2, 16, steps, 16, 2).permute(0, 3, 1, 4, 2, 5).contiguous()


# Tiles: sums 0 and 1 (first 16 rows, two tiles of columns), 2 and 3 (the next 16 rows); rows of x
# 4 and 5; weights 6 and 7.


def _call(builder: Any, name: str, args: list[Any]) -> None:
    fnty = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), fnty), args)


def _pointer(builder: Any, addr: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(addr, I64(offset)), PTR)


def _tiles_run(row_tiles: int, stream: bool) -> Any:
    @intrinsic
    def run(typingctx: Any, x: Any, x_stride: Any, weight: Any, steps: Any) -> Any:
        """Sums += x [rows, 32 steps] times `steps` pairs of weight tiles."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x, x_stride, weight, steps = args
            lower = builder.add(x, builder.mul(x_stride, I64(16)))
            prefetch = builder.module.declare_intrinsic(
                "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
            )
            with cgutils.for_range(builder, steps, intp=I64) as loop:
                along = builder.mul(loop.index, I64(2 * DEPTH))
                w = builder.add(weight, builder.mul(loop.index, I64(STEP_BYTES)))
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
                        _call(builder, "tdpbf16ps", sums)
                if stream:
                    for line in range(0, STEP_BYTES, 64):
                        ahead = _pointer(builder, w, _AHEAD + line)
                        builder.call(prefetch, [ahead, I32(0), I32(3), I32(1)])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return run


_run_1, _run_1_stream = _tiles_run(1, False), _tiles_run(1, True)
_run_2, _run_2_stream = _tiles_run(2, False), _tiles_run(2, True)


@intrinsic
def _tiles_zero(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for tile in range(4):
            _call(builder, "tilezero", [I8(tile)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _tiles_store(typingctx: Any, c: Any, row_tiles: Any) -> Any:
    """c [16 or 32, 32] fp32 = the sums."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for tile in range(2):
            where = _pointer(builder, args[0], 64 * tile)
            _call(builder, "tilestored64", [I8(tile), where, I64(4 * WIDTH)])
        with builder.if_then(builder.icmp_signed(">", args[1], I64(1))):
            for tile in range(2):
                where = _pointer(builder, args[0], 16 * 4 * WIDTH + 64 * tile)
                _call(builder, "tilestored64", [I8(2 + tile), where, I64(4 * WIDTH)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _tiles_configure(typingctx: Any, config: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "ldtilecfg", [_pointer(builder, args[0])])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _tiles_release(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen


@device
def _configure(config: int, count: int) -> None:
    """Tile shapes for `count` rows (1 to 32); `config` is 64 bytes of scratch."""
    upper = min(count, 16)
    lower = max(count - 16, 1)
    store_i64(config, 1)  # palette 1, start at row 0
    store_i64(config + 8, 0)
    for tile in range(16):
        store_i16(config + 16 + 2 * tile, 64 if tile < 8 else 0)  # bytes of a row
    # a byte a tile: 0 1 4 are upper, 2 3 5 lower, 6 7 always whole
    rows = upper | upper << 8 | lower << 16 | lower << 24 | upper << 32 | lower << 40 | 16 << 48 | 16 << 56
    store_i64(config + 48, rows)
    store_i64(config + 56, 0)
    _tiles_configure(config)


def _linear(out_bf16: bool) -> Kernel:
    @kernel
    def linear_amx(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """args: out, x, weight, bias, columns, depth."""
        out, x, weight = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        bias, columns, depth = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        config, c = scratch, scratch + 64  # c [32, 32] fp32
        rest = c + 4 * 32 * WIDTH  # [32, 32] bf16: the end of x's rows if K is no multiple of 32
        blocks = (columns + WIDTH - 1) // WIDTH
        chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
        steps, tail = depth // DEPTH, depth % DEPTH
        block_bytes = (steps + (1 if tail else 0)) * STEP_BYTES
        begin, end = share(blocks * chunks, thread, threads)
        configured = 0
        for unit in range(begin, end):
            block = unit // chunks
            first = (unit - block * chunks) * ROW_CHUNK
            last = min(first + ROW_CHUNK, rows)
            w = weight + block * block_bytes
            for row in range(first, last, 32):
                count = min(32, last - row)
                if count != configured:
                    _configure(config, count)
                    configured = count
                _tiles_zero()
                a = x + row * depth * 2
                if count <= 16:
                    if row == 0:
                        _run_1_stream(a, depth * 2, w, steps)
                    else:
                        _run_1(a, depth * 2, w, steps)
                elif row == 0:
                    _run_2_stream(a, depth * 2, w, steps)
                else:
                    _run_2(a, depth * 2, w, steps)
                if tail:
                    for i in range(count):
                        at = rest + 64 * i
                        for word in range(8):
                            store_i64(at + 8 * word, 0)
                        copy_bytes(at, a + (i * depth + steps * DEPTH) * 2, 2 * tail)
                    if count <= 16:
                        _run_1(rest, 64, w + steps * STEP_BYTES, 1)
                    else:
                        _run_2(rest, 64, w + steps * STEP_BYTES, 1)
                _tiles_store(c, 1 if count <= 16 else 2)
                for i in range(count):
                    finish(
                        c + i * 4 * WIDTH,
                        out,
                        bias,
                        row + i,
                        block * WIDTH,
                        columns,
                        WIDTH,
                        True,
                        out_bf16,
                    )
        if configured:
            _tiles_release()

    return linear_amx


LINEAR_AMX = [_linear(False), _linear(True)]  # [out bf16?]
