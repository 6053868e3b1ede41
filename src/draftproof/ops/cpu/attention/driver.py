"""Attention kernels: distribution of rows, heads and splits of keys over threads.

With many (row run, kv head) pairs a thread computes whole pairs. With few, as in decoding, the splits are
distributed and a second kernel merges them: the same operations in the same order, so the same bits.

The first row of a run begins as `int64(0)`: with a literal, numba compiles every callee a second time for it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import int64

from draftproof.ops.cpu.attention.amx import split_amx
from draftproof.ops.cpu.attention.arguments import ARG, arg
from draftproof.ops.cpu.attention.fma import (
    MAX_QUERIES,
    SPLIT_KEYS,
    clear,
    first_key,
    make_split,
    merge,
    write,
)
from draftproof.ops.cpu.attention.kv import FLOAT
from draftproof.ops.cpu.attention.kv_blocks import key_unit
from draftproof.ops.cpu.gemm.microkernel import COLUMNS
from draftproof.ops.cpu.jit.amx import configure_rows, tiles_release
from draftproof.ops.cpu.jit.compile import Kernel, device, inlined, kernel, load_i64

SPLIT_COST_KEYS = 32  # cost of a split besides its keys
KEY_COST_QUERIES = 4  # cost of a key besides the queries that it is multiplied by


@device
def _run_end(args: int, first: int, rows: int) -> int:
    """Return the end of the rows from `first` on that can share a pass over K and V."""
    slots = arg(args, ARG.slots)
    most = max(1, MAX_QUERIES // (arg(args, ARG.num_q) // arg(args, ARG.num_kv)))
    end = first + 1
    slot = load_i64(slots + 8 * first)
    while end < rows and end - first < most and load_i64(slots + 8 * end) == slot:
        end += 1
    return end


@device
def _splits(args: int, first: int, end: int) -> Any:
    """Return (slot, first split, end of splits, end of keys) of rows [first, end)."""
    positions, window = arg(args, ARG.positions), arg(args, ARG.window)
    slot = min(max(load_i64(arg(args, ARG.slots) + 8 * first), 0), arg(args, ARG.num_slots) - 1)
    low, high = load_i64(positions + 8 * first), 0
    for row in range(first, end):
        position = load_i64(positions + 8 * row)
        low = min(low, first_key(position, window))
        high = max(high, position + 1)
    # positions beyond the page table are clamped to it
    high = min(high, arg(args, ARG.max_pages) * arg(args, ARG.page_size))
    return slot, max(0, low) // SPLIT_KEYS, (high + SPLIT_KEYS - 1) // SPLIT_KEYS, high


@device
def _is_shared(args: int, rows: int, threads: int) -> bool:
    """Return whether the splits of a (row run, kv head) are distributed: with few of them, if they fit."""
    num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.out_dim)
    wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
    runs, words, first = 0, 0, int64(0)
    while first < rows:
        end = _run_end(args, first, rows)
        _, low, high, _ = _splits(args, first, end)
        runs += num_kv
        words += (high - low) * (end - first) * arg(args, ARG.num_q) * (wide + 2)
        first = end
    fits = 4 * words <= arg(args, ARG.workspace_bytes)
    return threads > 1 and runs < 8 * threads and fits


@inlined
def _owner(cost: int, all_cost: int, threads: int) -> int:
    """Return the thread that computes a unit; cost: of all units before it and half of its own."""
    return min(max(cost * threads // all_cost, 0), threads - 1)


def _cost_functions(amx: bool) -> Any:
    """Return functions of the cost of splits: of splits [low, high) of a run, and of all runs and heads."""

    @device
    def cost_of(low: int, high: int, keys: int, queries: int) -> int:
        cost = (high - low) * SPLIT_COST_KEYS + min(high * SPLIT_KEYS, keys) - low * SPLIT_KEYS
        return cost if amx else cost * (KEY_COST_QUERIES + queries)  # a tile multiplies 16 queries at once

    @device
    def total_cost(args: int, rows: int) -> int:
        num_kv, cost, first = arg(args, ARG.num_kv), 0, int64(0)
        group = arg(args, ARG.num_q) // num_kv
        while first < rows:
            end = _run_end(args, first, rows)
            _, low, high, keys = _splits(args, first, end)
            cost += num_kv * cost_of(low, high, keys, (end - first) * group)
            first = end
        return cost

    return cost_of, total_cost


@cache
def _attention(bf16: bool, amx: bool, form: int, unit: int) -> Kernel:
    split_keys = split_amx if amx else make_split(bf16, form, unit)
    cost_of, total_cost = _cost_functions(amx)

    @kernel
    def attention(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Compute every (row run, kv head), or with few of them every split, which `merge` completes."""
        num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.out_dim)
        group = arg(args, ARG.num_q) // num_kv
        wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
        shared, all_cost = _is_shared(args, rows, threads), total_cost(args, rows)
        cost_before, first = 0, int64(0)
        where = arg(args, ARG.workspace)
        if amx:
            configure_rows(scratch, 32)
        while first < rows:
            end = _run_end(args, first, rows)
            slot, low, high, keys = _splits(args, first, end)
            queries = (end - first) * group
            if shared:  # heads side by side: their keys are adjacent in memory
                step = queries * (wide + 2) * 4
                for split in range(low, high):
                    cost = cost_of(split, split + 1, keys, queries)
                    for head in range(num_kv):
                        if _owner(cost_before + cost // 2, all_cost, threads) == thread:
                            part = where + (head * (high - low) + split - low) * step
                            split_keys(
                                args, first, end - first, head, slot, split * SPLIT_KEYS, part, scratch
                            )
                        cost_before += cost
                where += num_kv * (high - low) * step
                first = end
                continue
            cost = cost_of(low, high, keys, queries)
            for head in range(num_kv):
                if _owner(cost_before + cost // 2, all_cost, threads) == thread:
                    total = scratch  # [queries, wide]
                    state = total + queries * wide * 4  # [queries, 2]
                    part = state + queries * 8  # [queries, wide]
                    part_state = part + queries * wide * 4  # [queries, 2]
                    rest = (part_state + queries * 8 + 63) // 64 * 64
                    for i in range(queries):
                        clear(total + i * wide * 4, state + 8 * i, wide)
                    for split in range(low, high):
                        split_keys(args, first, end - first, head, slot, split * SPLIT_KEYS, part, rest)
                        for i in range(queries):
                            at = i * wide * 4
                            merge(total + at, state + 8 * i, part + at, part_state + 8 * i, wide)
                    for i in range(queries):
                        row, q_head = first + i // group, head * group + i % group
                        write(args, row, q_head, total + i * wide * 4, state + 8 * i, bf16)
                cost_before += cost
            first = end
        if amx:
            tiles_release()

    return attention


@cache
def _attention_merge(bf16: bool) -> Kernel:
    @kernel
    def attention_merge(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Merge the splits that `attention` left in the workspace, if any."""
        num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.out_dim)
        group = arg(args, ARG.num_q) // num_kv
        wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
        if not _is_shared(args, rows, threads):
            return
        first, unit = int64(0), 0
        where = arg(args, ARG.workspace)
        total, state = scratch, scratch + wide * 4
        while first < rows:
            end = _run_end(args, first, rows)
            slot, low, high, _ = _splits(args, first, end)
            queries = (end - first) * group
            step = queries * (wide + 2) * 4
            for head in range(num_kv):
                for i in range(queries):
                    if unit % threads == thread:
                        clear(total, state, wide)
                        for split in range(high - low):
                            part = where + split * step
                            part_state = part + queries * wide * 4 + 8 * i
                            merge(total, state, part + i * wide * 4, part_state, wide)
                        row, q_head = first + i // group, head * group + i % group
                        write(args, row, q_head, total, state, bf16)
                    unit += 1
                where += (high - low) * step
            first = end

    return attention_merge


def select_attention(bf16: bool, form: int, amx: bool, dim: int, page_size: int) -> list[Kernel]:
    """Return the kernels of attention with the code of this case alone; `amx`: on tiles where they exist."""
    on_tiles = amx and bf16 and form == FLOAT
    unit = 0 if on_tiles else key_unit(bf16, form, dim, page_size)
    return [_attention(bf16, on_tiles, form, unit), _attention_merge(bf16)]
