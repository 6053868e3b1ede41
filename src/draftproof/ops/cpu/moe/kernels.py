"""Kernels of a mixture of experts: routing, rows sorted by expert, one kernel call an expert, combine.

A sorted row is a copy of a row of x for one expert that the row selected. Sorted rows of an expert are
adjacent, in the order of their rows.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import (
    Kernel,
    call_kernel,
    copy_bytes,
    device,
    f64_of_bits,
    kernel,
    load_f32,
    load_i64,
    share,
    store_f32,
    store_i64,
)

MIN_WEIGHT_SUM = np.float32(1e-20)  # divisor of the weights if all scores of a token are 0
MAX_LINE_BYTES = 256  # arguments of one kernel call, at the start of a thread's scratch
_ZERO = np.float32(0.0)


@kernel
def widen(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Convert bf16 rows to fp32; args: out, x, width."""
    out, x, width = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        for i in range(0, width, 16):
            v.store_n(out + 4 * (row * width + i), v.tload(x, row * width + i, width - i, True), width - i)


@device
def _best(scores: int, taken: int, count: int) -> int:
    """Return the index of the largest score [count] fp32 that is not taken, the lowest of equal ones."""
    best = -1
    for i in range(count):
        if load_i64(taken + 8 * i) == 0 and (
            best < 0 or load_f32(scores + 4 * i) > load_f32(scores + 4 * best)
        ):
            best = i
    store_i64(taken + 8 * best, 1)
    return best


@device
def _group_scores(choice: int, out: int, groups: int, size: int, top2: bool) -> None:
    """Store the score of each group of `size` experts."""
    for group in range(groups):
        first = load_f32(choice + 4 * group * size)
        second = np.float32(-np.inf)
        for i in range(1, size):
            score = load_f32(choice + 4 * (group * size + i))
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        store_f32(out + 4 * group, np.float32(first + second) if top2 else first)


@cache
def make_route(softmax: bool, top2: bool) -> Kernel:
    """Return the routing kernel of a scoring rule and a rule for groups."""

    @kernel
    def route(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Select experts; args: experts, weights, logits, correction, E, k, groups, best groups, norm, scale.

        `experts` [R, k] int64 and `weights` [R, k] fp32 are ordered by rank.
        """
        experts, weights, logits = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        correction, count, top_k = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        groups, top_groups, normalize = load_i64(args + 48), load_i64(args + 56), load_i64(args + 64)
        scale = np.float32(f64_of_bits(load_i64(args + 72)))
        size = count // groups
        scores, choice, rank = scratch, scratch + 4 * count, scratch + 8 * count
        taken, group_taken = scratch + 16 * count, scratch + 24 * count
        begin, end = share(rows, thread, threads)
        for row in range(begin, end):
            line = logits + 4 * row * count
            if softmax:
                largest = load_f32(line)
                for e in range(1, count):
                    largest = max(largest, load_f32(line + 4 * e))
                total = 0.0
                for e in range(count):
                    total += math.exp(np.float64(load_f32(line + 4 * e)) - np.float64(largest))
                for e in range(count):
                    exp = math.exp(np.float64(load_f32(line + 4 * e)) - np.float64(largest))
                    store_f32(scores + 4 * e, np.float32(exp / total))
            else:
                for e in range(count):
                    exp = math.exp(-np.float64(load_f32(line + 4 * e)))
                    store_f32(scores + 4 * e, np.float32(1.0 / (1.0 + exp)))
            for e in range(count):
                bias = load_f32(correction + 4 * e) if correction != 0 else _ZERO
                store_f32(choice + 4 * e, np.float32(load_f32(scores + 4 * e) + bias))
                store_i64(taken + 8 * e, 0)
            if top_groups < groups:
                _group_scores(choice, rank, groups, size, top2)
                for group in range(groups):
                    store_i64(group_taken + 8 * group, 0)
                for _ in range(top_groups):
                    _best(rank, group_taken, groups)
                for e in range(count):
                    store_i64(taken + 8 * e, 1 - load_i64(group_taken + 8 * (e // size)))
            to, selected = weights + 4 * row * top_k, experts + 8 * row * top_k
            weight_sum = _ZERO
            for rank_index in range(top_k):
                best = _best(choice, taken, count)
                store_i64(selected + 8 * rank_index, best)
                store_f32(to + 4 * rank_index, load_f32(scores + 4 * best))
                weight_sum = np.float32(weight_sum + load_f32(scores + 4 * best))
            divisor = max(weight_sum, MIN_WEIGHT_SUM) if normalize != 0 else np.float32(1.0)
            for rank_index in range(top_k):
                weight = np.float32(load_f32(to + 4 * rank_index) / divisor)
                store_f32(to + 4 * rank_index, np.float32(weight * scale))

    return route


@kernel
def sort_rows(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Sort by expert; args: offsets, sources, places, experts, E, k.

    `offsets` [E + 1] first sorted row of each expert, `sources` [R k] row of each sorted row, `places` [R, k]
    sorted row of each rank of a row, all int64. One thread counts and places.
    """
    if thread != 0:
        return
    offsets, sources, places, experts = (
        load_i64(args),
        load_i64(args + 8),
        load_i64(args + 16),
        load_i64(args + 24),
    )
    count, top_k = load_i64(args + 32), load_i64(args + 40)
    for e in range(count + 1):
        store_i64(offsets + 8 * e, 0)
    for i in range(rows * top_k):
        at = offsets + 8 * (load_i64(experts + 8 * i) + 1)
        store_i64(at, load_i64(at) + 1)
    for e in range(count):
        store_i64(offsets + 8 * (e + 1), load_i64(offsets + 8 * (e + 1)) + load_i64(offsets + 8 * e))
    for i in range(rows * top_k):
        at = offsets + 8 * load_i64(experts + 8 * i)
        place = load_i64(at)
        store_i64(at, place + 1)
        store_i64(sources + 8 * place, i // top_k)
        store_i64(places + 8 * i, place)
    for e in range(count, 0, -1):  # placing has moved each offset to that of the next expert
        store_i64(offsets + 8 * e, load_i64(offsets + 8 * (e - 1)))
    store_i64(offsets, 0)


@kernel
def gather_rows(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Copy rows in sorted order; args: out, x, sources, bytes of a row, k."""
    out, x, sources = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    row_bytes, top_k = load_i64(args + 24), load_i64(args + 32)
    begin, end = share(rows * top_k, thread, threads)
    for i in range(begin, end):
        copy_bytes(out + i * row_bytes, x + load_i64(sources + 8 * i) * row_bytes, row_bytes)


@cache
def make_each_expert(pointers: int) -> Kernel:
    """Return the kernel that calls another one for each expert; `pointers`: its arguments that are rows."""

    @kernel
    def each_expert(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Call kernels; args: pointers to sorted rows, offsets, row bytes of each pointer, E, lines, words.

        A line [1 + words] int64 of an expert has the kernel's address and its arguments after the pointers.
        Calls need no barrier between them: they write different rows. An expert without rows is not read.
        """
        offsets, strides = load_i64(args + 8 * pointers), args + 8 * (pointers + 1)
        rest = strides + 8 * pointers
        count, lines, words = load_i64(rest), load_i64(rest + 8), load_i64(rest + 16)
        turn = thread
        for e in range(count):
            first = load_i64(offsets + 8 * e)
            own_rows = load_i64(offsets + 8 * (e + 1)) - first
            if own_rows == 0:
                continue
            line = lines + 8 * e * (1 + words)
            for i in range(pointers):
                store_i64(scratch + 8 * i, load_i64(args + 8 * i) + first * load_i64(strides + 8 * i))
            copy_bytes(scratch + 8 * pointers, line + 8, 8 * words)
            call_kernel(load_i64(line), scratch, own_rows, turn, threads, scratch + MAX_LINE_BYTES)
            turn = turn + 1 if turn + 1 < threads else 0  # a call with few units leaves other threads idle

    return each_expert


@cache
def make_combine(bf16: bool, has_shared: bool, has_gate: bool) -> Kernel:
    """Return the kernel that adds the experts of each row, and the shared expert."""
    size = 2 if bf16 else 4

    @kernel
    def combine(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Combine; args: out, sorted outputs, places, weights, shared (optional), gate (optional), width, k.

        Outputs and the shared expert are fp32. Ranks are added in order; the sum is rounded once.
        """
        out, outputs, places, weights = (
            load_i64(args),
            load_i64(args + 8),
            load_i64(args + 16),
            load_i64(args + 24),
        )
        at = args + 32
        shared, gate = 0, 0
        if has_shared:
            shared = load_i64(at)
            at += 8
        if has_gate:
            gate = load_i64(at)
            at += 8
        width, top_k = load_i64(at), load_i64(at + 8)
        pieces = (width + 15) // 16
        begin, end = share(rows * pieces, thread, threads)
        for unit in range(begin, end):
            row = unit // pieces
            i = (unit - row * pieces) * 16
            n = width - i
            total = v.splat(_ZERO)
            for rank in range(row * top_k, (row + 1) * top_k):
                line = outputs + 4 * (load_i64(places + 8 * rank) * width)
                total = v.add(total, v.mul(v.tload(line, i, n, False), v.splat(load_f32(weights + 4 * rank))))
            if has_shared:
                own = v.tload(shared + 4 * row * width, i, n, False)
                if has_gate:
                    exp = math.exp(-np.float64(load_f32(gate + 4 * row)))
                    own = v.mul(own, v.splat(np.float32(1.0 / (1.0 + exp))))
                total = v.add(total, own)
            v.tstore(out + row * width * size, i, total, n, bf16)

    return combine
