"""argmax, keyed Gumbel argmax, uniform draws, logsumexp and rank of fp32 rows [R, V].

A row is cut into chunks of a fixed size, one program each; a second kernel joins the chunks. What is joined
is either free of order (maximum of keys, counts) or joined in one fixed tree (logsumexp).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.runtime import power_of_two
from draftproof.ops.triton.sampling.philox import gumbel_of, nearly_gumbel_of, philox, uniform_of
from draftproof.ops.triton.sampling.sort_key import LOWEST, id_of, key_of

CHUNK = 4096  # ids of one program; part of logsumexp's numerics


@triton.jit
def best_of(x, top, ids, V):
    """Best key of x [CHUNK], whose maximum is `top`; in 32 bits, but for the one key. NaN: some id."""
    one = tl.min(tl.where(x == top, ids, 2147483647), axis=0)
    return key_of(top, tl.minimum(one, V - 1))


@triton.jit
def best_with_noise(
    x, heat, ids, chunk, seed, position, V, HEATED: tl.constexpr, STREAM: tl.constexpr, CHUNK: tl.constexpr
):
    """Best key of fp32(x / heat + gumbel), x [CHUNK]; without HEATED of x + gumbel.

    Arithmetic of a few instructions says which ids may win; only they are given the exact quotient and the
    exact noise, in fp64, one after another.
    """
    block = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    w0, w1, w2, w3 = philox(seed, position, STREAM, block)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    near = x
    if HEATED:
        near = x * (1.0 / heat)
    near = near + nearly_gumbel_of(word)
    top = tl.max(near, axis=0)
    # noise is within 1e-4 of the exact one, quotient and sum within a few roundings of either side
    bar = top - (1e-3 + 2e-6 * tl.abs(top))
    worst = key_of(tl.full((CHUNK,), float("-inf"), tl.float32), ids)
    best = tl.max(tl.where(ids < V, worst, LOWEST), axis=0)
    while (top >= bar) & (top > float("-inf")):
        one = tl.min(tl.where(near == top, ids, 2147483647), axis=0)
        chosen = ids == one
        value = tl.max(tl.where(chosen, x, float("-inf")), axis=0)
        if HEATED:
            value = tl.div_rn(value, heat)
        bits = tl.sum(tl.where(chosen, word, 0).to(tl.uint32), axis=0).to(tl.uint32)
        best = tl.maximum(best, key_of(value + gumbel_of(bits), one))
        near = tl.where(chosen, float("-inf"), near)
        top = tl.max(near, axis=0)
    return best


@triton.jit
def argmax_kernel(logits, keys, V, chunks, CHUNK: tl.constexpr):
    """Best key of each chunk: keys [R, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    tl.store(keys + row * chunks + chunk, best_of(x, tl.max(x, axis=0), ids, V))


@triton.jit
def gumbel_kernel(scaled, seeds, positions, keys, V, chunks, STREAM: tl.constexpr, CHUNK: tl.constexpr):
    """Best key of fp32(scaled + gumbel) in each chunk: keys [R, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(scaled + row * V + ids, mask=ids < V, other=float("-inf"))
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    best = best_with_noise(x, 1.0, ids, chunk, seed, position, V, False, STREAM, CHUNK)
    tl.store(keys + row * chunks + chunk, best)


@triton.jit
def join_kernel(keys, out, chunks, BLOCK: tl.constexpr):
    """Best of a row's chunks: out [R] int64."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    key = tl.load(keys + row * chunks + at, mask=at < chunks, other=LOWEST)
    tl.store(out + row, id_of(tl.max(key, axis=0)))


@triton.jit
def uniform_kernel(seeds, positions, out, R, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """out [R] fp64: u of id 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < R
    seed, position = tl.load(seeds + at, mask=ok, other=0), tl.load(positions + at, mask=ok, other=0)
    word, _, _, _ = philox(seed, position, STREAM, tl.zeros((BLOCK,), tl.int32))
    tl.store(out + at, uniform_of(word), mask=ok)


@triton.jit
def sum_below_top(x):
    """Maximum of x [CHUNK], and the sum of exp below it."""
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.exp(x - base), axis=0)


@triton.jit
def logsumexp_kernel(logits, tops, sums, V, chunks, CHUNK: tl.constexpr):
    """Maximum and sum of exp below it, of each chunk: tops, sums [R, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    top, total = sum_below_top(x)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(sums + row * chunks + chunk, total)


@triton.jit
def tree_sum(x, LEVELS: tl.constexpr):
    """Sum of x [2 ** LEVELS], neighbours first: one tree, however many warps a kernel has."""
    for _ in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
        x = left + right
    return tl.sum(x, axis=0)


@triton.jit
def joined_logsumexp(tops, sums, row, chunks, LEVELS: tl.constexpr):
    """From tops, sums [R, chunks] of `sum_below_top`. Kernels with it are compiled without fused
    multiply-add, which would make their bits depend on what stands around it."""
    at = tl.arange(0, 2**LEVELS)
    top = tl.load(tops + row * chunks + at, mask=at < chunks, other=float("-inf"))
    part = tl.load(sums + row * chunks + at, mask=at < chunks, other=0.0)
    best = tl.max(top, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    return best + tl.log(tree_sum(part * tl.exp(top - base), LEVELS))


@triton.jit
def join_logsumexp_kernel(tops, sums, out, chunks, LEVELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, joined_logsumexp(tops, sums, row, chunks, LEVELS))


@triton.jit
def comes_before(x, at, value, token):
    """How many of x, whose ids are `at`, come before `token`, whose logit is `value`. Beyond V x is -inf."""
    before = (x > value) | ((x == value) & (at < token.to(tl.int32)))
    return tl.sum(before.to(tl.int32), axis=0).to(tl.int64)


@triton.jit
def rank_kernel(logits, ids, out, V, CHUNK: tl.constexpr):
    """Adds to out [R] how many of this chunk come before ids [R]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(ids + row)
    value = tl.load(logits + row * V + token, mask=(token >= 0) & (token < V), other=float("inf"))
    x = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    tl.atomic_add(out + row, comes_before(x, at, value, token), sem="relaxed")


def levels(count: int) -> int:
    """Of a tree with so many leaves."""
    return power_of_two(count).bit_length() - 1


def _keys(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, int]:
    chunks = triton.cdiv(vocab, CHUNK)
    return torch.empty((rows, chunks), dtype=torch.int64, device=device), chunks


def _join(keys: Tensor, chunks: int) -> Tensor:
    out = torch.empty(len(keys), dtype=torch.int64, device=keys.device)
    join_kernel[(len(keys),)](keys, out, chunks, BLOCK=power_of_two(chunks), num_warps=1)
    return out


def argmax(logits: Tensor) -> Tensor:
    rows, vocab = logits.shape
    keys, chunks = _keys(rows, vocab, logits.device)
    argmax_kernel[(rows, chunks)](logits, keys, vocab, chunks, CHUNK=CHUNK, num_warps=8)
    return _join(keys, chunks)


def gumbel_argmax(scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    rows, vocab = scaled.shape
    keys, chunks = _keys(rows, vocab, scaled.device)
    gumbel_kernel[(rows, chunks)](
        scaled, seeds, positions, keys, vocab, chunks, STREAM=stream, CHUNK=CHUNK, num_warps=8
    )
    return _join(keys, chunks)


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    grid = (triton.cdiv(len(seeds), 128),)
    uniform_kernel[grid](seeds, positions, out, len(seeds), STREAM=stream, BLOCK=128, num_warps=4)
    return out


def logsumexp(logits: Tensor) -> Tensor:
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    tops, sums = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    logsumexp_kernel[(rows, chunks)](logits, tops, sums, vocab, chunks, CHUNK=CHUNK, num_warps=8)
    join_logsumexp_kernel[(rows,)](
        tops, sums, out, chunks, LEVELS=levels(chunks), num_warps=1, enable_fp_fusion=False
    )
    return out


def rank(logits: Tensor, ids: Tensor) -> Tensor:
    rows, vocab = logits.shape
    out = torch.ones(rows, dtype=torch.int64, device=logits.device)
    grid = (rows, triton.cdiv(vocab, CHUNK))
    rank_kernel[grid](logits, ids, out, vocab, CHUNK=CHUNK, num_warps=8)
    return out
