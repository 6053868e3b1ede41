"""Blocks of K and V in fp32 for attention by multiply-add, gathered or transposed from the paged cache."""

from __future__ import annotations

from functools import cache
from typing import Any

from draftproof.ops.cpu.attention.arguments import ARG, arg
from draftproof.ops.cpu.attention.kv import (
    FLOAT,
    SCALE_BYTES,
    element_bytes,
    key_stride,
    kv_offset,
    load_quantized,
    page_start,
    scale_offset,
    token_index,
)
from draftproof.ops.cpu.gemm.microkernel import (
    COLUMNS,
    HAS_AVX512,
    transpose,
    transpose_bf16,
    transpose_bf16_pairs,
)
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import device, inlined, load_f32, prefetch

BLOCK = COLUMNS  # keys that are unpacked at a time
PREFETCH_KEYS = 16  # distance at which K is prefetched


@inlined
def _widen(src: int, scale_at: int, columns: int, ahead: int, dst: int) -> None:
    """Write bf16 [columns] in fp32; prefetch as many at `ahead`."""
    if columns % 64 != 0:
        for i in range(0, columns, 16):
            prefetch(ahead + 2 * i)
            v.store(dst + 4 * i, v.tload(src, i, columns - i, True))
        return
    for i in range(0, columns, 64):
        prefetch(ahead + 2 * i)
        prefetch(ahead + 2 * i + 64)
        v.store(dst + 4 * i, v.load_bf16(src + 2 * i))
        v.store(dst + 4 * i + 64, v.load_bf16(src + 2 * i + 32))
        v.store(dst + 4 * i + 128, v.load_bf16(src + 2 * i + 64))
        v.store(dst + 4 * i + 192, v.load_bf16(src + 2 * i + 96))


@inlined
def _copy(src: int, scale_at: int, columns: int, ahead: int, dst: int) -> None:
    """Write fp32 [columns]."""
    for i in range(0, columns, 16):
        v.store(dst + 4 * i, v.tload(src, i, columns - i, False))


def _scaled(form: int) -> Any:
    """Return the function that writes quantised vectors in fp32."""

    @inlined
    def unpack(src: int, scale_at: int, columns: int, ahead: int, dst: int) -> None:
        scale = v.splat(load_f32(scale_at))
        for i in range(0, columns, 16):
            v.store(dst + 4 * i, v.mul(load_quantized(src, i, columns - i, form), scale))

    return unpack


@cache
def make_gather(bf16: bool, form: int) -> Any:
    """Return the function that gathers vectors of a head in fp32; only its own form is compiled."""
    unpack = _scaled(form) if form != FLOAT else _widen if bf16 else _copy

    @device
    def gather(
        args: int, cache: int, slot: int, head: int, first: int, last: int, out: int, columns: int
    ) -> None:
        """Write out [last - first, wide]: the first columns of the head's vectors of keys [first, last)."""
        size = element_bytes(bf16, form)
        num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.dim)
        num_pages, page_size = arg(args, ARG.num_pages), arg(args, ARG.page_size)
        wide = (columns + COLUMNS - 1) // COLUMNS * COLUMNS
        max_pages = arg(args, ARG.max_pages)
        pages, stride = arg(args, ARG.page_table) + slot * max_pages * 4, key_stride(num_kv, dim, size)
        key, entry = first, first // page_size
        while key < last:
            offset = key - entry * page_size
            index = page_start(pages, entry, page_size, num_pages) + offset
            src = cache + kv_offset(index, head, page_size, num_kv, dim, size, form)
            scale_at = cache + scale_offset(index, head, page_size, num_kv, dim)
            entry += 1
            after = page_start(pages, min(entry, max_pages - 1), page_size, num_pages) + offset
            ahead = cache + kv_offset(after, head, page_size, num_kv, dim, size, form)  # one page further
            stop = min(last, entry * page_size)
            while key < stop:
                unpack(src, scale_at, columns, ahead, out + (key - first) * wide * 4)
                src += stride
                ahead += stride
                scale_at += SCALE_BYTES
                key += 1

    return gather


@device
def _prefetch_keys(args: int, slot: int, head: int, key: int) -> None:
    """Prefetch the head's bf16 K of the keys that are read next and V of keys [key, key + 8)."""
    num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.dim)
    num_pages, page_size, max_pages = (
        arg(args, ARG.num_pages),
        arg(args, ARG.page_size),
        arg(args, ARG.max_pages),
    )
    pages = arg(args, ARG.page_table) + slot * max_pages * 4
    at = token_index(pages, key, page_size, num_pages)
    ahead = token_index(pages, min(key + PREFETCH_KEYS, (max_pages - 1) * page_size), page_size, num_pages)
    values = arg(args, ARG.values) + kv_offset(at, head, page_size, num_kv, dim, 2, FLOAT)
    keys = arg(args, ARG.cache) + kv_offset(ahead, head, page_size, num_kv, dim, 2, FLOAT)
    stride = key_stride(num_kv, dim, 2)
    for i in range(8):
        for line in range(0, 2 * dim, 64):
            prefetch(keys + i * stride + line)
            prefetch(values + i * stride + line)


@device
def transpose_pages(args: int, slot: int, head: int, first: int, last: int, out: int) -> None:
    """Write out [dim, BLOCK]: the head's bf16 vectors of keys [first, last) in fp32, transposed.

    Eight keys at a time are read where they are stored: `page_size` and `dim` are multiples of 8.
    """
    num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.dim)
    num_pages, page_size = arg(args, ARG.num_pages), arg(args, ARG.page_size)
    pages = arg(args, ARG.page_table) + slot * arg(args, ARG.max_pages) * 4
    stride = key_stride(num_kv, dim, 2)
    for key in range(first, last, 8):
        _prefetch_keys(args, slot, head, key)
        index = token_index(pages, key, page_size, num_pages)
        src = arg(args, ARG.cache) + kv_offset(index, head, page_size, num_kv, dim, 2, FLOAT)
        for d in range(0, dim, 8):
            transpose_bf16(src + 2 * d, stride, out + (d * BLOCK + key - first) * 4, BLOCK * 4)


@device
def transpose_words(args: int, slot: int, head: int, first: int, last: int, out: int) -> None:
    """Write what `transpose_pages` writes, 16 keys and 32 dims at a time.

    `page_size` is a multiple of 16, `dim` of 32, and `first` of `BLOCK`. The next keys are prefetched. One
    division in all: one for every 16 keys would take a tenth of the time.
    """
    num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.dim)
    num_pages, page_size = arg(args, ARG.num_pages), arg(args, ARG.page_size)
    max_pages = arg(args, ARG.max_pages)
    pages = arg(args, ARG.page_table) + slot * max_pages * 4
    cache, stride = arg(args, ARG.cache), key_stride(num_kv, dim, 2)
    index, entry = token_index(pages, first, page_size, num_pages), first // page_size
    offset = first - entry * page_size
    for key in range(first, last, 16):
        keys = cache + kv_offset(index, head, page_size, num_kv, dim, 2, FLOAT)
        offset += 16
        if offset == page_size:
            entry, offset = min(entry + 1, max_pages - 1), 0
        index = page_start(pages, entry, page_size, num_pages) + offset
        next_keys = cache + kv_offset(index, head, page_size, num_kv, dim, 2, FLOAT)
        for d in range(0, dim, 32):
            for i in range(16):
                prefetch(next_keys + i * stride + 2 * d)
            transpose_bf16_pairs(keys + 2 * d, stride, out + (d * BLOCK + key - first) * 4, BLOCK * 4)


def _make_gathered(bf16: bool, form: int) -> Any:
    gather = make_gather(bf16, form)

    @device
    def transpose_gathered(args: int, slot: int, head: int, first: int, last: int, out: int) -> None:
        """Write out [dim, BLOCK]: the vectors of keys [first, last), gathered in the buffer after it."""
        dim = arg(args, ARG.dim)
        wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
        lines = out + wide * BLOCK * 4  # [BLOCK, wide]
        gather(args, arg(args, ARG.cache), slot, head, first, last, lines, dim)
        for d in range(0, dim, 16):
            for key in range(0, BLOCK, 16):
                transpose(lines + (key * wide + d) * 4, wide * 4, out + (d * BLOCK + key) * 4, BLOCK * 4)

    return transpose_gathered


@cache
def make_key_loader(bf16: bool, form: int, unit: int) -> Any:
    """Return the function that writes K in fp32, transposed; `unit` as `key_unit` returns it."""
    if unit == 1:
        return _make_gathered(bf16, form)
    return transpose_words if unit == 16 else transpose_pages


def key_unit(bf16: bool, form: int, dim: int, page_size: int) -> int:
    """Return how many keys are transposed at a time where they are stored; 1: they are gathered first."""
    if not bf16 or form != FLOAT:
        return 1
    if HAS_AVX512 and page_size % 16 == 0 and dim % 32 == 0:
        return 16
    return 8 if page_size % 8 == 0 and dim % 8 == 0 else 1
