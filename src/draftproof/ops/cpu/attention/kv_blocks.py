"""Blocks of K and V in fp32 for attention by multiply-add, gathered or transposed from the paged cache."""

from __future__ import annotations

from draftproof.ops.cpu.attention.arguments import ARG, arg
from draftproof.ops.cpu.attention.kv import (
    FLOAT,
    SCALE_BYTES,
    element_bytes,
    key_stride,
    kv_offset,
    load_kv,
    page_start,
    scale_offset,
    token_index,
)
from draftproof.ops.cpu.gemm.microkernel import COLUMNS, transpose_bf16, transpose_bf16_pairs
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import device, inlined, load_f32, prefetch

BLOCK = COLUMNS  # keys that are unpacked at a time
PREFETCH_KEYS = 16  # distance at which K and V are prefetched


@inlined
def _widen(src: int, columns: int, ahead: int, dst: int) -> None:
    """Write bf16 [columns], a multiple of 64, in fp32; prefetch the vector `ahead` bytes behind it."""
    for i in range(0, columns, 64):
        prefetch(src + ahead + 2 * i)
        prefetch(src + ahead + 2 * i + 64)
        v.store(dst + 4 * i, v.load_bf16(src + 2 * i))
        v.store(dst + 4 * i + 64, v.load_bf16(src + 2 * i + 32))
        v.store(dst + 4 * i + 128, v.load_bf16(src + 2 * i + 64))
        v.store(dst + 4 * i + 192, v.load_bf16(src + 2 * i + 96))


@device
def gather(
    args: int,
    cache: int,
    slot: int,
    head: int,
    first: int,
    last: int,
    out: int,
    columns: int,
    bf16: bool,
    form: int,
) -> None:
    """Write out [last - first, wide] fp32: the first columns of the head's vectors of keys [first, last)."""
    size = element_bytes(bf16, form)
    num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.dim)
    num_pages, page_size = arg(args, ARG.num_pages), arg(args, ARG.page_size)
    wide = (columns + COLUMNS - 1) // COLUMNS * COLUMNS
    pages = arg(args, ARG.page_table) + slot * arg(args, ARG.max_pages) * 4
    key = first
    while key < last:
        index = token_index(pages, key, page_size, num_pages)
        src = cache + kv_offset(index, head, page_size, num_kv, dim, size, form)
        scale_at = cache + scale_offset(index, head, page_size, num_kv, dim)
        stop = min(last, (key // page_size + 1) * page_size)
        while key < stop:
            dst = out + (key - first) * wide * 4
            if form != FLOAT:
                scale = v.splat(load_f32(scale_at))
                for i in range(0, columns, 16):
                    v.store(dst + 4 * i, v.mul(load_kv(src, i, columns - i, bf16, form), scale))
                scale_at += SCALE_BYTES
            elif bf16 and columns % 64 == 0:
                _widen(src, columns, PREFETCH_KEYS * key_stride(num_kv, dim, size), dst)
            else:
                for i in range(0, columns, 16):
                    v.store(dst + 4 * i, load_kv(src, i, columns - i, bf16, form))
            src += key_stride(num_kv, dim, size)
            key += 1


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
