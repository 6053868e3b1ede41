"""Logprobs of tokens, of the top k and of named ids: one pass over the rows, then one program per row.

The pass finds in each chunk the maximum and sum for the logsumexp, the number of ids that sort before the
token and before each named id, and the best key of each group. The chunks are combined as in `logsumexp`,
`rank` and `top`, with the same bits. For drafts both kernels find out themselves which rows have one: ops
that prepare rows and tokens would take longer than the kernels where rows are few.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import DraftVocab, NamedIds, NamedLogprobs, TokenLogprobs
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_sync
from draftproof.ops.triton.sampling import topk
from draftproof.ops.triton.sampling.kernels import (
    CHUNK,
    combine_logsumexp,
    count_before,
    is_before,
    max_and_exp_sum,
)

# Programs of the pass. More programs than fit on the chip would only find padding rows. Up to 350 rows each
# program has one row, because a program with two rows loads the second after it has finished the first.
MAX_SCAN_PROGRAMS = 4224
FINISH_WARPS = 16  # of `logprob_finish_kernel`; with four, both kernels took 33 µs instead of 27 at 256 rows


@triton.jit
def _draft_rows(
    slots, drafts, kinds, temperature, places, n, N, B, slot_stride, draft_stride,
    KIND: tl.constexpr, DIVIDES: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    """Return rows, tokens and divisors of the drafts n (a vector or one); row -1: no draft.

    See `SamplingOps.draft_logprobs`. The rows of `slots` and `drafts` [_, B] are their strides apart.
    """
    ok = n < N
    slot = tl.load(slots + n // B * slot_stride + n % B, mask=ok, other=-1)
    token = tl.load(drafts + n // B * draft_stride + n % B, mask=ok, other=-1)
    ok = ok & (slot >= 0) & (token >= 0)
    if KIND:
        ok = ok & (tl.load(kinds + slot, mask=ok, other=0) == KIND)
    divisor = (slot * 0 + 1).to(tl.float32)
    if DIVIDES:
        given = tl.load(temperature + slot, mask=ok, other=0.0)
        divisor = tl.where(given > 0, given, 1.0)
    if HAS_PLACES:
        token = tl.load(places + token, mask=ok, other=-1)
        ok = ok & (token >= 0)
    return tl.where(ok, n, -1), token, divisor


@triton.jit(do_not_specialize=["B", "row_stride", "token_stride", "named_stride"])
def logprob_scan_kernel(
    logits, rows, tokens, named, maxima, sums, counts, named_counts, keys, N, V, chunks, groups, stride,
    kinds, temperature, places, B, row_stride, token_stride, named_slots, named_stride,
    TOP: tl.constexpr, NAMED: tl.constexpr, NAMED_BLOCK: tl.constexpr, PER_PROGRAM: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, DRAFTS: tl.constexpr, KIND: tl.constexpr,
    DIVIDES: tl.constexpr, HAS_PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store maxima, sums, counts [N, chunks], counts of NAMED ids [N, NAMED, chunks] and keys [N, groups].

    A program takes every stride-th row. With DRAFTS `rows` and `tokens` are slots and drafts.
    """
    pdl_sync(PDL)
    program, chunk = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, PER_PROGRAM)
    entry = program + index * stride
    if DRAFTS:
        entry_rows, entry_tokens, divisors = _draft_rows(
            rows, tokens, kinds, temperature, places, entry, N, B, row_stride, token_stride,
            KIND, DIVIDES, HAS_PLACES,
        )  # fmt: skip
    else:
        entry_rows = tl.load(rows + entry, mask=entry < N, other=-1)
        entry_tokens = tl.load(tokens + entry, mask=entry < N, other=-1)  # here, so that both loads overlap
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    num_rows = tl.max(tl.where(entry_rows >= 0, index + 1, 0), axis=0)  # padding comes last
    for i in range(num_rows):
        row = tl.max(tl.where(index == i, entry_rows, -1), axis=0)
        if row >= 0:
            n = (program + i * stride).to(tl.int64)
            token = tl.max(tl.where(index == i, entry_tokens, -1), axis=0)
            known = (token >= 0) & (token < V)
            value = tl.load(logits + row * V + token, mask=known, other=float("inf"))
            x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
            if NAMED:  # before any store, as in `logprob_finish_kernel`
                name = tl.arange(0, NAMED_BLOCK)
                line = named + tl.load(named_slots + row) * named_stride
                named_ids = tl.load(line + name, mask=name < NAMED, other=-1)
                named_values = tl.load(logits + row * V + named_ids, mask=named_ids >= 0, other=0.0)
            if DIVIDES:
                divisor = tl.sum(tl.where(index == i, divisors, 0.0), axis=0)
                value, x = tl.div_rn(value, divisor), tl.div_rn(x, divisor)
            top, total = max_and_exp_sum(x)
            tl.store(maxima + n * chunks + chunk, top)
            tl.store(sums + n * chunks + chunk, total)
            tl.store(counts + n * chunks + chunk, count_before(x, ids, value, token))
            if NAMED:
                for first in range(0, NAMED, 4):  # four counts in one reduction, 16 bits each
                    marks = tl.zeros((CHUNK,), tl.int64)
                    for m in tl.static_range(4):
                        named_id = tl.max(tl.where(name == first + m, named_ids, -1), axis=0)
                        named_value = tl.sum(tl.where(name == first + m, named_values, 0.0), axis=0)
                        marks += is_before(x, ids, named_value, named_id).to(tl.int64) << (16 * m)
                    four, packed = tl.arange(0, 4), tl.sum(marks, axis=0)
                    at = (n * NAMED + first + four) * chunks + chunk
                    tl.store(named_counts + at, packed >> (16 * four) & 0xFFFF, mask=first + four < NAMED)
            if TOP:
                group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
                best = topk.group_keys(tl.reshape(x, (CHUNK // GROUP, GROUP)), group, V, GROUP)
                tl.store(keys + n * groups + group, best, mask=group < groups)


@triton.jit(do_not_specialize=["N", "B", "row_stride", "token_stride", "named_stride"])
def logprob_finish_kernel(
    logits, rows, tokens, named, maxima, sums, counts, named_counts, keys,
    values, ids, ranks, named_values, named_ranks, N, V, chunks, groups, k, m,
    kinds, temperature, places, vocab_ids, B, row_stride, token_stride, named_slots, named_stride,
    LEVELS: tl.constexpr, TOP: tl.constexpr, NAMED: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, DRAFTS: tl.constexpr, KIND: tl.constexpr, DIVIDES: tl.constexpr,
    HAS_PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store values [N, 1 + k], ids [N, k], ranks [N], and values and ranks [N, m] of the named ids.

    Padding rows are not written, and nothing is written for a named id of -1. With DRAFTS, as in
    `logprob_scan_kernel`, a row without a draft is NaN, 0 and 0.

    All independent loads precede the first store, because the compiler keeps a load behind earlier stores,
    and with few rows the kernel is bound by memory latency.
    """
    pdl_sync(PDL)
    n = tl.program_id(0).to(tl.int64)
    divisor = 1.0
    if DRAFTS:
        row, token, divisor = _draft_rows(
            rows, tokens, kinds, temperature, places, n, N, B, row_stride, token_stride,
            KIND, DIVIDES, HAS_PLACES,
        )  # fmt: skip
    else:
        row, token = tl.load(rows + n), tl.load(tokens + n)
    if row >= 0:
        row_logits = logits + row * V
        known = (token >= 0) & (token < V)
        logit = tl.load(row_logits + token, mask=known, other=float("nan"))
        if DIVIDES:
            logit = tl.div_rn(logit, divisor)
        part = tl.arange(0, 2**LEVELS)
        before = tl.load(counts + n * chunks + part, mask=part < chunks, other=0)
        if TOP:
            group_key = topk.load_group_keys(keys + n * groups, groups, BLOCK)
        if NAMED:
            index = tl.arange(0, NAMED)
            at = n * m + index
            line = named + tl.load(named_slots + row) * named_stride
            named_id = tl.load(line + index, mask=index < m, other=-1)
            named_ok = named_id >= 0
            named_logit = tl.load(row_logits + named_id, mask=named_ok, other=float("nan"))
            counts_at = named_counts + at[:, None] * chunks + part[None, :]
            named_before = tl.load(counts_at, mask=named_ok[:, None] & (part < chunks)[None, :], other=0)
        norm = combine_logsumexp(maxima, sums, n, chunks, LEVELS)
        tl.store(values + n * (k + 1), logit - norm)
        if NAMED:
            tl.store(named_values + at, named_logit - norm, mask=named_ok)
            tl.store(named_ranks + at, 1 + tl.sum(named_before, axis=1), mask=named_ok)
        tl.store(ranks + n, 1 + tl.sum(before, axis=0))
        if TOP:
            best = topk.top_ids(
                row_logits, keys + n * groups, group_key, V, groups, K, GROUP, divisor, DIVIDES
            )
            output_index = tl.arange(0, K)
            ok = output_index < k
            value = tl.load(row_logits + best, mask=ok & (best < V), other=float("-inf"))
            if DIVIDES:
                value = tl.div_rn(value, divisor)
            if HAS_PLACES:
                best = tl.load(vocab_ids + best, mask=ok & (best < V), other=0)
            tl.store(values + n * (k + 1) + 1 + output_index, value - norm, mask=ok)
            tl.store(ids + n * k + output_index, best, mask=ok)
    elif DRAFTS:
        place = tl.arange(0, 2 * K)
        none = tl.full((2 * K,), float("nan"), tl.float32)
        tl.store(values + n * (k + 1) + place, none, mask=place <= k)
        tl.store(ids + n * k + place, place * 0, mask=place < k)
        tl.store(ranks + n, row * 0)


def logprobs(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    top: int,
    out: TokenLogprobs,
    named: NamedIds | None,
    pdl: bool,
) -> None:
    """Launch both kernels, for sizes of `topk.is_two_stage`; the tensors of `out` are contiguous."""
    none = rows
    _launch(logits, rows, tokens, len(rows), top, out, named, (none, none, none), (1, 1, 1), none, pdl)


def draft_logprobs(
    logits: Tensor,
    slots: Tensor,
    drafts: Tensor,
    top: int,
    out: TokenLogprobs,
    kind: tuple[Tensor, int] | None,
    temperature: Tensor | None,
    vocab: DraftVocab | None,
    pdl: bool,
) -> None:
    """Launch both kernels for drafts, see `SamplingOps.draft_logprobs`; sizes and `out` as for `logprobs`.

    Each row of slots and drafts [J, B] is contiguous.
    """
    kinds, number = (slots, 0) if kind is None else kind
    tables = kinds, slots if temperature is None else temperature, slots if vocab is None else vocab.places
    layout = slots.shape[1], slots.stride(0), drafts.stride(0)
    _launch(
        logits, slots, drafts, slots.numel(), top, out, None, tables, layout,
        slots if vocab is None else vocab.ids, pdl,
        DRAFTS=True, KIND=int(number), DIVIDES=temperature is not None, HAS_PLACES=vocab is not None,
    )  # fmt: skip


def _launch(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    count: int,
    top: int,
    out: TokenLogprobs,
    named: NamedIds | None,
    tables: tuple[Tensor, Tensor, Tensor],  # kinds, temperatures and places of `_draft_rows`
    layout: tuple[int, int, int],  # its B and strides
    vocab_ids: Tensor,
    pdl: bool,
    **constants: int,
) -> None:
    vocab, device = logits.shape[1], logits.device
    group, width = topk.group_size(vocab), topk.padded_k(top)
    chunks, groups = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, group)
    maxima, sums = torch.empty((2, count, chunks), dtype=torch.float32, device=device)
    counts = torch.empty((count, chunks), dtype=torch.int64, device=device)
    keys = torch.empty((count, groups if top else 0), dtype=torch.int64, device=device)
    width_named = 0 if named is None else named.width
    named_counts = torch.empty((count, width_named, chunks), dtype=torch.int64, device=device)
    named_ids, by_slot, of_named = tokens, (rows, 0), NamedLogprobs(out.values, out.ranks)
    if named is not None:
        assert out.named is not None
        named_ids, by_slot, of_named = named.table, (named.slots, named.table.stride(0)), out.named
    named_block = next_power_of_two(width_named) if width_named else 0
    of_drafts = {"DRAFTS": False, "KIND": 0, "DIVIDES": False, "HAS_PLACES": False, **constants}
    stride = min(count, max(1, MAX_SCAN_PROGRAMS // chunks))
    logprob_scan_kernel[(stride, chunks)](
        logits, rows, tokens, named_ids, maxima, sums, counts, named_counts, keys, count, vocab, chunks,
        groups, stride, *tables, *layout, *by_slot, TOP=top > 0, NAMED=width_named, NAMED_BLOCK=named_block,
        PER_PROGRAM=next_power_of_two(triton.cdiv(count, stride)), CHUNK=CHUNK, GROUP=group, **of_drafts,
        **launch_options(pdl, num_warps=8, maxnreg=64),
    )  # fmt: skip
    logprob_finish_kernel[(count,)](
        logits, rows, tokens, named_ids, maxima, sums, counts, named_counts, keys,
        out.values, out.ids, out.ranks, *of_named, count, vocab, chunks, groups, top, width_named,
        *tables, vocab_ids, *layout, *by_slot,
        LEVELS=(chunks - 1).bit_length(), TOP=top > 0, NAMED=named_block, K=width,
        BLOCK=max(width, next_power_of_two(groups)), GROUP=group, **of_drafts,
        **launch_options(pdl, num_warps=FINISH_WARPS, enable_fp_fusion=False),
    )  # fmt: skip
