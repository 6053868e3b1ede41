"""Paged attention: the row at position p reduces over keys 0..p in an order given by p alone.

Keys are taken in splits of 128. Within a split the softmax is two-pass (all scores, their maximum,
then the weighted sum of V by one chain over ascending keys); splits are merged in ascending order,
whether one thread did them all or several did some each (few rows, many keys). The query heads that share a kv head, and adjacent rows of a request, share the loads of K and V. A key
that a row may not see is never multiplied with anything of that row, so garbage in it is harmless.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftproof.ops.cpu.native import (
    Kernel,
    device,
    f64_of_bits,
    inlined,
    kernel,
    load_f32,
    load_i32,
    load_i64,
    share,
    store_f32,
)
from draftproof.ops.cpu.panel import COLUMNS, panel_f32, transpose
from draftproof.ops.cpu.simd import (
    mask_and,
    mask_first,
    mask_not_first,
    splat,
    vadd,
    vdiv,
    vfma,
    vload,
    vmax,
    vmax_lane,
    vmul,
    vselect,
    vstore,
    vsub,
    vsum,
)
from draftproof.ops.cpu.typed import tload, tstore
from draftproof.ops.cpu.vmath import vexp

SPLIT = 128  # keys
BLOCK = COLUMNS  # keys whose K, then V, are unpacked at a time
MAX_QUERIES = 48  # (row, head) pairs that share a pass over K and V
_ZERO = np.float32(0.0)
_LOWEST = np.float32(-3.0e38)


# The int64 arguments of the kernels, by place.
OUT, Q, POSITIONS, SLOTS, PAGE_TABLE, CACHE, WORKSPACE, WORKSPACE_BYTES = range(8)
NUM_Q, NUM_KV, DIM, WINDOW, NUM_SLOTS, MAX_PAGES, NUM_PAGES, PAGE_SIZE = range(8, 16)
AT_ONCE, SCALE = 16, 17


def scratch_bytes(group: int, dim: int) -> int:
    """Scratch of a thread: see `_split` for what lies in it."""
    queries, wide = max(MAX_QUERIES, group), -(-dim // COLUMNS) * COLUMNS
    return 4 * (queries * (SPLIT + 3 * wide + 8) + 2 * BLOCK * wide) + 4096


@inlined
def _arg(args: int, place: int) -> int:
    return load_i64(args + 8 * place)


@inlined
def _seen(position: int, window: int) -> int:
    """The first key that a position sees."""
    if window > 0:
        return max(0, position - window + 1)
    return 0


@device
def _gather(args: int, cache: int, slot: int, head: int, first: int, last: int, out: int, bf16: bool) -> None:
    """out [last - first, wide] fp32: the head's vectors at keys [first, last) of one request."""
    size = 2 if bf16 else 4
    num_kv, dim = _arg(args, NUM_KV), _arg(args, DIM)
    max_pages, num_pages, page_size = (_arg(args, MAX_PAGES), _arg(args, NUM_PAGES), _arg(args, PAGE_SIZE))
    wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
    pages = _arg(args, PAGE_TABLE) + slot * max_pages * 4
    key = first
    while key < last:
        line = key // page_size
        # a page out of range reads valid memory rather than foreign memory
        page = min(max(load_i32(pages + 4 * line), 0), num_pages - 1)
        src = cache + ((page * page_size + key - line * page_size) * num_kv + head) * dim * size
        stop = min(last, (line + 1) * page_size)
        while key < stop:
            dst = out + (key - first) * wide * 4
            for i in range(0, dim, 16):
                vstore(dst + 4 * i, tload(src, i, dim - i, bf16))
            src += num_kv * dim * size
            key += 1


@device
def _softmax(scores: int, begin: int, end: int) -> Any:
    """scores [begin, end) -> exp(score - max), zeros to the ends of the vectors; (max, sum)."""
    first = begin // 16 * 16
    best = splat(_LOWEST)
    for i in range(first, end, 16):
        valid = mask_and(mask_first(end - i), mask_not_first(begin - i))
        best = vmax(vselect(valid, vload(scores + 4 * i), splat(_LOWEST)), best)
    top = vmax_lane(best)
    total = splat(_ZERO)
    for i in range(first, end, 16):
        valid = mask_and(mask_first(end - i), mask_not_first(begin - i))
        e = vselect(valid, vexp(vsub(vload(scores + 4 * i), splat(top))), splat(_ZERO))
        vstore(scores + 4 * i, e)
        total = vadd(total, e)
    return top, vsum(total)


@device
def _merge(total: int, state: int, part: int, part_state: int, wide: int) -> None:
    """Add a split's sums [wide] and state (maximum, mass) to those of the splits before it."""
    mass = load_f32(part_state + 4)
    if mass == _ZERO:  # the row sees no key of this split
        return
    top, old_top = load_f32(part_state), load_f32(state)
    new_top = max(top, old_top)
    keep = vexp(splat(np.float32(old_top - new_top)))
    gain = vexp(splat(np.float32(top - new_top)))
    masses = vfma(splat(mass), gain, vmul(splat(load_f32(state + 4)), keep))
    store_f32(state, new_top)
    store_f32(state + 4, vmax_lane(masses))
    for i in range(0, wide, 16):
        x = vmul(vload(total + 4 * i), keep)
        vstore(total + 4 * i, vfma(vload(part + 4 * i), gain, x))


@device
def _clear(total: int, state: int, wide: int) -> None:
    for d in range(0, wide, 16):
        vstore(total + d * 4, splat(_ZERO))
    store_f32(state, _LOWEST)
    store_f32(state + 4, _ZERO)


@device
def _write(args: int, row: int, q_head: int, total: int, state: int, bf16: bool) -> None:
    """Divide by the mass, round, store."""
    dim = _arg(args, DIM)
    mass = splat(load_f32(state + 4))
    at = (row * _arg(args, NUM_Q) + q_head) * dim
    for d in range(0, dim, 16):
        tstore(_arg(args, OUT), at + d, vdiv(vload(total + 4 * d), mass), dim - d, bf16)


@inlined
def _clip(key: int, start: int, end: int) -> int:
    return min(max(key, start), end)


@device
def _weigh(
    queries: int,
    group: int,
    at_once: int,
    positions: int,
    window: int,
    split: int,
    start: int,
    end: int,
    weights: int,
    values: int,
    sums: int,
    wide: int,
) -> None:
    """sums [queries, wide] += weights x values over keys [start, end) (of this split), each row's
    own keys only: those that all of a few queries see together, the others one by one."""
    for i in range(0, queries, at_once):
        n = min(at_once, queries - i)
        both_lo, both_hi = start, end
        for j in range(i, i + n):
            position = load_i64(positions + 8 * (j // group))
            both_lo = max(both_lo, _seen(position, window))
            both_hi = min(both_hi, position + 1)
        both_lo = min(both_lo, end)
        both_hi = max(both_hi, both_lo)
        for stage in range(3):
            if stage == 1:
                lo, hi, rows, last = both_lo, both_hi, n, i + 1
            else:
                lo, hi, rows, last = start, end, 1, i + n
            for j in range(i, last):
                if stage != 1:
                    position = load_i64(positions + 8 * (j // group))
                    lo = _clip(_seen(position, window), start, end)
                    hi = _clip(position + 1, start, end)
                    if stage == 0:
                        hi = min(hi, both_lo)
                    else:
                        lo = max(lo, both_hi)
                if lo < hi:
                    for column in range(0, wide, COLUMNS):
                        panel_f32(
                            rows,
                            weights + (j * SPLIT + lo - split) * 4,
                            SPLIT * 4,
                            values + ((lo - start) * wide + column) * 4,
                            wide * 4,
                            sums + (j * wide + column) * 4,
                            wide * 4,
                            hi - lo,
                        )


@device
def _split(
    args: int,
    first: int,
    rows: int,
    head: int,
    slot: int,
    split: int,
    part: int,
    part_state: int,
    scratch: int,
    bf16: bool,
) -> None:
    """One split of keys and one kv head for adjacent rows of one request: sums and states."""
    size = 2 if bf16 else 4
    num_q, dim, window = _arg(args, NUM_Q), _arg(args, DIM), _arg(args, WINDOW)
    at_once = _arg(args, AT_ONCE)
    positions = _arg(args, POSITIONS) + 8 * first
    scale = splat(np.float32(f64_of_bits(_arg(args, SCALE))))
    group = num_q // _arg(args, NUM_KV)
    queries = rows * group
    wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
    cache = _arg(args, CACHE)
    values = cache + _arg(args, NUM_PAGES) * _arg(args, PAGE_SIZE) * _arg(args, NUM_KV) * dim * size

    qs = scratch  # [queries, wide] fp32, scaled
    scores = qs + queries * wide * 4  # [queries, SPLIT]
    lines = scores + queries * SPLIT * 4  # [BLOCK, wide]
    turned = lines + BLOCK * wide * 4  # [wide, BLOCK]

    lowest, highest = split + SPLIT, split
    for row in range(rows):
        position = load_i64(positions + 8 * row)
        lowest = min(lowest, max(split, _seen(position, window)))
        highest = max(highest, min(split + SPLIT, position + 1))
        for g in range(group):
            i = row * group + g
            src = _arg(args, Q) + ((first + row) * num_q + head * group + g) * dim * size
            for d in range(0, dim, 16):
                x = vmul(tload(src, d, dim - d, bf16), scale)
                vstore(qs + (i * wide + d) * 4, x)
    lowest = lowest // BLOCK * BLOCK
    for start in range(lowest, highest, BLOCK):
        _gather(args, cache, slot, head, start, min(start + BLOCK, highest), lines, bf16)
        for d in range(0, dim, 16):
            for key in range(0, BLOCK, 16):
                src, dst = lines + (key * wide + d) * 4, turned + (d * BLOCK + key) * 4
                transpose(src, wide * 4, dst, BLOCK * 4)
        at = scores + (start - split) * 4
        for i in range(queries):
            for key in range(0, BLOCK, 16):
                vstore(at + (i * SPLIT + key) * 4, splat(_ZERO))
        for i in range(0, queries, at_once):
            n = min(at_once, queries - i)
            panel_f32(n, qs + i * wide * 4, wide * 4, turned, BLOCK * 4, at + i * SPLIT * 4, SPLIT * 4, dim)
    for i in range(queries):
        position = load_i64(positions + 8 * (i // group))
        begin = _clip(_seen(position, window), split, split + SPLIT) - split
        end = _clip(position + 1, split, split + SPLIT) - split
        _clear(part + i * wide * 4, part_state + 8 * i, wide)
        if begin < end:
            top, mass = _softmax(scores + i * SPLIT * 4, begin, end)
            store_f32(part_state + 8 * i, top)
            store_f32(part_state + 8 * i + 4, mass)
    for start in range(lowest, highest, BLOCK):
        end = min(start + BLOCK, highest)
        _gather(args, values, slot, head, start, end, lines, bf16)
        _weigh(queries, group, at_once, positions, window, split, start, end, scores, lines, part, wide)


@device
def _run_end(args: int, first: int, rows: int) -> int:
    """The end of the rows, from `first` on, that can share a pass over K and V."""
    slots = _arg(args, SLOTS)
    most = max(1, MAX_QUERIES // (_arg(args, NUM_Q) // _arg(args, NUM_KV)))
    end = first + 1
    slot = load_i64(slots + 8 * first)
    while end < rows and end - first < most and load_i64(slots + 8 * end) == slot:
        end += 1
    return end


@device
def _splits(args: int, first: int, end: int) -> Any:
    """(slot, first split, end of splits) of rows [first, end)."""
    positions, window = _arg(args, POSITIONS), _arg(args, WINDOW)
    slot = min(max(load_i64(_arg(args, SLOTS) + 8 * first), 0), _arg(args, NUM_SLOTS) - 1)
    low, high = load_i64(positions + 8 * first), 0
    for row in range(first, end):
        position = load_i64(positions + 8 * row)
        low = min(low, _seen(position, window))
        high = max(high, position + 1)
    # never beyond the page table, whatever the position says
    high = min(high, _arg(args, MAX_PAGES) * _arg(args, PAGE_SIZE))
    return slot, max(0, low) // SPLIT, (high + SPLIT - 1) // SPLIT


@device
def _shared(args: int, rows: int, threads: int) -> Any:
    """(should threads share the splits of a row?, how many (row run, head, split) there are)."""
    num_kv, dim = _arg(args, NUM_KV), _arg(args, DIM)
    wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
    runs, units, words, first = 0, 0, 0, 0
    while first < rows:
        end = _run_end(args, first, rows)
        slot, low, high = _splits(args, first, end)
        runs += num_kv
        units += num_kv * (high - low)
        words += (high - low) * (end - first) * _arg(args, NUM_Q) * (wide + 2)
        first = end
    fits = 4 * words <= _arg(args, WORKSPACE_BYTES)
    return threads > 1 and runs < 8 * threads and fits, units


def _attention(bf16: bool) -> Kernel:
    @kernel
    def attention(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Every (row run, kv head), or with few of them every split; `merge` then ends the work."""
        num_kv, dim = _arg(args, NUM_KV), _arg(args, DIM)
        group = _arg(args, NUM_Q) // num_kv
        wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
        shared, units = _shared(args, rows, threads)
        begin, stop = share(units, thread, threads)
        unit, first, run = 0, 0, 0
        where = _arg(args, WORKSPACE)
        while first < rows:
            end = _run_end(args, first, rows)
            slot, low, high = _splits(args, first, end)
            queries = (end - first) * group
            for head in range(num_kv):
                if shared:
                    for split in range(low, high):
                        if begin <= unit < stop:
                            _split(
                                args,
                                first,
                                end - first,
                                head,
                                slot,
                                split * SPLIT,
                                where,
                                where + queries * wide * 4,
                                scratch,
                                bf16,
                            )
                        unit += 1
                        where += queries * (wide + 2) * 4
                elif run % threads == thread:
                    total = scratch  # [queries, wide]
                    state = total + queries * wide * 4  # [queries, 2]
                    part = state + queries * 8  # [queries, wide]
                    part_state = part + queries * wide * 4  # [queries, 2]
                    rest = (part_state + queries * 8 + 63) // 64 * 64
                    for i in range(queries):
                        _clear(total + i * wide * 4, state + 8 * i, wide)
                    for split in range(low, high):
                        _split(
                            args,
                            first,
                            end - first,
                            head,
                            slot,
                            split * SPLIT,
                            part,
                            part_state,
                            rest,
                            bf16,
                        )
                        for i in range(queries):
                            at = i * wide * 4
                            _merge(total + at, state + 8 * i, part + at, part_state + 8 * i, wide)
                    for i in range(queries):
                        row, q_head = first + i // group, head * group + i % group
                        _write(args, row, q_head, total + i * wide * 4, state + 8 * i, bf16)
                run += 1
            first = end

    return attention


def _attention_merge(bf16: bool) -> Kernel:
    @kernel
    def attention_merge(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Merge what `attention` left in the workspace; nothing to do if it left nothing."""
        num_kv, dim = _arg(args, NUM_KV), _arg(args, DIM)
        group = _arg(args, NUM_Q) // num_kv
        wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
        shared, units = _shared(args, rows, threads)
        if not shared:
            return
        first, unit = 0, 0
        where = _arg(args, WORKSPACE)
        total, state = scratch, scratch + wide * 4
        while first < rows:
            end = _run_end(args, first, rows)
            slot, low, high = _splits(args, first, end)
            queries = (end - first) * group
            step = queries * (wide + 2) * 4
            for head in range(num_kv):
                for i in range(queries):
                    if unit % threads == thread:
                        _clear(total, state, wide)
                        for split in range(high - low):
                            part = where + split * step
                            part_state = part + queries * wide * 4 + 8 * i
                            _merge(total, state, part + i * wide * 4, part_state, wide)
                        row, q_head = first + i // group, head * group + i % group
                        _write(args, row, q_head, total, state, bf16)
                    unit += 1
                where += (high - low) * step
            first = end

    return attention_merge


# Each table: [fp32, bf16].
ATTENTION: list[Any] = [_attention(False), _attention(True)]
ATTENTION_MERGE: list[Any] = [_attention_merge(False), _attention_merge(True)]
