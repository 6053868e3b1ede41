"""Linear layers with e4m3 or 4-bit weights, decoded block by block to fp32 for the FMA loop.

Weights are packed as panels [N / 64, K, 64] of bytes, two 4-bit codes in a byte: integers of `w4a16`, e2m1 of
`mxfp4`. A block of 128 steps of K is decoded to the scratch of a thread, then multiplied by up to 128 rows.
Blocks are added by ascending K, as in `fma`: a 4-bit weight has the bits of its dequantised form there. Rows
beside e4m3 weights are rounded to e4m3 with a scale of their own, or one per 128 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.cpu.gemm.fma import DEPTH_BLOCK, ROW_CHUNK, finish, unit_rows
from draftproof.ops.cpu.gemm.microkernel import COLUMNS, panel_f32
from draftproof.ops.cpu.gemm.weight_format import PackedWeight, QuantizedFormat
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import Kernel, device, kernel, load_f32, load_i64, share, store_f32

E4M3_MAX = np.float32(448.0)
SMALLEST_NORMAL = np.float32(2.0**-6)  # of e4m3
STEP = np.float32(0.125)  # distance of neighbours, as share of their power of two
TO_FP32 = np.float32(2.0**120)  # e4m3 bits in the place of fp32 bits, times this, are their value
INT4_ZERO = 8.0  # zero point of a symmetric 4-bit weight
MXFP4_GROUP = 32  # steps of K that share an exponent
SMALLEST_FACTOR = np.float32(2.0**-127)  # of mxfp4: of the stored exponent 0, whose bits would be those of 0
FOUR_BITS = ("w4a16", "mxfp4")  # formats whose rows stay floats
_HALF, _TWO, _EIGHT = np.float32(0.5), np.float32(2.0), np.float32(8.0)
ROWS_PER_PASS = 4
_ZERO = np.float32(0.0)


def pack_panels(data: Tensor) -> Tensor:
    """Pack bytes [N, K] to [ceil(N / 64), K, 64], zero-padded."""
    columns, depth = data.shape
    panels = -(-columns // COLUMNS)
    padded = torch.zeros(panels * COLUMNS, depth, dtype=torch.uint8)
    padded[:columns] = data.view(torch.uint8)
    return padded.view(panels, COLUMNS, depth).transpose(1, 2).contiguous()


def pack_by_group(values: Tensor) -> Tensor:
    """Pack values [N, groups] to [ceil(N / 64), groups, 64], zero-padded."""
    columns, groups = values.shape
    panels = -(-columns // COLUMNS)
    padded = torch.zeros(panels * COLUMNS, groups, dtype=values.dtype)
    padded[:columns] = values
    return padded.view(panels, COLUMNS, groups).transpose(1, 2).contiguous()


@device
def round_e4m3(x: int, to: int, count: int, inverse: float, bf16: bool) -> float:
    """Round x [count] times `inverse` to e4m3 numbers, stored as fp32 to `to`; return 0."""
    for i in range(0, count, 16):
        scaled = v.mul(v.tload(x, i, count - i, bf16), v.splat(inverse))
        power = v.as_float(v.iand(v.as_int(scaled), v.isplat(0x7F800000)))
        step = v.mul(v.maximum(power, v.splat(SMALLEST_NORMAL)), v.splat(STEP))
        v.store_n(to + 4 * i, v.mul(v.rint(v.div(scaled, step)), step), count - i)
    return 0.0


@device
def largest_magnitude(x: int, count: int, bf16: bool) -> float:
    """Return the largest magnitude of x [count]."""
    top = v.splat(_ZERO)
    for i in range(0, count, 16):
        value = v.tload(x, i, count - i, bf16)
        top = v.maximum(v.maximum(value, v.sub(v.splat(_ZERO), value)), top)
    return v.max_lane(top)


@cache
def quantize_rows(name: str, bf16: bool) -> Kernel:
    """Return the kernel that prepares rows for a format: e4m3 numbers and scales, or fp32 numbers."""
    size, by_block, rounds = 2 if bf16 else 4, name == "fp8_block", name not in FOUR_BITS

    @kernel
    def prepare_rows(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Store rows as fp32 numbers; args: out, scales, x, depth."""
        out, scales, x, depth = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        chunk = DEPTH_BLOCK if by_block else depth
        chunks = (depth + chunk - 1) // chunk
        begin, end = share(rows * chunks, thread, threads)
        for unit in range(begin, end):
            row = unit // chunks
            first = (unit - row * chunks) * chunk
            count = min(chunk, depth - first)
            line, to = x + (row * depth + first) * size, out + (row * depth + first) * 4
            if rounds:
                largest = largest_magnitude(line, count, bf16)
                inverse = E4M3_MAX / largest if largest > _ZERO else _ZERO
                round_e4m3(line, to, count, inverse, bf16)
                store_f32(scales + 4 * unit, np.float32(largest / E4M3_MAX))
            else:
                for i in range(0, count, 16):
                    v.store_n(to + 4 * i, v.tload(line, i, count - i, bf16), count - i)

    return prepare_rows


@device
def decode_e4m3(weight: int, to: int, steps: int) -> None:
    """Decode bytes [steps, 64] to fp32."""
    for i in range(0, steps * COLUMNS, 16):
        byte = v.iload_bytes(weight + i)
        number = v.ishl(v.iand(byte, v.isplat(0x7F)), v.isplat(20))
        bits = v.ior(number, v.ishl(v.iand(byte, v.isplat(0x80)), v.isplat(24)))
        v.store(to + 4 * i, v.mul(v.as_float(bits), v.splat(TO_FP32)))


@device
def decode_int4(weight: int, scales: int, zeros: int, to: int, first: int, steps: int, group: int) -> None:
    """Decode bytes [steps / 2, 64] of steps first.. of K: scale times (integer - zero point), in bf16."""
    for step in range(0, steps, 2):
        for i in range(0, COLUMNS, 16):
            byte = v.iload_bytes(weight + step // 2 * COLUMNS + i)
            for half in range(2):
                integer = v.iand(byte, v.isplat(15)) if half == 0 else v.ishr(byte, v.isplat(4))
                at = 4 * ((first + step + half) // group * COLUMNS + i)
                value = v.mul(v.sub(v.to_float(integer), v.load(zeros + at)), v.load(scales + at))
                v.store(to + 4 * ((step + half) * COLUMNS + i), v.round_bf16(value))


@device
def decode_mxfp4(weight: int, exponents: int, to: int, first: int, steps: int) -> None:
    """Decode bytes [steps / 2, 64] of steps first.. of K: e2m1 times a power of two, exact in fp32."""
    for step in range(0, steps, 2):
        for i in range(0, COLUMNS, 16):
            byte = v.iload_bytes(weight + step // 2 * COLUMNS + i)
            exponent = v.iload_bytes(exponents + (first + step) // MXFP4_GROUP * COLUMNS + i)
            factor = v.maximum(v.as_float(v.ishl(exponent, v.isplat(23))), v.splat(SMALLEST_FACTOR))
            for half in range(2):
                code = v.iand(byte, v.isplat(15)) if half == 0 else v.ishr(byte, v.isplat(4))
                # The values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of c = 0..7 are the largest of c / 2, c - 2, 2 c - 8.
                c = v.to_float(v.iand(code, v.isplat(7)))
                large = v.maximum(v.sub(c, v.splat(_TWO)), v.sub(v.mul(c, v.splat(_TWO)), v.splat(_EIGHT)))
                magnitude = v.mul(v.maximum(v.mul(c, v.splat(_HALF)), large), factor)
                sign = v.ishl(v.iand(code, v.isplat(8)), v.isplat(28))
                value = v.as_float(v.ior(v.as_int(magnitude), sign))
                v.store(to + 4 * ((step + half) * COLUMNS + i), value)


@cache
def make_linear(name: str, out_bf16: bool) -> Kernel:
    """Return the kernel of a format and an output dtype."""
    is_mxfp4, is_4bit, by_block = name == "mxfp4", name in FOUR_BITS, name == "fp8_block"
    block_bytes, scale_bytes = DEPTH_BLOCK * COLUMNS // (2 if is_4bit else 1), 1 if is_mxfp4 else 4

    @kernel
    def linear_decoded(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply; args: out, rows, their scales, weight, bias, columns, depth, scales, zeros, group."""
        out, x, row_scales = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        weight, bias, columns = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        depth, scales, zeros = load_i64(args + 48), load_i64(args + 56), load_i64(args + 64)
        group = load_i64(args + 72)
        groups = (depth + group - 1) // group
        blocks = (depth + DEPTH_BLOCK - 1) // DEPTH_BLOCK
        panels = (columns + COLUMNS - 1) // COLUMNS
        chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
        decoded, part = scratch, scratch + 4 * DEPTH_BLOCK * COLUMNS
        total = part + 4 * ROWS_PER_PASS * COLUMNS  # [ROW_CHUNK, 64]
        begin, end = share(panels * chunks, thread, threads)
        for unit in range(begin, end):
            panel, first, last = unit_rows(unit, chunks, rows)
            own_scales = scales + scale_bytes * panel * groups * COLUMNS
            own_zeros = zeros + 4 * panel * groups * COLUMNS
            w = weight + panel * (depth * COLUMNS // 2 if is_4bit else depth * COLUMNS)
            for i in range(0, (last - first) * COLUMNS, 16):
                v.store(total + 4 * i, v.splat(_ZERO))
            for block in range(blocks):
                k = block * DEPTH_BLOCK
                length = min(DEPTH_BLOCK, depth - k)
                if is_mxfp4:
                    decode_mxfp4(w + block * block_bytes, own_scales, decoded, k, length)
                elif is_4bit:
                    decode_int4(w + block * block_bytes, own_scales, own_zeros, decoded, k, length, group)
                else:
                    decode_e4m3(w + block * block_bytes, decoded, length)
                for row in range(first, last, ROWS_PER_PASS):
                    count = min(ROWS_PER_PASS, last - row)
                    for i in range(0, count * COLUMNS, 16):
                        v.store(part + 4 * i, v.splat(_ZERO))
                    a = x + 4 * (row * depth + k)
                    panel_f32(count, a, 4 * depth, decoded, 4 * COLUMNS, part, 4 * COLUMNS, length)
                    for i in range(count):
                        to = total + 4 * (row - first + i) * COLUMNS
                        for j in range(0, COLUMNS, 16):
                            y = v.load(part + 4 * (i * COLUMNS + j))
                            if by_block:
                                y = v.mul(y, v.load(own_scales + 4 * (block * COLUMNS + j)))
                                y = v.mul(y, v.splat(load_f32(row_scales + 4 * ((row + i) * blocks + block))))
                            v.store(to + 4 * j, v.add(v.load(to + 4 * j), y))
            for row in range(first, last):
                line, column = total + 4 * (row - first) * COLUMNS, panel * COLUMNS
                if not is_4bit and not by_block:
                    scale = v.splat(load_f32(row_scales + 4 * row))
                    for j in range(0, COLUMNS, 16):
                        y = v.mul(v.load(line + 4 * j), v.load(own_scales + 4 * j))
                        v.store(line + 4 * j, v.mul(y, scale))
                finish(line, out, bias, row, column, columns, COLUMNS, False, out_bf16)

    return linear_decoded


def _pack_fp8(data: Tensor, scales: Tensor, zeros: Tensor | None) -> PackedWeight:
    """Pack e4m3 [N, K] with scales [N]."""
    factors, depth = pack_by_group(scales.float()[:, None]), data.shape[1]
    return PackedWeight(pack_panels(data), depth, (factors, factors, depth))


def _pack_fp8_block(data: Tensor, scales: Tensor, zeros: Tensor | None) -> PackedWeight:
    """Pack e4m3 [N, K] with scales [N or ceil(N / 128), ceil(K / 128)]."""
    if len(scales) != len(data):
        scales = scales.repeat_interleave(DEPTH_BLOCK, 0)[: len(data)]
    factors = pack_by_group(scales.float())
    return PackedWeight(pack_panels(data), data.shape[1], (factors, factors, DEPTH_BLOCK))


def _pack_int4(data: Tensor, scales: Tensor, zeros: Tensor | None) -> PackedWeight:
    """Pack 4-bit integers [N, K / 2] with scales and zero points [N, K / group]."""
    depth = 2 * data.shape[1]
    scales = scales.float()
    points = torch.full_like(scales, INT4_ZERO) if zeros is None else zeros.float()
    extra = pack_by_group(scales), pack_by_group(points), depth // scales.shape[1]
    return PackedWeight(pack_panels(data), depth, extra)


def _pack_mxfp4(data: Tensor, scales: Tensor, zeros: Tensor | None) -> PackedWeight:
    """Pack e2m1 codes [N, K / 2] with exponents [N, K / 32]; both stay bytes."""
    exponents = pack_by_group(scales)
    return PackedWeight(pack_panels(data), 2 * data.shape[1], (exponents, exponents, MXFP4_GROUP))


Pack = Callable[[Tensor, Tensor, Tensor | None], PackedWeight]


def _format(name: str, pack: Pack) -> QuantizedFormat:
    return QuantizedFormat(
        pack=pack,
        quantize_rows=lambda packed, dtype: quantize_rows(name, dtype == torch.bfloat16),
        row_bytes=lambda packed: 4 * packed.depth,
        row_floats=lambda packed: -(-packed.depth // DEPTH_BLOCK) if name == "fp8_block" else 1,
        kernel=lambda packed, out_bf16: make_linear(name, out_bf16),
    )


FORMATS = {
    "fp8": _format("fp8", _pack_fp8),
    "fp8_block": _format("fp8_block", _pack_fp8_block),
    "w4a16": _format("w4a16", _pack_int4),
    "mxfp4": _format("mxfp4", _pack_mxfp4),
}
