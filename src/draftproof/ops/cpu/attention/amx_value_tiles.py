"""Values of a split of keys as AMX tiles: keys in pairs, so that a tile row holds two keys of 16 columns."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from draftproof.ops.cpu.attention.arguments import ARG, arg
from draftproof.ops.cpu.jit.amx import TILE_BYTES
from draftproof.ops.cpu.jit.compile import (
    I1,
    I16,
    I32,
    I64,
    PTR,
    device,
    i64,
    load_i64,
    load_u16,
    op,
    pointer,
    store_i16,
    store_i64,
)
from draftproof.ops.cpu.jit.simd import splat_value

PAIRED_KEYS = 32  # keys of a tile
_EXPONENT = 0x7F80  # exponent bits of a bf16; all ones in NaN and infinity
_MAGNITUDE = 0x7FFF  # all bits of a bf16 but its sign


def _pack_pairs(builder: Any, args: Any) -> Any:
    """Emit 16 pairs of keys and 32 columns; return whether a value is not finite.

    Instructions that interleave words do it in each 128 bits, so the columns of a tile are 4 of every 8.
    """
    cache, places, keys, count, to = args
    words, mask = ir.VectorType(I16, 32), ir.VectorType(I1, 32)
    zero, magnitude, exponent, lanes = (
        ir.Constant(words, value)
        for value in ([0] * 32, [_MAGNITUDE] * 32, [_EXPONENT] * 32, list(range(32)))
    )
    load_type = ir.FunctionType(words, [PTR, I32, mask, words])
    load = builder.module.declare_intrinsic("llvm.masked.load.v32i16.p0", (), load_type)
    inside = builder.icmp_signed("<", lanes, splat_value(builder, builder.trunc(count, I16), words))
    largest = cgutils.alloca_once(builder, words)
    builder.store(zero, largest)
    with cgutils.for_range(builder, I64(16), intp=I64) as loop:
        pair = []
        for i in range(2):
            key = builder.add(builder.mul(loop.index, I64(2)), I64(i))
            is_key = builder.icmp_signed("<", key, keys)
            at = builder.add(places, builder.mul(builder.select(is_key, key, I64(0)), I64(8)))
            where = pointer(builder, builder.add(cache, builder.load(pointer(builder, at), typ=I64)))
            columns = builder.select(is_key, inside, ir.Constant(mask, [0] * 32))
            pair.append(builder.call(load, [where, I32(1), columns, zero]))
            old, found = builder.load(largest, typ=words), builder.and_(pair[-1], magnitude)
            builder.store(builder.select(builder.icmp_unsigned(">", found, old), found, old), largest)
        for half in range(2):
            order = [8 * (i // 8) + 4 * half + i % 8 // 2 + 32 * (i % 2) for i in range(32)]
            mixed = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, 32), order))
            at = builder.add(to, builder.add(builder.mul(loop.index, I64(64)), I64(TILE_BYTES * half)))
            builder.store(mixed, pointer(builder, at), align=1)
    bad = builder.icmp_unsigned(">=", builder.load(largest, typ=words), exponent)
    return builder.zext(builder.icmp_unsigned("!=", builder.bitcast(bad, I32), I32(0)), I64)


# (cache, places of 32 keys, keys, columns, to)
_pack_32_keys = op(i64, [i64] * 5, _pack_pairs)


@device
def pack_values(args: int, places: int, keys: int, wide: int, packed: int) -> bool:
    """Write packed [wide / 64, keys / 32, 4]: tiles of 16 pairs of keys x 16 columns, then zeros.

    Return whether a value is not finite.
    """
    dim, cache = arg(args, ARG.dim), arg(args, ARG.values)
    steps, any_bad = (keys + 31) // 32, 0
    for step in range(steps):
        for d in range(0, wide, 32):
            to = packed + ((d // 64 * steps + step) * 4 + d % 64 // 16) * TILE_BYTES
            first, columns = places + 8 * 32 * step, max(0, min(32, dim - d))
            any_bad |= _pack_32_keys(cache + 2 * min(d, dim), first, keys - 32 * step, columns, to)
    return any_bad != 0


@device
def clear_values(args: int, places: int, keys: int, packed: int, flags: int) -> None:
    """Replace packed values that are not finite by 0, and write flags [keys] int64: 1 at their keys."""
    dim, cache = arg(args, ARG.dim), arg(args, ARG.values)
    steps = (keys + 31) // 32
    for key in range(keys):
        is_bad = 0
        for d in range(dim):
            if load_u16(cache + load_i64(places + 8 * key) + 2 * d) & _EXPONENT == _EXPONENT:
                is_bad = 1
                tile = d % 64 // 32 * 2 + d % 8 // 4
                at = packed + ((d // 64 * steps + key // 32) * 4 + tile) * TILE_BYTES
                store_i16(at + key % 32 // 2 * 64 + (d % 32 // 8 * 4 + d % 4) * 4 + key % 2 * 2, 0)
        store_i64(flags + 8 * key, is_bad)
