"""The step's bookkeeping in torch, for backends on any device: whole columns at a time.

Reads through a slot of -1 are made harmless by reading line 0; writes go to lines of real entries only,
which are counted first: on a device with a queue that waits, so backends that capture have their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.ops import STREAM_SAMPLE, Layout, TokenLogprobs
from draftproof.ops.torch.draft_rounds import TorchFollowing
from draftproof.ops.torch.draft_search import TorchSuffix
from draftproof.types import (
    ENDED,
    FIRST_ROW,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    Choice,
    Draft,
    FinishStatus,
    LogitAdjust,
    LogprobKind,
    Outcome,
    PlanColumns,
    SlotColumns,
    Windows,
)


class Bookkeeping(TorchSuffix, TorchFollowing):
    """Compositions of torch ops and of the backend's own primitives."""

    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        rows, windows = out.rows, out.windows
        line = plan.slots.clamp(min=0)
        live = (plan.slots >= 0) & (columns.ended[line] == FinishStatus.RUNNING)
        length, computed = columns.length[line], columns.computed[line]
        fresh = torch.where(plan.chunk > 0, plan.chunk, length - computed)
        reaches = live & (computed + fresh == length)
        num_draft = torch.minimum(plan.drafts, columns.num_draft[line])
        num_draft = torch.where(reaches & (plan.chunk == 0), num_draft, 0)
        owner, offset, real, first = _ragged(torch.where(live, fresh + num_draft, 0), len(rows.tokens))
        slot = torch.where(real, line[owner], 0)
        position = torch.where(real, computed[owner] + offset, 0)
        ahead = position - length[owner]
        committed = columns.tokens[slot, position.clamp(max=columns.tokens.shape[1] - 1)]
        guessed = columns.draft[slot, ahead.clamp(0, columns.draft.shape[1] - 1)]
        page = columns.page_table[slot, position // page_size].long()
        rows.tokens.copy_(torch.where(real, torch.where(ahead < 0, committed, guessed), 0))
        rows.positions.copy_(position)
        rows.slots.copy_(torch.where(real, slot, -1))
        rows.kv_index.copy_(torch.where(real, page * page_size + position % page_size, 0))
        last = first + fresh - 1
        owner, depth, real, first = _ragged(torch.where(reaches, num_draft + 1, 0), len(out.at))
        slot = line[owner]
        windows.slots.copy_(torch.where(reaches, plan.slots, -1))
        windows.first.copy_(first)
        windows.num_draft.copy_(num_draft)
        windows.slot.copy_(torch.where(real, slot, -1))
        windows.depth.copy_(torch.where(real, depth, 0))
        place = (length - columns.prompt_len[line])[owner] + depth
        windows.position.copy_(torch.where(real, place, 0))
        draft = columns.draft[slot, depth.clamp(max=columns.draft.shape[1] - 1)]
        windows.draft.copy_(torch.where(real & (depth < num_draft[owner]), draft, -1))
        out.at.copy_(torch.where(real, last[owner] + depth, 0))

    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        flags = torch.where(windows.slot >= 0, columns.adjust[slot], 0)[:, None]
        seen, counts = _occurrences(windows, logits.shape[1])
        penalty = columns.repetition[slot][:, None]
        out = torch.where(logits > 0, logits / penalty, logits * penalty)
        out = torch.where(seen, out, logits)
        out = out - columns.frequency[slot][:, None] * counts
        out = out - columns.presence[slot][:, None] * (counts > 0)
        out = torch.where((flags & LogitAdjust.PENALTY) > 0, out, logits)
        return torch.where((flags & LogitAdjust.BIAS) > 0, out + columns.bias[slot], out)

    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        flags = torch.where(windows.slot >= 0, columns.adjust[slot], 0)[:, None]
        length = columns.prompt_len[slot] + windows.position
        held = (length < columns.min_length[slot])[:, None] & ((flags & LogitAdjust.MIN_TOKENS) > 0)
        banned = columns.banned[slot] & ((flags & LogitAdjust.ALLOWED_IDS) > 0)
        base.masked_fill_(banned | (columns.ends[slot] & held), -math.inf)

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        assert windows.allowed is not None
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        masked = (windows.slot >= 0) & ((columns.adjust[slot] & LogitAdjust.MASK) > 0)
        words = windows.allowed[slot, windows.depth]
        bits = words[:, :, None] >> torch.arange(32, device=words.device, dtype=torch.int32) & 1
        closed = bits.flatten(1)[:, : base.shape[1]] == 0
        base.masked_fill_(closed & masked[:, None], -math.inf)

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        heat = columns.temperature[slot]
        hot = heat > 0
        tokens = self.argmax(logits)
        if bool(hot.any()):
            divided = logits if scaled else logits / torch.where(hot, heat, 1.0)[:, None]
            drawn = self.gumbel_argmax(divided, columns.seed[slot], windows.position, STREAM_SAMPLE)
            tokens = torch.where(hot, drawn, tokens)
        peak = logits.amax(-1)  # NaN if one is
        bad = torch.where(torch.isfinite(peak), 0, int(FinishStatus.NOT_FINITE))
        bad = torch.where(peak == -math.inf, int(FinishStatus.NO_ALLOWED_TOKEN), bad)
        real = windows.slot >= 0
        bad = torch.where(real, bad, 0)
        return torch.where(real & (bad == 0), tokens, 0), bad

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        columns = windows.columns
        k, vocab = columns.draft.shape[1], columns.ends.shape[1]
        real = windows.slots >= 0
        line = windows.slots.clamp(min=0)
        depth = torch.arange(k + 1, device=line.device)
        inside = real[:, None] & (depth <= windows.num_draft[:, None])  # [B, K + 1]
        rows = (windows.first[:, None] + depth).clamp(max=len(bad) - 1)
        rows = torch.where(inside, rows, 0)
        accept = windows.draft == choice.token if choice.accept is None else choice.accept
        stands = inside & (depth < windows.num_draft[:, None]) & accept[rows]
        accepted = stands.long().cumprod(1).sum(1)
        fell = accepted < windows.num_draft
        token = choice.token[rows]
        if choice.recovered is not None:
            token = torch.where(fell[:, None], choice.recovered[rows], token)
        tokens = torch.where(depth < accepted[:, None], windows.draft[rows], token)
        num_out = accepted + 1
        ends = columns.ends[line[:, None], tokens.clamp(0, vocab - 1)] & (depth < num_out[:, None])
        before_end = (~ends).long().cumprod(1).sum(1)
        before_bad = (inside & (bad[rows] == 0)).long().cumprod(1).sum(1)
        fails = before_bad <= torch.minimum(accepted, windows.num_draft)  # its token would be committed
        limit = torch.where(fails, before_bad, k + 1)
        length = columns.length[line]
        room = columns.max_length[line] - length
        num_out = torch.minimum(torch.minimum(num_out, before_end + 1), torch.minimum(room, limit))
        num_out = torch.where(real, num_out, 0)
        why = bad[rows].gather(1, before_bad.clamp(max=k)[:, None])[:, 0]
        ended = torch.where(fails & (num_out == limit), why, int(FinishStatus.RUNNING))
        ended = torch.where(num_out == room, int(FinishStatus.LENGTH), ended)
        ended = torch.where(before_end < num_out, int(FinishStatus.STOP), ended)
        ended = torch.where(real, ended, int(FinishStatus.RUNNING))
        kept = depth < num_out[:, None]

        place = (line[:, None] * columns.tokens.shape[1] + length[:, None] + depth)[kept]
        columns.tokens.view(-1)[place] = tokens[kept]
        here, there = line[real], plan.slots[(plan.slots >= 0) & ~real]
        columns.length[here] = (length + num_out)[real]
        columns.computed[here] = (length + num_out - 1)[real]
        columns.num_draft[here] = 0
        columns.ended[here] = ended[real]
        columns.computed[there] += plan.chunk[(plan.slots >= 0) & ~real]

        picked = torch.where(columns.logprob_kind[line] > LogprobKind.NONE, num_out, 0)
        table = out.table
        table.zero_()
        table[:, NUM_OUT], table[:, NUM_DRAFT] = num_out, torch.where(real, windows.num_draft, 0)
        table[:, NUM_ACCEPTED], table[:, ENDED] = torch.minimum(accepted, num_out), ended
        table[:, FIRST_ROW] = torch.where(real, windows.first, 0)
        table[:, PICK] = torch.where(picked > 0, picked.cumsum(0) - picked, 0)
        table[:, TOKENS:] = torch.where(kept, tokens, 0)
        owner, depth, real, _ = _ragged(picked, len(out.pick_rows))
        depth = torch.where(real, depth, 0)
        out.pick_rows.copy_(torch.where(real, windows.first[owner] + depth, -1))
        out.pick_tokens.copy_(torch.where(real, tokens[owner, depth], 0))

    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, top: int, out: TokenLogprobs | None = None
    ) -> TokenLogprobs:
        picked = logits[rows.clamp(min=0)]
        norm = self.logsumexp(picked)[:, None]
        own = picked.gather(1, tokens[:, None])
        values, ids = self.top(picked, top) if top else (own[:, :0], tokens[:, None][:, :0])
        found = TokenLogprobs(torch.cat([own, values], 1) - norm, ids, self.rank(picked, tokens))
        return found if out is None else out.put(found)

    def search_ngram(
        self, columns: SlotColumns, slots: Tensor, budget: Tensor, smallest: int, largest: int
    ) -> tuple[Tensor, Tensor]:
        line = slots.clamp(min=0)
        tokens, length = columns.tokens[line], columns.length[line]
        wide = tokens.shape[1]
        place = torch.arange(wide, device=line.device)
        # matched[e]: how many tokens before e equal the last ones, for every place e a match may go on from
        matched = torch.zeros_like(tokens)
        still = (place >= 1) & (place < length[:, None])
        for n in range(1, largest + 1):
            last = tokens.gather(1, (length - n).clamp(min=0)[:, None])
            still = still & (place >= n) & (tokens.roll(n, 1) == last)
            matched += still
        best, _ = matched.max(1)
        at = (torch.where(matched == best[:, None], place, 0)).amax(1)  # the latest of the longest
        found = (best >= smallest) & (slots >= 0) & (columns.ended[line] == FinishStatus.RUNNING)
        count = torch.where(found, budget, 0)
        ahead = torch.arange(columns.draft.shape[1], device=line.device)
        period = (length - at).clamp(min=1)
        source = at[:, None] + ahead % period[:, None]
        return tokens.gather(1, source.clamp(max=wide - 1)), count

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        device, vocab = columns.draft.device, columns.ends.shape[1]
        tokens, count = draft.tokens.to(device), draft.count.to(device)  # a host proposer's are not there
        real = (slots >= 0).nonzero()[:, 0]
        line, tokens = slots[real], tokens[real]
        legal = ((tokens >= 0) & (tokens < vocab)).long().cumprod(1).sum(1)
        room = (columns.max_length[line] - columns.length[line] - 1).clamp(min=0)
        count = torch.minimum(torch.minimum(count[real], legal), torch.minimum(budget[real], room))
        count = count.clamp(min=0)
        columns.num_draft[line] = torch.where(columns.ended[line] == FinishStatus.RUNNING, count, 0)
        columns.draft[line] = tokens.clamp(0, vocab - 1)  # what is cut off may still be looked up
        own, sources = draft.logprobs, draft.sources
        columns.draft_logprob[line] = math.nan if own is None else own.to(device)[real]
        columns.draft_source[line] = 0 if sources is None else sources.to(device)[real]


def _ragged(counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts [B] laid out in `size` places: owner, offset, is it real ([size] each), and first [B]."""
    ends = counts.cumsum(0)
    first = ends - counts
    place = torch.arange(size, device=counts.device)
    owner = torch.searchsorted(ends, place, right=True).clamp(max=len(counts) - 1)
    return owner, place - first[owner], place < ends[-1], first


def _occurrences(windows: Windows, vocab: int) -> tuple[Tensor, Tensor]:
    """[L, V]: seen in prompt, output or earlier drafts; and how often in the output and those drafts."""
    columns, slot = windows.columns, windows.slot.clamp(min=0)
    prompt, length = columns.prompt_len[slot], columns.prompt_len[slot] + windows.position - windows.depth
    wide, k = columns.tokens.shape[1], columns.draft.shape[1]
    place = torch.arange(wide + k, device=slot.device)
    committed = torch.nn.functional.pad(columns.tokens[slot], (0, k))
    ahead = (place - length[:, None]).clamp(0, k - 1)
    tokens = torch.where(place < length[:, None], committed, columns.draft[slot].gather(1, ahead))
    valid = place < (length + windows.depth)[:, None]
    tokens = torch.where(valid, tokens, 0)
    zeros = torch.zeros((len(slot), vocab), device=slot.device)
    seen = zeros.scatter_add(1, tokens, valid.float()) > 0
    output = valid & (place >= prompt[:, None])
    return seen, zeros.scatter_add(1, tokens, output.float())
