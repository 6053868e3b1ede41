"""Kernels that change logits before sampling: penalties, bias, allowed ids, min_tokens and grammar masks.

Token counts use the memory of the result: one program per penalised row clears its row and counts into it
with integer atomics, whose sum does not depend on their order. A second kernel turns counts into logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_sync
from draftproof.types import LogitAdjust, Windows

BLOCK = 4096  # ids, or tokens of a sequence, at a time
IN_PROMPT = tl.constexpr(1 << 30)  # flag above the count of the token in the output
PENALTY, BIAS = tl.constexpr(int(LogitAdjust.PENALTY)), tl.constexpr(int(LogitAdjust.BIAS))
ALLOWED_IDS = tl.constexpr(int(LogitAdjust.ALLOWED_IDS))
MIN_TOKENS, MASK = tl.constexpr(int(LogitAdjust.MIN_TOKENS)), tl.constexpr(int(LogitAdjust.MASK))


@triton.jit
def count_tokens_kernel(
    slots, depths, positions, adjust, prompt_len, tokens, draft, counts, V, MAX_LEN, K,
    DEPTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the tokens of rows with penalties: counts [L, V] int32; other rows are not written."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    flags = tl.load(adjust + slot, mask=slot >= 0, other=0)
    if (flags & PENALTY) > 0:
        row_counts = counts + row * V
        offset = tl.arange(0, BLOCK)
        for start in range(0, V, BLOCK):
            tl.store(row_counts + start + offset, tl.zeros((BLOCK,), tl.int32), mask=start + offset < V)
        tl.debug_barrier()
        prompt, depth = tl.load(prompt_len + slot), tl.load(depths + row)
        length = tl.minimum(prompt + tl.load(positions + row) - depth, MAX_LEN)
        for start in range(0, length, BLOCK):
            position = start + offset
            token = tl.load(tokens + slot * MAX_LEN + position, mask=position < length, other=-1)
            known = (token >= 0) & (token < V)
            is_output = position >= prompt
            flag, one = tl.full((BLOCK,), IN_PROMPT, tl.int32), tl.full((BLOCK,), 1, tl.int32)
            tl.atomic_or(row_counts + token, flag, mask=known & ~is_output, sem="relaxed")
            tl.atomic_add(row_counts + token, one, mask=known & is_output, sem="relaxed")
        index = tl.arange(0, DEPTHS)
        draft_token = tl.load(draft + slot * K + index, mask=(index < depth) & (index < K), other=-1)
        known = (draft_token >= 0) & (draft_token < V)
        tl.atomic_add(row_counts + draft_token, tl.full((DEPTHS,), 1, tl.int32), mask=known, sem="relaxed")


@triton.jit
def penalty_kernel(
    logits, slots, adjust, repetition, presence, frequency, bias, counts, out, V,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply penalties and bias: out [L, V], the memory of counts; compiled without fused multiply-add."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = ids < V
    slot = tl.load(slots + row)
    flags = tl.load(adjust + slot, mask=slot >= 0, other=0)
    x = tl.load(logits + row * V + ids, mask=ok, other=0.0)
    if (flags & PENALTY) > 0:
        penalty = tl.zeros_like(x) + tl.load(repetition + slot)
        found = tl.load(counts + row * V + ids, mask=ok, other=0)
        count = (found & (IN_PROMPT - 1)).to(tl.float32)
        x = tl.where(found != 0, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
        x = x - tl.load(frequency + slot) * count
        x = x - tl.load(presence + slot) * (count > 0).to(tl.float32)
    if (flags & BIAS) > 0:
        x = x + tl.load(bias + slot * V + ids, mask=ok, other=0.0)
    tl.store(out + row * V + ids, x, mask=ok)


@triton.jit
def ban_kernel(
    base, slots, positions, adjust, prompt_len, min_length, banned, ends, V,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Set forbidden ids of base [L, V] to -inf in place; rows without such ids are not written."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    flags = tl.load(adjust + slot, mask=slot >= 0, other=0)
    if (flags & (ALLOWED_IDS | MIN_TOKENS)) > 0:
        length = tl.load(prompt_len + slot) + tl.load(positions + row)
        below_min_length = ((flags & MIN_TOKENS) > 0) & (length < tl.load(min_length + slot))
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = ids < V
        out = tl.load(banned + slot * V + ids, mask=ok & ((flags & ALLOWED_IDS) > 0), other=0) != 0
        out = out | (tl.load(ends + slot * V + ids, mask=ok & below_min_length, other=0) != 0)
        tl.store(base + row * V + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=out)


@triton.jit
def grammar_mask_kernel(
    base, slots, depths, adjust, allowed, V, WORDS, DEPTHS, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Set ids outside the grammar mask allowed [slots, DEPTHS, WORDS] of base [L, V] to -inf in place."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    flags = tl.load(adjust + slot, mask=slot >= 0, other=0)
    if (flags & MASK) > 0:
        row_counts = allowed + (slot * DEPTHS + tl.load(depths + row)) * WORDS
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = ids < V
        word = tl.load(row_counts + ids // 32, mask=ok, other=-1)
        masked = ((word >> (ids % 32)) & 1) == 0
        tl.store(base + row * V + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=ok & masked)


def apply_penalties(logits: Tensor, windows: Windows, pdl: bool) -> Tensor:
    """Return the logits [L, V] after penalties and bias."""
    columns, (rows, vocab) = windows.columns, logits.shape
    out = torch.empty_like(logits)
    counts = out.view(torch.int32)
    k = columns.draft.shape[1]
    count_tokens_kernel[(rows,)](
        windows.slot, windows.depth, windows.position, columns.adjust, columns.prompt_len, columns.tokens,
        columns.draft, counts, vocab, columns.tokens.shape[1], k,
        DEPTHS=next_power_of_two(k), BLOCK=BLOCK, **launch_options(pdl, num_warps=16),
    )  # fmt: skip
    penalty_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        logits, windows.slot, columns.adjust, columns.repetition, columns.presence, columns.frequency,
        columns.bias, counts, out, vocab,
        BLOCK=BLOCK, **launch_options(pdl, num_warps=8, enable_fp_fusion=False),
    )  # fmt: skip
    return out


def apply_bans(base: Tensor, windows: Windows, pdl: bool) -> None:
    """Launch `ban_kernel`."""
    columns, (rows, vocab) = windows.columns, base.shape
    ban_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        base, windows.slot, windows.position, columns.adjust, columns.prompt_len, columns.min_length,
        columns.banned.view(torch.uint8), columns.ends.view(torch.uint8), vocab,
        BLOCK=BLOCK, **launch_options(pdl, num_warps=8),
    )  # fmt: skip


def apply_grammar_mask(base: Tensor, windows: Windows, pdl: bool) -> None:
    """Launch `grammar_mask_kernel`."""
    allowed, (rows, vocab) = windows.allowed, base.shape
    assert allowed is not None
    grammar_mask_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        base, windows.slot, windows.depth, windows.columns.adjust, allowed, vocab, allowed.shape[2],
        allowed.shape[1], BLOCK=BLOCK, **launch_options(pdl, num_warps=8),
    )  # fmt: skip
