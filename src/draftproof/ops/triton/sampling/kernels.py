"""Kernels for argmax, keyed Gumbel argmax, uniform draws, logsumexp and rank of fp32 rows [R, V].

A row is split into chunks of a fixed size, one program each, and a second kernel combines the chunks. The
combination is either independent of the order (maximum of keys, counts) or a fixed tree (logsumexp).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.kernel_utils import next_power_of_two
from draftproof.ops.triton.sampling.philox import approx_gumbel, philox, word_to_gumbel, word_to_uniform
from draftproof.ops.triton.sampling.sort_key import LOWEST_KEY, key_to_id, sort_key

CHUNK = 4096  # ids of one program; it determines the bits of logsumexp


@triton.jit
def best_key(x, top, ids, V):
    """Return the best sort key of x [CHUNK] with maximum `top`; with NaN, the key of any id."""
    best_id = tl.min(tl.where(x == top, ids, 2147483647), axis=0)
    return sort_key(top, tl.minimum(best_id, V - 1))


@triton.jit
def best_noisy_key(
    x, temperature, ids, chunk, seed, position, V,
    DIVIDE: tl.constexpr, STREAM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the best sort key of fp32(x / temperature + gumbel), x [CHUNK]; without DIVIDE of x + gumbel.

    An approximation of a few instructions finds the ids that can win. Only these get the exact quotient and
    the exact noise, in fp64, one after another.
    """
    block = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    w0, w1, w2, w3 = philox(seed, position, STREAM, block)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    approx = x
    if DIVIDE:
        approx = x * (1.0 / temperature)
    approx = approx + approx_gumbel(word)
    top = tl.max(approx, axis=0)
    # the error of the noise is below 1e-4, that of quotient and sum a few roundings
    threshold = top - (1e-3 + 2e-6 * tl.abs(top))
    worst = sort_key(tl.full((CHUNK,), float("-inf"), tl.float32), ids)
    best = tl.max(tl.where(ids < V, worst, LOWEST_KEY), axis=0)
    while (top >= threshold) & (top > float("-inf")):
        best_id = tl.min(tl.where(approx == top, ids, 2147483647), axis=0)
        chosen = ids == best_id
        value = tl.max(tl.where(chosen, x, float("-inf")), axis=0)
        if DIVIDE:
            value = tl.div_rn(value, temperature)
        bits = tl.sum(tl.where(chosen, word, 0).to(tl.uint32), axis=0).to(tl.uint32)
        best = tl.maximum(best, sort_key(value + word_to_gumbel(bits), best_id))
        approx = tl.where(chosen, float("-inf"), approx)
        top = tl.max(approx, axis=0)
    return best


@triton.jit
def argmax_kernel(logits, keys, V, chunks, CHUNK: tl.constexpr):
    """Store the best sort key of each chunk: keys [R, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    tl.store(keys + row * chunks + chunk, best_key(x, tl.max(x, axis=0), ids, V))


@triton.jit
def gumbel_kernel(scaled, seeds, positions, keys, V, chunks, STREAM: tl.constexpr, CHUNK: tl.constexpr):
    """Store the best sort key of fp32(scaled + gumbel) of each chunk: keys [R, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(scaled + row * V + ids, mask=ids < V, other=float("-inf"))
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    best = best_noisy_key(x, 1.0, ids, chunk, seed, position, V, False, STREAM, CHUNK)
    tl.store(keys + row * chunks + chunk, best)


@triton.jit
def combine_keys_kernel(keys, out, chunks, BLOCK: tl.constexpr):
    """Store the id of the best chunk key of each row: out [R] int64."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    key = tl.load(keys + row * chunks + index, mask=index < chunks, other=LOWEST_KEY)
    tl.store(out + row, key_to_id(tl.max(key, axis=0)))


@triton.jit
def uniform_kernel(seeds, positions, out, R, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Store the uniform number of id 0 of each row: out [R] fp64."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = index < R
    seed, position = tl.load(seeds + index, mask=ok, other=0), tl.load(positions + index, mask=ok, other=0)
    word, _, _, _ = philox(seed, position, STREAM, tl.zeros((BLOCK,), tl.int32))
    tl.store(out + index, word_to_uniform(word), mask=ok)


@triton.jit
def max_and_exp_sum(x):
    """Return the maximum of x [CHUNK] and the sum of exp(x - maximum)."""
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.exp(x - base), axis=0)


@triton.jit
def logsumexp_kernel(logits, maxima, sums, V, chunks, CHUNK: tl.constexpr):
    """Store maximum and sum of exp(x - maximum) of each chunk: maxima, sums [R, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    top, total = max_and_exp_sum(x)
    tl.store(maxima + row * chunks + chunk, top)
    tl.store(sums + row * chunks + chunk, total)


@triton.jit
def tree_sum(x, LEVELS: tl.constexpr):
    """Sum x [2 ** LEVELS] in pairs of neighbours: one tree for every number of warps."""
    for _ in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
        x = left + right
    return tl.sum(x, axis=0)


@triton.jit
def combine_logsumexp(maxima, sums, row, chunks, LEVELS: tl.constexpr):
    """Return the logsumexp of a row from maxima and sums [R, chunks] of `max_and_exp_sum`.

    Kernels that call it are compiled without fused multiply-add, so that its bits do not depend on the
    surrounding code.
    """
    index = tl.arange(0, 2**LEVELS)
    top = tl.load(maxima + row * chunks + index, mask=index < chunks, other=float("-inf"))
    part = tl.load(sums + row * chunks + index, mask=index < chunks, other=0.0)
    best = tl.max(top, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    return best + tl.log(tree_sum(part * tl.exp(top - base), LEVELS))


@triton.jit
def combine_logsumexp_kernel(maxima, sums, out, chunks, LEVELS: tl.constexpr):
    """Store the logsumexp of each row: out [R]."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, combine_logsumexp(maxima, sums, row, chunks, LEVELS))


@triton.jit
def is_before(x, index, value, token):
    """Return which x with ids `index` sort before `token` with logit `value`; beyond V, x is -inf."""
    return (x > value) | ((x == value) & (index < token.to(tl.int32)))


@triton.jit
def count_before(x, index, value, token):
    """Count the x with ids `index` that sort before `token`, see `is_before`."""
    return tl.sum(is_before(x, index, value, token).to(tl.int32), axis=0).to(tl.int64)


@triton.jit
def rank_kernel(logits, ids, out, V, CHUNK: tl.constexpr):
    """Add to out [R] the number of ids of this chunk that sort before ids [R]."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(ids + row)
    value = tl.load(logits + row * V + token, mask=(token >= 0) & (token < V), other=float("inf"))
    x = tl.load(logits + row * V + index, mask=index < V, other=float("-inf"))
    tl.atomic_add(out + row, count_before(x, index, value, token), sem="relaxed")


def _key_buffer(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, int]:
    """Return scratch for the keys of the chunks, and the number of chunks."""
    chunks = triton.cdiv(vocab, CHUNK)
    return torch.empty((rows, chunks), dtype=torch.int64, device=device), chunks


def _combine(keys: Tensor, chunks: int) -> Tensor:
    """Return the best id of each row from the keys of its chunks."""
    out = torch.empty(len(keys), dtype=torch.int64, device=keys.device)
    combine_keys_kernel[(len(keys),)](keys, out, chunks, BLOCK=next_power_of_two(chunks), num_warps=1)
    return out


def argmax(logits: Tensor) -> Tensor:
    """Return the best id of each row [R]; of equal values the smallest id."""
    rows, vocab = logits.shape
    keys, chunks = _key_buffer(rows, vocab, logits.device)
    argmax_kernel[(rows, chunks)](logits, keys, vocab, chunks, CHUNK=CHUNK, num_warps=8)
    return _combine(keys, chunks)


def gumbel_argmax(scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Return the best id of each row [R] after keyed Gumbel noise."""
    rows, vocab = scaled.shape
    keys, chunks = _key_buffer(rows, vocab, scaled.device)
    gumbel_kernel[(rows, chunks)](
        scaled, seeds, positions, keys, vocab, chunks, STREAM=stream, CHUNK=CHUNK, num_warps=8
    )
    return _combine(keys, chunks)


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Return a keyed uniform number for each row [R] fp64."""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    grid = (triton.cdiv(len(seeds), 128),)
    uniform_kernel[grid](seeds, positions, out, len(seeds), STREAM=stream, BLOCK=128, num_warps=4)
    return out


def logsumexp(logits: Tensor) -> Tensor:
    """Return the logsumexp of each row [R] fp32."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    maxima, sums = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    logsumexp_kernel[(rows, chunks)](logits, maxima, sums, vocab, chunks, CHUNK=CHUNK, num_warps=8)
    combine_logsumexp_kernel[(rows,)](
        maxima, sums, out, chunks, LEVELS=(chunks - 1).bit_length(), num_warps=1, enable_fp_fusion=False
    )
    return out


def rank(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the rank of ids [R] in their rows, from 1."""
    rows, vocab = logits.shape
    out = torch.ones(rows, dtype=torch.int64, device=logits.device)
    grid = (rows, triton.cdiv(vocab, CHUNK))
    rank_kernel[grid](logits, ids, out, vocab, CHUNK=CHUNK, num_warps=8)
    return out
