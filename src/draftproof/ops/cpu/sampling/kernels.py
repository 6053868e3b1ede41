"""Sampling kernels on fp32 logits [rows, vocabulary]; a thread processes whole rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import (
    copy_bytes,
    device,
    kernel,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    share,
    store_f32,
    store_f64,
    store_i64,
)
from draftproof.ops.cpu.sampling.philox import gumbel, noise_word, unit, vphilox
from draftproof.ops.cpu.sampling.row_select import (
    MINUS_INF,
    best_id,
    best_value,
    count_above,
    gather_above,
    key_of,
    kth_value,
    lload,
    mass_above,
    nucleus_value,
    sort,
    value_of,
)

_LOW = 0xFFFFFFFF
_MAX_NOISE = np.float32(23.0)  # upper bound of 32-bit Gumbel noise
_UNIT = np.float32(2.0**-32)
_ZERO = np.float32(0.0)
_ALL_LANES = 0xFFFF
SAMPLED, NOT_FINITE = 1, 2  # states of a row, see `greedy_tokens`


def scratch_bytes(vocab: int) -> int:
    """Return the scratch bytes: two arrays of sort keys, or one of masses."""
    return 16 * vocab + 4096


@kernel
def argmax(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Process rows; args: out, logits, vocabulary."""
    out, logits, vocab = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        store_i64(out + 8 * row, best_id(logits + row * vocab * 4, vocab, scratch))


@device
def _is_finite(row: int, vocab: int, largest: int) -> bool:
    """Return whether no logit is NaN and that of id `largest` is finite."""
    ordered = np.int64(_ALL_LANES)
    for i in range(0, vocab, 16):
        x = lload(row, i, vocab)
        ordered &= v.mask_bits(v.ge(x, x))
    return ordered == _ALL_LANES and not math.isinf(load_f32(row + 4 * largest))


@kernel
def greedy_tokens(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Take the argmax of rows; args: tokens, states, logits, slots, temperatures of slots, vocabulary.

    A padding row has token 0. States: `SAMPLED` if the slot has a temperature, `NOT_FINITE`.
    """
    tokens, states, logits = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    slots, temperatures, vocab = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        slot, line = load_i64(slots + 8 * row), logits + row * vocab * 4
        token, state = np.int64(0), np.int64(0)
        if slot >= 0:
            token = best_id(line, vocab, scratch)
            if load_f32(temperatures + 4 * slot) > _ZERO:
                state = np.int64(SAMPLED)
            if not _is_finite(line, vocab, token):
                state = np.int64(NOT_FINITE)
        store_i64(tokens + 8 * row, token)
        store_i64(states + 8 * row, state)


@device
def _gumbel_row(logits: int, vocab: int, seed: int, position: int, stream: int, work: int) -> int:
    """Return the exact argmax of logits + noise, with logarithms of a short list only.

    With S the best sum so far, an id can win only if its noise -log(E) reaches S - logit, that is
    E <= exp(logit - S); and E = -log1p(-u) >= u. So u <= exp(logit - S) is necessary, and cheap.
    """
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    position &= _LOW
    found = best_id(logits, vocab, work)
    noise = gumbel(noise_word(found, position, stream, k0, k1))
    best = np.float32(load_f32(logits + 4 * found) + noise)
    for lane in range(0, 16, 2):  # lanes 0 to 15
        store_i64(work + 4 * lane, lane | (lane + 1) << 32)
    lanes = v.iload(work)
    for i in range(0, vocab, 64):
        # covers the rounding of the sums and of the vector arithmetic below
        margin = np.float32(np.float32(1e-3) + abs(best) * np.float32(1e-6))
        top = lload(logits, i, vocab)
        for part in range(16, 64, 16):
            top = v.maximum(lload(logits, i + part, vocab), top) if i + part < vocab else top
        if v.max_lane(top) + _MAX_NOISE + margin < best:
            continue
        w0, w1, w2, w3 = vphilox(v.iadd(lanes, v.isplat(i // 4)), position, stream, k0, k1)
        even_low, even_high = v.interleave_low(w0, w2), v.interleave_high(w0, w2)
        odd_low, odd_high = v.interleave_low(w1, w3), v.interleave_high(w1, w3)
        v.istore(work, v.interleave_low(even_low, odd_low))
        v.istore(work + 64, v.interleave_high(even_low, odd_low))
        v.istore(work + 128, v.interleave_low(even_high, odd_high))
        v.istore(work + 192, v.interleave_high(even_high, odd_high))
        for part in range(0, min(64, vocab - i), 16):
            words = v.iload(work + 4 * part)
            u = v.mul(v.unsigned_to_float(words), v.splat(_UNIT))
            x = v.add(v.sub(lload(logits, i + part, vocab), v.splat(best)), v.splat(margin))
            bits = v.mask_bits(v.ge(v.exp(x), u))
            while bits != 0:
                token = i + part + v.first_one(bits)
                bits &= bits - 1
                if token < vocab:
                    word = load_i32(work + 4 * (token - i)) & _LOW
                    score = np.float32(load_f32(logits + 4 * token) + gumbel(word))
                    if score > best or (score == best and token < found):
                        best, found = score, token
    return found


@kernel
def gumbel_argmax(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Sample rows; args: out, scaled, seeds, positions, vocabulary, stream."""
    out, scaled, seeds = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    positions, vocab, stream = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        seed, position = load_i64(seeds + 8 * row), load_i64(positions + 8 * row)
        logits = scaled + row * vocab * 4
        store_i64(out + 8 * row, _gumbel_row(logits, vocab, seed, position, stream, scratch))


@kernel
def uniform(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Draw uniforms; args: out, seeds, positions, stream."""
    out, seeds = load_i64(args), load_i64(args + 8)
    positions, stream = load_i64(args + 16), load_i64(args + 24)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        seed = load_i64(seeds + 8 * row)
        position = load_i64(positions + 8 * row)
        word = noise_word(0, position, stream, seed & _LOW, (seed >> 32) & _LOW)
        store_f64(out + 8 * row, unit(word))


@device
def _masses(row: int, vocab: int, top: Any, out: int) -> float:
    """Return the sum of exp(logit - top) in fp64; write the terms to `out` [vocab, padded] unless it is 0."""
    total = v.dzero(0)
    for i in range(0, vocab, 16):
        mass = v.exp(v.sub(lload(row, i, vocab), v.splat(top)))
        if out != 0:
            v.store(out + 4 * i, mass)
        total = v.dadd(total, v.to_double(mass))
    return v.dsum_lanes(total)


@kernel
def logsumexp(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Process rows; args: out, logits, vocabulary."""
    out, logits, vocab = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        line = logits + row * vocab * 4
        top = best_value(line, vocab)
        if math.isinf(top):
            store_f32(out + 4 * row, top)
        else:
            total = np.float64(top) + math.log(_masses(line, vocab, top, 0))
            store_f32(out + 4 * row, np.float32(total))


@kernel
def rank(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Rank ids; args: out, logits, ids, vocabulary."""
    out, logits = load_i64(args), load_i64(args + 8)
    ids, vocab = load_i64(args + 16), load_i64(args + 24)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        line = logits + row * vocab * 4
        token = min(max(load_i64(ids + 8 * row), 0), vocab - 1)
        own = v.splat(load_f32(line + 4 * token))
        count = np.int64(1)
        for i in range(0, vocab, 16):
            x = lload(line, i, vocab)
            before = v.mask_bits(v.gt(x, own))
            if i < token:  # equal values precede it only with a lower id
                equal = v.mask_bits(v.ge(x, own))
                before |= equal & ((1 << min(token - i, 16)) - 1)
            count += v.count_ones(before)
        store_i64(out + 8 * row, count)


@kernel
def top(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Select the k best; args: values, ids, logits, vocabulary, k."""
    values, ids, logits = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    vocab, k = load_i64(args + 24), load_i64(args + 32)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        line = logits + row * vocab * 4
        limit = kth_value(line, vocab, k)
        count = gather_above(line, vocab, limit, scratch)
        keys = sort(scratch, scratch + 8 * vocab, count)
        to = ids + 8 * row * k
        for i in range(count):
            store_i64(to + 8 * i, load_i64(keys + 8 * i) & 0x7FFFFFFF)
        for token in range(vocab):  # values equal to the limit, in order of id
            if count >= k:
                break
            if load_f32(line + 4 * token) == limit:
                store_i64(to + 8 * count, token)
                count += 1
        for token in range(vocab):  # NaN fills the rest
            if count >= k:
                break
            if math.isnan(load_f32(line + 4 * token)):
                store_i64(to + 8 * count, token)
                count += 1
        for i in range(k):
            token = load_i64(to + 8 * i)
            store_f32(values + 4 * (row * k + i), load_f32(line + 4 * token))


@device
def _keep(line: int, vocab: int, limit: Any, ties: int) -> None:
    """Write -inf below `limit`, and to values equal to it after the first `ties`."""
    for token in range(vocab):
        value = load_f32(line + 4 * token)
        if value == limit and ties > 0:
            ties -= 1
        elif not value > limit:
            store_f32(line + 4 * token, MINUS_INF)


@device
def _nucleus(line: int, vocab: int, best: Any, top_p: float, masses: int) -> None:
    """Keep tokens while the mass before them is below top_p, at least the best one."""
    enough = top_p * _masses(line, vocab, best, masses)
    limit = nucleus_value(line, masses, vocab, enough)
    above = mass_above(line, masses, vocab, limit)
    mass = np.float64(0.0)
    for token in range(vocab):
        if load_f32(line + 4 * token) == limit:
            mass = np.float64(load_f32(masses + 4 * token))
            break
    ties = np.int64(1)
    while ties < vocab and above + ties * mass < enough:
        ties += 1
    _keep(line, vocab, limit, ties)


@kernel
def truncate(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Truncate rows; args: out, scaled, top_k (int64), top_p (fp64), min_p (fp64), vocabulary."""
    out, scaled = load_i64(args), load_i64(args + 8)
    top_k, top_p, min_p = load_i64(args + 16), load_i64(args + 24), load_i64(args + 32)
    vocab = load_i64(args + 40)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        line = out + row * vocab * 4
        copy_bytes(line, scaled + row * vocab * 4, vocab * 4)
        best = best_value(line, vocab)
        if best == MINUS_INF:
            continue
        k = load_i64(top_k + 8 * row)
        if 0 < k < vocab:
            limit = kth_value(line, vocab, k)
            _keep(line, vocab, limit, k - count_above(line, vocab, limit))
        share_kept = load_f64(top_p + 8 * row)
        if share_kept < 1.0:
            _nucleus(line, vocab, best, share_kept, scratch)
        least = load_f64(min_p + 8 * row)
        if least > 0.0:
            bound = np.float64(best) + math.log(least)
            limit = np.float32(bound)
            if np.float64(limit) < bound:
                limit = value_of(key_of(limit) + 1)
            _keep(line, vocab, limit, vocab)
