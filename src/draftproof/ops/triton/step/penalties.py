"""What changes the logits before they are sampled from: penalties and bias, bans and held end tokens.

Occurrences are counted in the rows that the result will take: one program a penalised row clears its row and
counts into it, in integers, so that atomics leave no trace; the second pass turns counts into logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.runtime import begin, launch_options, power_of_two
from draftproof.types import LogitAdjust, Windows

BLOCK = 4096  # ids, or places of a sequence, at a time
SEEN = tl.constexpr(1 << 30)  # the token is in the prompt; below it stands its count in the output
PENALTY, BIAS = tl.constexpr(int(LogitAdjust.PENALTY)), tl.constexpr(int(LogitAdjust.BIAS))
BAN, HOLD = tl.constexpr(int(LogitAdjust.ALLOWED_IDS)), tl.constexpr(int(LogitAdjust.MIN_TOKENS))
MASK = tl.constexpr(int(LogitAdjust.MASK))


@triton.jit
def count_kernel(
    slots, depths, positions, adjust, prompt_len, tokens, draft, counts, V, WIDE, K,
    DEPTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts [L, V] int32 of the rows with penalties; nothing is written elsewhere."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    flags = tl.load(adjust + slot, mask=slot >= 0, other=0)
    if (flags & PENALTY) > 0:
        line = counts + row * V
        at = tl.arange(0, BLOCK)
        for start in range(0, V, BLOCK):
            tl.store(line + start + at, tl.zeros((BLOCK,), tl.int32), mask=start + at < V)
        tl.debug_barrier()
        prompt, depth = tl.load(prompt_len + slot), tl.load(depths + row)
        length = tl.minimum(prompt + tl.load(positions + row) - depth, WIDE)
        for start in range(0, length, BLOCK):
            place = start + at
            token = tl.load(tokens + slot * WIDE + place, mask=place < length, other=-1)
            known = (token >= 0) & (token < V)
            said = place >= prompt
            tl.atomic_or(line + token, tl.full((BLOCK,), SEEN, tl.int32), mask=known & ~said, sem="relaxed")
            tl.atomic_add(line + token, tl.full((BLOCK,), 1, tl.int32), mask=known & said, sem="relaxed")
        ahead = tl.arange(0, DEPTHS)
        guess = tl.load(draft + slot * K + ahead, mask=(ahead < depth) & (ahead < K), other=-1)
        known = (guess >= 0) & (guess < V)
        tl.atomic_add(line + guess, tl.full((DEPTHS,), 1, tl.int32), mask=known, sem="relaxed")


@triton.jit
def penalise_kernel(
    logits, slots, adjust, repetition, presence, frequency, bias, counts, out, V,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [L, V], the same memory as counts. Compiled without fused multiply-add."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = ids < V
    slot = tl.load(slots + row)
    flags = tl.load(adjust + slot, mask=slot >= 0, other=0)
    x = tl.load(logits + row * V + ids, mask=ok, other=0.0)
    if (flags & PENALTY) > 0:
        penalty = tl.zeros_like(x) + tl.load(repetition + slot)
        found = tl.load(counts + row * V + ids, mask=ok, other=0)
        count = (found & (SEEN - 1)).to(tl.float32)
        x = tl.where(found != 0, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
        x = x - tl.load(frequency + slot) * count
        x = x - tl.load(presence + slot) * (count > 0).to(tl.float32)
    if (flags & BIAS) > 0:
        x = x + tl.load(bias + slot * V + ids, mask=ok, other=0.0)
    tl.store(out + row * V + ids, x, mask=ok)


@triton.jit
def forbid_kernel(
    base, slots, positions, adjust, prompt_len, min_length, banned, ends, V,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """base [L, V] in place; rows that forbid nothing are not touched."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    flags = tl.load(adjust + slot, mask=slot >= 0, other=0)
    if (flags & (BAN | HOLD)) > 0:
        length = tl.load(prompt_len + slot) + tl.load(positions + row)
        held = ((flags & HOLD) > 0) & (length < tl.load(min_length + slot))
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = ids < V
        out = tl.load(banned + slot * V + ids, mask=ok & ((flags & BAN) > 0), other=0) != 0
        out = out | (tl.load(ends + slot * V + ids, mask=ok & held, other=0) != 0)
        tl.store(base + row * V + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=out)


@triton.jit
def mask_kernel(
    base, slots, depths, adjust, allowed, V, WORDS, DEPTHS, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """base [L, V] in place; allowed [slots, DEPTHS, WORDS]; rows without a grammar are not touched."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    flags = tl.load(adjust + slot, mask=slot >= 0, other=0)
    if (flags & MASK) > 0:
        line = allowed + (slot * DEPTHS + tl.load(depths + row)) * WORDS
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = ids < V
        word = tl.load(line + ids // 32, mask=ok, other=-1)
        closed = ((word >> (ids % 32)) & 1) == 0
        tl.store(base + row * V + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=ok & closed)


def apply_penalties(logits: Tensor, windows: Windows, pdl: bool) -> Tensor:
    columns, (rows, vocab) = windows.columns, logits.shape
    out = torch.empty_like(logits)
    counts = out.view(torch.int32)
    k = columns.draft.shape[1]
    count_kernel[(rows,)](
        windows.slot, windows.depth, windows.position, columns.adjust, columns.prompt_len, columns.tokens,
        columns.draft, counts, vocab, columns.tokens.shape[1], k,
        DEPTHS=power_of_two(k), BLOCK=BLOCK, **launch_options(pdl, num_warps=16),
    )  # fmt: skip
    penalise_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        logits, windows.slot, columns.adjust, columns.repetition, columns.presence, columns.frequency,
        columns.bias, counts, out, vocab,
        BLOCK=BLOCK, **launch_options(pdl, num_warps=8, enable_fp_fusion=False),
    )  # fmt: skip
    return out


def apply_bans(base: Tensor, windows: Windows, pdl: bool) -> None:
    columns, (rows, vocab) = windows.columns, base.shape
    forbid_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        base, windows.slot, windows.position, columns.adjust, columns.prompt_len, columns.min_length,
        columns.banned.view(torch.uint8), columns.ends.view(torch.uint8), vocab,
        BLOCK=BLOCK, **launch_options(pdl, num_warps=8),
    )  # fmt: skip


def apply_grammar_mask(base: Tensor, windows: Windows, pdl: bool) -> None:
    allowed, (rows, vocab) = windows.allowed, base.shape
    assert allowed is not None
    mask_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        base, windows.slot, windows.depth, windows.columns.adjust, allowed, vocab, allowed.shape[2],
        allowed.shape[1], BLOCK=BLOCK, **launch_options(pdl, num_warps=8),
    )  # fmt: skip
