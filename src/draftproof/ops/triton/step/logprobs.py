"""Logprobs of a few tokens and of the best beside them: one pass over the wanted rows, and one program a row.

The pass finds in each chunk the parts of the logsumexp, how many ids come before the token, and the best key
of each group. They are joined as the ops `logsumexp`, `rank` and `top` join theirs, with their bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import TokenLogprobs
from draftproof.ops.triton.runtime import begin, launch_options, power_of_two
from draftproof.ops.triton.sampling.kernels import (
    CHUNK,
    comes_before,
    joined_logsumexp,
    levels,
    sum_below_top,
)
from draftproof.ops.triton.sampling.topk import GROUP, MOST, QUICK, best_of_groups, first_of, keys_of

# Of the pass; far more than the chip holds at once would queue up only to find padding. A row each up to 350
# rows: one that does two waits for the first before it asks for the second.
PROGRAMS = 4224
WARPS = 16  # of the program that finishes a row: with four, 256 rows took 33 µs for 27, both kernels


@triton.jit
def scan_kernel(
    logits, rows, tokens, tops, sums, counts, keys, N, V, chunks, groups, stride,
    TOP: tl.constexpr, TURNS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """tops, sums, counts [N, chunks], keys [N, groups]; a program does every stride-th row."""
    begin(PDL)
    me, chunk = tl.program_id(0), tl.program_id(1)
    turn = tl.arange(0, TURNS)
    mine = me + turn * stride
    wanted = tl.load(rows + mine, mask=mine < N, other=-1)
    said = tl.load(tokens + mine, mask=mine < N, other=-1)  # with the rows: a load less to wait for
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    turns = tl.max(tl.where(wanted >= 0, turn + 1, 0), axis=0)  # picks come before the padding, as a rule
    for i in range(turns):
        row = tl.max(tl.where(turn == i, wanted, -1), axis=0)
        if row >= 0:
            n = (me + i * stride).to(tl.int64)
            token = tl.max(tl.where(turn == i, said, -1), axis=0)
            known = (token >= 0) & (token < V)
            value = tl.load(logits + row * V + token, mask=known, other=float("inf"))
            x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
            top, total = sum_below_top(x)
            tl.store(tops + n * chunks + chunk, top)
            tl.store(sums + n * chunks + chunk, total)
            tl.store(counts + n * chunks + chunk, comes_before(x, ids, value, token))
            if TOP:
                group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
                best = best_of_groups(tl.reshape(x, (CHUNK // GROUP, GROUP)), group, V, GROUP)
                tl.store(keys + n * groups + group, best, mask=group < groups)


@triton.jit
def finish_kernel(
    logits, rows, tokens, tops, sums, counts, keys, values, ids, ranks, V, chunks, groups, k,
    LEVELS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """values [N, 1 + k], ids [N, k], ranks [N]; nothing is written for padding.

    All that can be asked for at once is, and nothing is stored before: few rows wait for memory and for
    nothing else, and a load stays behind the stores that are written before it.
    """
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    row, token = tl.load(rows + n), tl.load(tokens + n)
    if row >= 0:
        line = logits + row * V
        known = (token >= 0) & (token < V)
        own = tl.load(line + token, mask=known, other=float("nan"))
        part = tl.arange(0, 2**LEVELS)
        before = tl.load(counts + n * chunks + part, mask=part < chunks, other=0)
        if TOP:
            held = keys_of(keys + n * groups, groups, BLOCK)
        norm = joined_logsumexp(tops, sums, n, chunks, LEVELS)
        tl.store(values + n * (k + 1), own - norm)
        tl.store(ranks + n, 1 + tl.sum(before, axis=0))
        if TOP:
            best = first_of(line, keys + n * groups, held, V, groups, K, GROUP)
            place = tl.arange(0, K)
            ok = place < k
            value = tl.load(line + best, mask=ok & (best < V), other=float("-inf"))
            tl.store(values + n * (k + 1) + 1 + place, value - norm, mask=ok)
            tl.store(ids + n * k + place, best, mask=ok)


def quick(vocab: int, top: int) -> bool:
    return top <= QUICK and triton.cdiv(vocab, GROUP) <= MOST


def empty(count: int, top: int, device: torch.device) -> TokenLogprobs:
    ids = torch.empty((count, top), dtype=torch.int64, device=device)
    values = torch.empty((count, 1 + top), dtype=torch.float32, device=device)
    return TokenLogprobs(values, ids, torch.empty(count, dtype=torch.int64, device=device))


def logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, top: int, out: TokenLogprobs, pdl: bool) -> None:
    """For `quick` ones; `out` is contiguous."""
    count, vocab, device = len(rows), logits.shape[1], logits.device
    chunks, groups, width = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, GROUP), max(8, power_of_two(top))
    tops, sums = torch.empty((2, count, chunks), dtype=torch.float32, device=device)
    counts = torch.empty((count, chunks), dtype=torch.int64, device=device)
    keys = torch.empty((count, groups if top else 0), dtype=torch.int64, device=device)
    stride = min(count, max(1, PROGRAMS // chunks))
    scan_kernel[(stride, chunks)](
        logits, rows, tokens, tops, sums, counts, keys, count, vocab, chunks, groups, stride,
        TOP=top > 0, TURNS=power_of_two(triton.cdiv(count, stride)), CHUNK=CHUNK, GROUP=GROUP,
        **launch_options(pdl, num_warps=8, maxnreg=64),
    )  # fmt: skip
    finish_kernel[(count,)](
        logits, rows, tokens, tops, sums, counts, keys, out.values, out.ids, out.ranks, vocab, chunks,
        groups, top,
        LEVELS=levels(chunks), TOP=top > 0, K=width, BLOCK=max(width, power_of_two(groups)), GROUP=GROUP,
        **launch_options(pdl, num_warps=WARPS, enable_fp_fusion=False),
    )  # fmt: skip
