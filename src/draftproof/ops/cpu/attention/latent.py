"""Kernels of latent attention around `attention`: norms and KV store, per-head products, rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftproof.ops.cpu.elementwise import normalise, rotate
from draftproof.ops.cpu.gemm.fma import ROW_CHUNK, pack_panels, sum_panel, unit_rows
from draftproof.ops.cpu.gemm.microkernel import COLUMNS, MAX_ROWS
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import Kernel, copy_bytes, device, f64_of_bits, kernel, load_i64, share


def pack_heads(weight: Tensor) -> Tensor:
    """Pack [H, N, K] to panels [H, ceil(N / 64), K, 64], zero-padded."""
    return torch.stack([pack_panels(head) for head in weight])


def _head_linear(bf16: bool) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def head_linear(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply the first `depth` columns of each head to the first `columns` of its result.

        args: out, x, weight, heads, columns, depth, width of a head in x, width of a head in out.
        """
        out, x, weight, heads = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        columns, depth = load_i64(args + 32), load_i64(args + 40)
        x_width, out_width = load_i64(args + 48), load_i64(args + 56)
        panels = (columns + COLUMNS - 1) // COLUMNS
        chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
        begin, end = share(heads * panels * chunks, thread, threads)
        for unit in range(begin, end):
            index, first, last = unit_rows(unit, chunks, rows)  # panel of all heads
            head = index // panels
            column = (index - head * panels) * COLUMNS
            w = weight + index * depth * COLUMNS * size
            for row in range(first, last, MAX_ROWS):
                count = min(MAX_ROWS, last - row)
                a = x + (row * heads + head) * x_width * size
                total = sum_panel(count, a, heads * x_width * size, w, depth, scratch, bf16)
                for i in range(count):
                    to = ((row + i) * heads + head) * out_width + column
                    for j in range(0, min(COLUMNS, columns - column), 16):
                        y = v.load(total + (i * COLUMNS + j) * 4)
                        v.tstore(out, to + j, y, columns - column - j, bf16)

    return head_linear


@device
def _rotate_columns(
    src: int, dst: int, angles: int, width: int, pairs: int, scratch: int, size: int, bf16: bool
) -> None:
    """Rotate rope columns, halves or adjacent pairs, and write halves."""
    if pairs != 0:
        half = width // 2
        for i in range(half):
            copy_bytes(scratch + i * size, src + 2 * i * size, size)
            copy_bytes(scratch + (half + i) * size, src + (2 * i + 1) * size, size)
        rotate(scratch, dst, angles, half, bf16)
    else:
        rotate(src, dst, angles, width // 2, bf16)


@device
def _angles(rope: int, positions: int, row: int, width: int, max_len: int) -> int:
    """Return the address of cos and sin of a row; a position out of range reads a valid row."""
    position = min(max(load_i64(positions + 8 * row), 0), max_len - 1)
    return rope + position * width * 4


def _rotate_queries(bf16: bool) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def rotate_queries(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Rotate the last columns of each head of x to the last columns of the head in out.

        args: out, x, positions, rope, heads, width of a head in x, in out, rope columns, max_len, pairs.
        """
        out, x, positions, rope = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        heads, x_width, out_width = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48)
        width, max_len, pairs = load_i64(args + 56), load_i64(args + 64), load_i64(args + 72)
        begin, end = share(rows * heads, thread, threads)
        for unit in range(begin, end):
            angles = _angles(rope, positions, unit // heads, width, max_len)
            src = x + ((unit + 1) * x_width - width) * size
            dst = out + ((unit + 1) * out_width - width) * size
            _rotate_columns(src, dst, angles, width, pairs, scratch, size, bf16)

    return rotate_queries


def _latent_store(bf16: bool) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def latent_store(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Norm or copy the query columns; norm the latent, rotate the key and store both.

        args: q_out, qkv, positions, kv_index, rope, cache, q_norm, latent_norm, query columns, latent
        columns, rope columns, max_len, places (pages * page_size), pairs, eps.
        """
        q_out, qkv = load_i64(args), load_i64(args + 8)
        positions, kv_index = load_i64(args + 16), load_i64(args + 24)
        rope, cache = load_i64(args + 32), load_i64(args + 40)
        q_norm, latent_norm = load_i64(args + 48), load_i64(args + 56)
        q_width, latent, width = load_i64(args + 64), load_i64(args + 72), load_i64(args + 80)
        max_len, places, pairs = load_i64(args + 88), load_i64(args + 96), load_i64(args + 104)
        eps = f64_of_bits(load_i64(args + 112))
        begin, end = share(2 * rows, thread, threads)
        for unit in range(begin, end):
            row = unit // 2
            src = qkv + row * (q_width + latent + width) * size
            if unit == 2 * row:
                dst = q_out + row * q_width * size
                if q_norm != 0:
                    normalise(src, dst, q_norm, q_width, eps, bf16, bf16)
                else:
                    copy_bytes(dst, src, q_width * size)
                continue
            place = load_i64(kv_index + 8 * row)
            if place < 0 or place >= places:
                continue  # padding: nothing to store
            src += q_width * size
            dst = cache + place * (latent + width) * size
            normalise(src, dst, latent_norm, latent, eps, bf16, bf16)
            angles = _angles(rope, positions, row, width, max_len)
            _rotate_columns(
                src + latent * size, dst + latent * size, angles, width, pairs, scratch, size, bf16
            )

    return latent_store


# kernels by activation dtype: [fp32, bf16]
HEAD_LINEAR: list[Any] = [_head_linear(False), _head_linear(True)]
ROTATE_QUERIES: list[Any] = [_rotate_queries(False), _rotate_queries(True)]
LATENT_STORE: list[Any] = [_latent_store(False), _latent_store(True)]
