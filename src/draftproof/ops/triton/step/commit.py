"""The verdict on all windows and what follows from it, in one program: entries down, depths across.

Where an entry's picks begin depends on what all entries before it commit, so one program holds them all. A
window's first failing, bad or ending row is a minimum over its depths, which needs no scan.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof import types
from draftproof.ops.triton.runtime import begin, launch_options, power_of_two
from draftproof.types import Choice, FinishStatus, Outcome, PlanColumns, Windows

STOP, LENGTH = tl.constexpr(int(FinishStatus.STOP)), tl.constexpr(int(FinishStatus.LENGTH))
NUM_OUT, NUM_DRAFT = tl.constexpr(types.NUM_OUT), tl.constexpr(types.NUM_DRAFT)
NUM_ACCEPTED, ENDED = tl.constexpr(types.NUM_ACCEPTED), tl.constexpr(types.ENDED)
FIRST_ROW, PICK, TOKENS = (
    tl.constexpr(types.FIRST_ROW),
    tl.constexpr(types.PICK),
    tl.constexpr(types.TOKENS),
)
PICKS = 1024  # places of pick_rows filled at a time


@triton.jit
def _judged(
    drafts, token, accept, recovered, ends, bad, slot, real, count, rows, depth, V, K,
    ACCEPT: tl.constexpr, RECOVERED: tl.constexpr,
):  # fmt: skip
    """Of each window: the tokens it would commit [B, D], how many drafts stand, depth of its first end token
    and of its first bad row, K + 1 if none, and the code there. Nothing is read where there is no window."""
    inside = real[:, None] & (depth <= count[:, None])
    guessed = inside & (depth < count[:, None])
    guess = tl.load(drafts + rows, mask=guessed, other=-1)
    own = tl.load(token + rows, mask=inside, other=0)
    code = tl.load(bad + rows, mask=inside, other=0)
    stands = guessed & (guess == own)
    if ACCEPT:
        stands = tl.load(accept + rows, mask=guessed, other=0) != 0
    instead = own
    if RECOVERED:
        instead = tl.load(recovered + rows, mask=inside, other=0)
    accepted = tl.min(tl.where(stands, K + 1, depth), axis=1)
    accepted = tl.where(real, accepted, 0)
    own = tl.where((accepted < count)[:, None], instead, own)
    said = tl.where(depth < accepted[:, None], guess, own)
    id_at = slot[:, None] * V + tl.minimum(tl.maximum(said, 0), V - 1)
    ending = tl.load(ends + id_at, mask=inside & (depth <= accepted[:, None]), other=0) != 0
    before_end = tl.min(tl.where(ending, depth, K + 1), axis=1)
    before_bad = tl.min(tl.where(inside & (code == 0), K + 1, depth), axis=1)
    why = tl.sum(tl.where(depth == before_bad[:, None], code, 0), axis=1)
    return said, accepted, before_end, before_bad, why


@triton.jit
def _record(
    table, entry, depth, here, num_out, count, accepted, ended, first, pick, said, K, WIDTH
):  # fmt: skip
    """A line of the outcome's table for every entry."""
    line = table + entry * WIDTH
    tl.store(line + NUM_OUT, num_out, mask=here)
    tl.store(line + NUM_DRAFT, count, mask=here)
    tl.store(line + NUM_ACCEPTED, tl.minimum(accepted, num_out), mask=here)
    tl.store(line + ENDED, ended, mask=here)
    tl.store(line + FIRST_ROW, first, mask=here)
    tl.store(line + PICK, pick, mask=here)
    written = tl.where(depth < num_out[:, None], said, 0)
    tl.store(line[:, None] + TOKENS + depth, written, mask=here[:, None] & (depth <= K))


@triton.jit
def commit_kernel(
    plan_slots, plan_chunk, win_slots, win_first, win_drafts,  # [B]
    drafts, token, accept, recovered, bad,  # [L]
    tokens, length, computed, num_draft, ended, max_length, wants, ends,  # columns; [S], [S, WIDE], [S, V]
    table, pick_rows, pick_tokens,  # [B, WIDTH], [P], [P]
    B, L, P, V, WIDE, K, WIDTH,
    ACCEPT: tl.constexpr, RECOVERED: tl.constexpr, ENTRIES: tl.constexpr, DEPTHS: tl.constexpr,
    PICKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    entry = tl.arange(0, ENTRIES)
    depth = tl.arange(0, DEPTHS).to(tl.int64)[None, :]
    here = entry < B
    slot = tl.load(win_slots + entry, mask=here, other=-1)
    named = tl.load(plan_slots + entry, mask=here, other=-1)
    real = slot >= 0
    first = tl.load(win_first + entry, mask=real, other=0)
    count = tl.load(win_drafts + entry, mask=real, other=0)
    old = tl.load(length + slot, mask=real, other=0)
    most = tl.load(max_length + slot, mask=real, other=0)
    wanted = tl.load(wants + slot, mask=real, other=0) > 0
    idle = (named >= 0) & (slot < 0)
    done = tl.load(computed + named, mask=idle, other=0) + tl.load(plan_chunk + entry, mask=idle, other=0)
    rows = tl.minimum(first[:, None] + depth, L - 1)
    said, accepted, before_end, before_bad, why = _judged(
        drafts, token, accept, recovered, ends, bad, slot, real, count, rows, depth, V, K, ACCEPT, RECOVERED
    )
    fails = before_bad <= accepted  # the token of a bad row would be committed
    limit = tl.where(fails, before_bad, K + 1)
    room = most - old
    num_out = tl.minimum(tl.minimum(accepted, before_end) + 1, tl.minimum(room, limit))
    num_out = tl.where(real, num_out, 0)
    how = tl.where(fails & (num_out == limit), why, 0)
    how = tl.where(num_out == room, LENGTH, how)
    how = tl.where(before_end < num_out, STOP, how)
    how = tl.where(real, how, 0)

    kept = depth < num_out[:, None]
    place = old[:, None] + depth
    tl.store(tokens + slot[:, None] * WIDE + place, said, mask=kept & (place < WIDE))
    tl.store(length + slot, old + num_out, mask=real)
    tl.store(computed + slot, old + num_out - 1, mask=real)
    tl.store(num_draft + slot, tl.zeros_like(slot), mask=real)
    tl.store(ended + slot, how, mask=real)
    tl.store(computed + named, done, mask=idle)

    picked = tl.where(wanted, num_out, 0)
    begun = tl.cumsum(picked, axis=0) - picked
    pick = tl.where(picked > 0, begun, 0)
    _record(table, entry, depth, here, num_out, count, accepted, how, first, pick, said, K, WIDTH)
    at = begun[:, None] + depth
    ok = (depth < picked[:, None]) & (at < P)
    tl.store(pick_rows + at, first[:, None] + depth, mask=ok)
    tl.store(pick_tokens + at, said, mask=ok)
    total = tl.sum(picked, axis=0)
    for start in range(0, P, PICKS):
        rest = start + tl.arange(0, PICKS).to(tl.int64)
        none = tl.zeros_like(rest)
        tl.store(pick_rows + rest, none - 1, mask=(rest >= total) & (rest < P))
        tl.store(pick_tokens + rest, none, mask=(rest >= total) & (rest < P))


def commit(plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome, pdl: bool) -> None:
    columns = windows.columns
    entries, k = len(windows.slots), columns.draft.shape[1]
    down, across = power_of_two(entries), power_of_two(k + 1)
    warps = min(8, max(1, down * across // 64))
    commit_kernel[(1,)](
        plan.slots, plan.chunk, windows.slots, windows.first, windows.num_draft,
        windows.draft, choice.token,
        bad if choice.accept is None else choice.accept.view(torch.uint8),
        bad if choice.recovered is None else choice.recovered,
        bad,
        columns.tokens, columns.length, columns.computed, columns.num_draft, columns.ended,
        columns.max_length, columns.logprob_kind, columns.ends.view(torch.uint8),
        out.table, out.pick_rows, out.pick_tokens,
        entries, len(bad), len(out.pick_rows), columns.ends.shape[1], columns.tokens.shape[1], k,
        out.table.shape[1],
        ACCEPT=choice.accept is not None, RECOVERED=choice.recovered is not None,
        ENTRIES=down, DEPTHS=across, PICKS=PICKS, **launch_options(pdl, num_warps=warps),
    )  # fmt: skip
