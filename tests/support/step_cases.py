"""Random steps, and checks of step ops of any backend against the reference.

Memory that no op may read or change is poisoned: free slots, tokens past a length, drafts past their number,
plans of absent entries, padding rows, memory behind every result. Comparisons are of bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftproof.ops import DraftVocab, Layout, NamedIds, Ops, Rows, TokenLogprobs
from draftproof.ops.contract.draft_search import (
    BUCKET_WAYS,
    FIXED_ONE,
    HASHED_NGRAM_SIZES,
    AcceptanceRecord,
    DraftCandidate,
    SuffixOptions,
    SuffixPool,
)
from draftproof.ops.reference.backend import ReferenceOps
from draftproof.ops.reference.draft_search import bucket_of
from draftproof.ops.reference.sampling import gumbel
from draftproof.ops.torch.draft_rounds import TorchRounds
from draftproof.ops.torch.sampling import ComposedSampling
from draftproof.ops.torch.step import TorchStep
from draftproof.types import (
    TOKENS,
    Choice,
    DeviceBatch,
    Draft,
    DraftRanking,
    LogitAdjust,
    Outcome,
    PlanColumns,
    SlotColumns,
    Windows,
)

POISON = -(2**40)
INF = math.inf
CPU = torch.device("cpu")
REF = ReferenceOps(CPU)
PAGE = 4
ADJUST = (0, 0, LogitAdjust.PENALTY, LogitAdjust.BIAS, LogitAdjust.ALLOWED_IDS, LogitAdjust.MIN_TOKENS, 15)


def bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor, with one value for every NaN."""
    if x.is_floating_point():
        return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(torch.int32)
    return x


def same(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype}"
    wrong = (bits(got) != bits(want.to(got.device))).nonzero().tolist()
    assert not wrong, f"{what} differs at {wrong[:6]}: {got[tuple(wrong[0])]}, not {want[tuple(wrong[0])]}"


def all_same(got: Any, want: Any, what: str) -> None:
    """Compare every tensor of a dataclass."""
    for field in fields(want):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if isinstance(b, Tensor):
            same(a, b, f"{what}.{field.name}")
        elif hasattr(b, "__dataclass_fields__"):
            all_same(a, b, f"{what}.{field.name}")


def copied(held: Any, device: torch.device) -> Any:
    """Copy a dataclass of tensors to a device."""
    made = {f.name: getattr(held, f.name) for f in fields(held)}
    for name, value in made.items():
        if isinstance(value, Tensor):
            made[name] = value.detach().clone().to(device)
        elif hasattr(value, "__dataclass_fields__"):
            made[name] = copied(value, device)
    return type(held)(**made)


class Guarded:
    """Output tensors with a guarded margin behind each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.held = device, []

    def __call__(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        whole = torch.full((size + 8,), POISON, dtype=torch.int64, device=self.device)
        self.held.append(whole[size:])
        return whole[:size].view(shape)

    def check(self) -> None:
        assert all(bool((margin == POISON).all()) for margin in self.held), "written behind the end"


@dataclass(frozen=True, kw_only=True)
class Size:
    entries: int = 11
    k: int = 4
    vocab: int = 23
    wide: int = 40  # tokens a slot can hold
    letters: int = 4  # different tokens in a text; few: many n-grams recur
    hot: float = 0.5  # share of requests with a temperature
    picks: int = 5  # rows whose logprobs are wanted, or padding


class Step:
    """Random slots, a plan for them, and their windows."""

    def __init__(self, seed: int, size: Size = Size()) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.size = size
        self.columns = self._columns()
        self.plan = self._plan()

    def int(self, low: int, high: int) -> int:
        """Return a random integer from low to high, both included."""
        return int(torch.randint(low, high + 1, (1,), generator=self.random))

    def chance(self, share: float) -> bool:
        return float(torch.rand(1, generator=self.random)) < share

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.random)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def _columns(self) -> SlotColumns:
        size, slots = self.size, self.size.entries
        pages = -(-size.wide // PAGE)
        wide = {"tokens": size.wide, "draft": size.k, "draft_logprob": size.k, "draft_source": size.k}
        wide |= {"page_table": pages, "ends": size.vocab, "bias": size.vocab, "banned": size.vocab}
        floats = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
        made: dict[str, Tensor] = {}
        for field in fields(SlotColumns):
            shape = (slots, wide[field.name]) if field.name in wide else (slots,)
            if field.name in ("ends", "banned"):
                line = torch.rand(size.vocab, generator=self.random) < 0.5
                made[field.name] = torch.stack([line.roll(slot) for slot in range(slots)])
            elif field.name in floats or field.name in ("bias", "draft_logprob"):
                made[field.name] = torch.full(shape, math.nan)
            elif field.name == "page_table":
                made[field.name] = torch.full(shape, -(2**31), dtype=torch.int32)
            elif field.name == "draft_source":
                made[field.name] = torch.full(shape, -7, dtype=torch.int8)
            else:
                made[field.name] = torch.full(shape, POISON, dtype=torch.int64)
        return SlotColumns(**made)

    def _fill(self, slot: int) -> str:
        """Put a random request into a slot and return its phase."""
        size, columns = self.size, self.columns
        phase = ("ended", "prompt", "prompt", "decode", "decode", "decode")[self.int(0, 5)]
        length = self.int(1, size.wide - size.k - 2)
        columns.length[slot], columns.prompt_len[slot] = length, self.int(1, length)
        columns.tokens[slot, :length] = self.ints(0, min(size.letters, size.vocab) - 1, length)
        columns.computed[slot] = self.int(0, length - 1) if phase == "prompt" else length - 1
        columns.finish_status[slot] = self.int(1, 5) if phase == "ended" else 0
        columns.max_length[slot] = min(size.wide, length + self.int(1, 3 * size.k))
        columns.num_draft[slot] = 0
        if phase == "decode":
            count = max(self.int(0, size.k), self.int(0, size.k))  # some reach past max_length
            columns.num_draft[slot] = count
            columns.draft[slot, :count] = self.ints(0, size.vocab - 1, count)
        columns.page_table[slot] = self.ints(0, 99, columns.page_table.shape[1])
        columns.page_table[slot, (int(columns.max_length[slot]) - 1) // PAGE + 1 :] = -(2**31)
        columns.temperature[slot] = self.int(1, 20) / 10 if self.chance(size.hot) else 0.0
        columns.repetition[slot] = self.int(5, 20) / 10
        columns.presence[slot], columns.frequency[slot] = self.floats(2)
        columns.seed[slot] = self.int(0, 2**63 - 2)
        columns.min_length[slot] = length + self.int(-1, size.k)
        columns.adjust[slot] = int(ADJUST[self.int(0, len(ADJUST) - 1)])
        columns.logprob_kind[slot] = self.int(0, 2)
        columns.ends[slot] = torch.rand(size.vocab, generator=self.random) < self.int(0, 2) * 0.12
        if columns.adjust[slot] & LogitAdjust.BIAS:
            columns.bias[slot] = self.floats(size.vocab)
        return phase

    def _plan(self) -> PlanColumns:
        size, columns = self.size, self.columns
        table = torch.full((4, size.entries), POISON, dtype=torch.int64)
        plan = PlanColumns(*table)
        order = torch.randperm(size.entries, generator=self.random).tolist()
        for b, slot in enumerate(order):
            if self.chance(0.25):
                plan.slots[b] = -1
                continue
            phase = self._fill(slot)
            plan.slots[b] = slot
            plan.chunk[b] = 0
            if phase == "prompt":
                whole = int(columns.length[slot] - columns.computed[slot])
                plan.chunk[b] = whole if self.chance(0.5) else self.int(1, whole)
            plan.drafts[b] = max(self.int(0, size.k), self.int(0, size.k))
            plan.budget[b] = self.int(0, size.k)
        return plan

    def room(self, spare: int) -> tuple[int, int]:
        """Return the rows and logits rows of the plan, and `spare` more of each."""
        most = self.size.entries * self.size.wide
        out = self.out(Guarded(CPU), most, most)
        TorchStep().layout(self.plan, self.columns, PAGE, out)
        count, logits = int((out.rows.slots >= 0).sum()), int((out.windows.slot >= 0).sum())
        return max(1, count + spare), max(1, logits + spare)

    def out(self, new: Guarded, rows: int, logits: int, columns: SlotColumns | None = None) -> Layout:
        columns, entries = columns or self.columns, self.size.entries
        lines = [new(rows) for _ in range(4)]
        windows = Windows(columns, *(new(entries) for _ in range(3)), *(new(logits) for _ in range(4)))
        return Layout(Rows(*lines, columns.page_table), windows, new(logits))

    def windows(self, spare: int, device: torch.device) -> Windows:
        """Return the windows of the layout, with their own columns."""
        rows, logits = self.room(spare)
        out = self.out(Guarded(CPU), rows, logits)
        TorchStep().layout(self.plan, self.columns, PAGE, out)
        return copied(out.windows, device)

    def logits(self, rows: int) -> Tensor:
        """Return random logits with ties, -inf, and a few rows of NaN, +inf or -inf only."""
        x = 3 * self.floats(rows, self.size.vocab)
        for r in range(rows):
            kind = self.int(0, 11)
            at = self.int(0, self.size.vocab - 1)
            if kind < 3:
                x[r] = x[r].round()
            elif kind == 3:
                x[r, self.floats(self.size.vocab) > 0] = -INF
            elif kind == 4:
                x[r] = 0.0
                x[r, self.floats(self.size.vocab) > 0] = -0.0
            elif kind == 5:
                x[r] = -INF
            elif kind in (6, 7):
                x[r, at] = math.nan if kind == 6 else INF
            elif kind == 8:
                x[r, : at + 1] = -INF
        return x


Check = Callable[[Ops, int, Size, Any], None]  # the last: the reference
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def spare_of(seed: int) -> int:
    return (0, 1, 7)[seed % 3]


@check
def layout(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    step = Step(seed, size)
    rows, logits = step.room(spare_of(seed))
    outs = []
    for by in (ref, ops):
        columns, plan = copied(step.columns, by.device), copied(step.plan, by.device)
        new = Guarded(by.device)
        outs.append(step.out(new, rows, logits, columns))
        by.step.layout(plan, columns, PAGE, outs[-1])
        new.check()
        all_same(plan, step.plan, "plan")
    all_same(outs[1], outs[0], "layout")


@check
def apply_penalties(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    step = Step(seed, size)
    if seed % 2:
        for column in (step.columns.tokens, step.columns.draft):
            column[column == POISON] = 1  # a valid token, so that a wrong count shows
    windows, mine = step.windows(spare_of(seed), ref.device), step.windows(spare_of(seed), ops.device)
    logits = step.logits(len(windows.slot)).to(ref.device)
    given = logits.clone().to(ops.device)
    same(
        ops.sampling.apply_penalties(given, mine), ref.sampling.apply_penalties(logits, windows), "penalised"
    )
    same(given, logits, "the logits themselves")
    all_same(mine, windows, "windows")


@check
def apply_bans(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    check_logits_in_place("apply_bans", ops, seed, size, ref)


def check_logits_in_place(
    name: str, ops: Ops, seed: int, size: Size, ref: Any, prepare: Callable[..., Windows] = lambda _, w: w
) -> None:
    """Compare an op that changes logits; `prepare(step, windows)` adds to the windows."""
    step, again = Step(seed, size), Step(seed, size)
    windows = prepare(step, step.windows(spare_of(seed), ref.device))
    mine = prepare(again, again.windows(spare_of(seed), ops.device))
    want = step.logits(len(windows.slot)).to(ref.device)
    got = want.clone().to(ops.device)
    getattr(ops.sampling, name)(got, mine)
    getattr(ref.sampling, name)(want, windows)
    same(got, want, "base")
    all_same(mine, windows, "windows")


def masked(step: Step, windows: Windows) -> Windows:
    """Add masks for every slot and depth; about half of the requests have a grammar."""
    size, columns = step.size, windows.columns
    words = -(-size.vocab // 32)
    allowed = step.ints(-(2**31), 2**31 - 1, size.entries, size.k + 1, words).to(torch.int32)
    for slot in range(size.entries):
        kind = step.int(0, 3)
        if kind < 2:  # all tokens allowed, or none
            allowed[slot, step.int(0, size.k)] = -kind
        # The column of a free slot is poisoned: no row may read it.
        if columns.adjust[slot] != POISON:
            columns.adjust[slot] |= int(LogitAdjust.MASK) * (kind % 2)
    return replace(windows, allowed=allowed.to(columns.adjust.device))


@check
def apply_grammar_mask(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    check_logits_in_place("apply_grammar_mask", ops, seed, size, ref, masked)


def equalize_logits(logits: Tensor, windows: Windows, scaled: bool) -> None:
    """Set all logits of a row with a temperature to nearly equal scores, so that rounding decides."""
    columns = windows.columns
    hot = [r for r, slot in enumerate(windows.slot.tolist()) if slot >= 0 and columns.temperature[slot] > 0]
    for r in hot[1:2]:
        slot, position = int(windows.slot[r]), int(windows.position[r])
        noise = [gumbel(int(columns.seed[slot]), position, 0, i) for i in range(logits.shape[1])]
        heat = 1.0 if scaled else columns.temperature[slot].double()
        logits[r] = ((3.0 - torch.tensor(noise, dtype=torch.float64)) * heat).float()


@check
def sample(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    step = Step(seed, size)
    windows, mine = step.windows(spare_of(seed), ref.device), step.windows(spare_of(seed), ops.device)
    logits = step.logits(len(windows.slot)).to(ref.device)
    scaled = seed % 4 == 3
    if size.vocab < 100:
        equalize_logits(logits, windows, scaled)
    got = ops.sampling.sample(logits.clone().to(ops.device), mine, scaled)
    want = ref.sampling.sample(logits, windows, scaled)
    same(got[1], want[1], "bad")
    same(got[0], want[0], "tokens")


def choice_of(step: Step, windows: Windows, seed: int) -> tuple[Choice, Tensor]:
    """Return a choice that accepts most drafts, with a few bad rows and poisoned padding."""
    rows, vocab = len(windows.slot), step.size.vocab
    padding = windows.slot < 0
    agrees = torch.rand(rows, generator=step.random) < 0.8
    token = torch.where(agrees & (windows.draft >= 0), windows.draft, step.ints(0, vocab - 1, rows))
    bad = torch.where(torch.rand(rows, generator=step.random) < 0.15, step.ints(3, 4, rows), 0)
    token[padding], bad[padding] = POISON, POISON
    accept = recovered = None
    if seed % 2:
        accept = torch.rand(rows, generator=step.random) < 0.75
    if seed // 2 % 2:
        recovered = step.ints(0, vocab - 1, rows)
        recovered[padding] = POISON
    return Choice(token, accept, recovered), bad


@check
def commit(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    step = Step(seed, size)
    spare = spare_of(seed)
    choice, bad = choice_of(step, step.windows(spare, CPU), seed)
    done = []
    for by in (ref, ops):
        windows, plan = step.windows(spare, by.device), copied(step.plan, by.device)
        mine, codes = copied(choice, by.device), bad.clone().to(by.device)
        new, rows = Guarded(by.device), len(bad)
        out = Outcome(new(size.entries, TOKENS + size.k + 1), new(rows), new(rows))
        by.step.commit(plan, windows, mine, codes, out)
        new.check()
        all_same(mine, choice, "choice")
        all_same(plan, step.plan, "plan")
        done.append((windows, out))
    all_same(done[1][1], done[0][1], "outcome")
    all_same(done[1][0], done[0][0], "windows")


@check
def logprobs(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    """Check that ids and ranks equal those of the reference, and values those of the composition.

    Values are logits - logsumexp, and their bits those of the backend's own primitives.
    """
    step = Step(seed, size)
    count = size.picks
    logits = step.logits(5)
    rows, tokens = step.ints(-1, 4, count), step.ints(0, size.vocab - 1, count)
    rows[0], rows[-1] = seed % 5, -1
    real = rows >= 0
    wild = (logits.isnan() | (logits == INF)).any(1)  # such a row fails its request
    sound = real & ~wild[rows.clamp(min=0)]
    tokens = torch.where(real, tokens, 0)  # an index of a gather
    for top in ((0, min(5, size.vocab)), (1,), (min(20, size.vocab),))[seed % 3]:
        given = [x.clone().to(ops.device) for x in (logits, rows, tokens)]
        got = ops.sampling.logprobs(*given, top)
        want = ref.sampling.logprobs(*(x.to(ref.device) for x in given), top)
        same(got.ids[sound], want.ids[sound], f"ids, top {top}")
        same(got.ranks[sound], want.ranks[sound], f"ranks, top {top}")
        close = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}
        torch.testing.assert_close(got.values[sound], want.values[sound], **close)
        plain = ComposedSampling.logprobs(ops.sampling, *given, top)
        same(got.values[sound], plain.values[sound], f"values, top {top}")
    width = 1 + seed % 6
    table, slots = step.ints(-1, size.vocab - 1, 3, 8), step.ints(0, 2, len(logits))
    ids = table[:, :width][slots[rows.clamp(min=0)]]  # [N, M]
    known = (ids >= 0) & sound[:, None]
    named = NamedIds(table.to(ops.device), slots.to(ops.device), width)
    got = ops.sampling.logprobs(*given, top, None, named)
    named = NamedIds(table.to(ref.device), slots.to(ref.device), width)
    want = ref.sampling.logprobs(*(x.to(ref.device) for x in (logits, rows, tokens)), top, None, named)
    same(got.values[sound], plain.values[sound], "values beside named ids")
    same(got.named.ranks[known], want.named.ranks[known], "ranks of named ids")
    for m in range(width):  # the bits are those of the id as a token
        alone = ops.sampling.logprobs(*given[:2], ids[:, m].clamp(min=0).to(ops.device), 0)
        here = known[:, m]
        same(got.named.values[here, m], alone.values[here, 0], "values of named ids")


@check
def draft_logprobs(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    """Check that the bits equal those of `logprobs` at the row of each draft.

    There the logits are divided by the temperature and in the order of the ids.
    """
    step = Step(seed, size)
    rounds, count, slots = 1 + seed % 3, size.entries, len(step.columns.length)
    owner, drafts = step.ints(-1, slots - 1, rounds, count), step.ints(-1, size.vocab - 1, rounds, count)
    owner[0, -1], owner[-1, 0], drafts[-1, 0] = -1, 0, seed % 2
    kinds, heat = step.ints(1, 2, slots), step.floats(slots).clamp(min=0.0)
    heat[0] = 0.7
    wide = max(2, size.vocab - 3) if seed % 2 else size.vocab
    logits = step.logits(rounds * count)[:, :wide].nan_to_num(0.0, 5.0, -INF).contiguous()
    logits[:, -1] = logits[:, 0]  # a tie
    ids = torch.arange(size.vocab)
    if wide < size.vocab:
        ids = torch.cat([ids[:2], 2 + torch.randperm(size.vocab - 2, generator=step.random)[: wide - 2]])
        ids = ids.sort().values
    places = torch.full((size.vocab,), -1)
    places[ids] = torch.arange(wide)
    top, is_divided, has_kinds = (0, min(5, wide), 1)[seed % 3], seed % 4 != 1, seed % 4 > 1
    shape = rounds * count
    given = [torch.full((shape, 1 + top), -7.0), *(torch.full((shape, *of), 99) for of in ((top,), ()))]
    out = copied(TokenLogprobs(*given), ops.device)
    wider = torch.full((rounds, count + 3), POISON)  # rows of slots need not be adjacent
    wider[:, :count] = owner
    here = [x.to(ops.device) for x in (logits, wider, drafts, kinds, heat, ids, places)]
    ops.sampling.draft_logprobs(
        here[0], here[1][:, :count], here[2], top, out, kind=(here[3], 2) if has_kinds else None,
        temperature=here[4] if is_divided else None,
        vocab=DraftVocab(here[5], here[6]) if wide < size.vocab else None,
    )  # fmt: skip
    lines, tokens = owner.flatten(), drafts.flatten()
    real = (lines >= 0) & (tokens >= 0) & (places[tokens.clamp(min=0)] >= 0)
    if has_kinds:
        real &= kinds[lines.clamp(min=0)] == 2
    scaled, place = logits, places[tokens.clamp(min=0)].clamp(min=0)
    if is_divided:
        by = heat[lines.clamp(min=0)]
        scaled = logits / torch.where(by > 0, by, 1.0)[:, None]
    rows = torch.where(real, torch.arange(shape), -1)
    own = [x.to(ops.device) for x in (scaled, rows, place)]
    want = ops.sampling.logprobs(*own, top)
    same(out.values[real], want.values[real], "values")
    same(out.ids[real], ids[want.ids.cpu()[real]], "ids")
    same(out.ranks[real], ref.sampling.logprobs(scaled, rows, place, top).ranks[real], "ranks")
    assert bool(out.values[~real].isnan().all()) and not out.ids[~real].any() and not out.ranks[~real].any()


@check
def search_ngram(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    step = Step(seed, size)
    columns, held = copied(step.columns, ops.device), copied(step.columns, ref.device)
    for smallest, largest in ((1, 1), (2, 2), (1, 3), (2, 7)):
        given = [step.plan.slots.clone().to(ops.device), step.plan.budget.clone().to(ops.device)]
        tokens, count, matched = ops.search.search_ngram(DeviceBatch(columns, *given), smallest, largest)
        theirs = [x.to(ref.device) for x in (step.plan.slots, step.plan.budget)]
        wanted, want, n = ref.search.search_ngram(DeviceBatch(held, *theirs), smallest, largest)
        same(matched, n, f"matched, {smallest} to {largest}")
        same(count, want, f"count, {smallest} to {largest}")
        is_draft = torch.arange(size.k, device=ops.device) < count[:, None]
        wanted = torch.where(is_draft.to(ref.device), wanted, 0)  # later ones may be anything
        same(torch.where(is_draft, tokens, 0), wanted, f"tokens, {smallest} to {largest}")
    all_same(columns, step.columns, "columns")


def pool_of(step: Step, lines: int = 6, wide: int = 20, buckets: int = 8) -> SuffixPool:
    """Return lines of few letters, some begun with the end of a request's text, and stale entries."""
    size, slots = step.size, len(step.columns.length)
    tokens = step.ints(0, size.letters - 1, lines, wide).to(torch.int32)
    filled, owner = step.ints(0, wide, lines), step.ints(-1, 1, lines)
    table = torch.full((len(HASHED_NGRAM_SIZES), buckets, BUCKET_WAYS), -1, dtype=torch.int32)
    slot_owner = step.ints(0, 1, slots)
    for slot, length in enumerate(step.columns.length.tolist()):
        if length > 2 and step.chance(0.7):
            line, tail = step.int(0, lines - 1), step.columns.tokens[slot, max(0, length - 14) : length]
            tokens[line, : len(tail)], filled[line] = tail.to(torch.int32), step.int(len(tail), wide)
            owner[line] = slot_owner[slot] if step.chance(0.8) else 1 - slot_owner[slot]
    for line in range(lines):
        for at in range(1, int(filled[line])):
            for which, n in enumerate(HASHED_NGRAM_SIZES):
                if at >= n and owner[line] >= 0:
                    before = tokens[line, at - n : at].tolist()[::-1]
                    bucket = bucket_of(int(owner[line]), before, buckets)
                    table[which, bucket, step.int(0, BUCKET_WAYS - 1)] = line * wide + at
    wild = torch.rand(table.shape, generator=step.random) < 0.1
    table = torch.where(wild, step.ints(-1, lines * wide - 1, *table.shape).to(torch.int32), table)
    tokens[torch.arange(wide) >= filled[:, None]] = -7
    weight, used = step.ints(1, 20, lines), step.ints(0, 5, lines)
    return SuffixPool(tokens, filled, owner, weight, used, table, slot_owner, torch.tensor([9]))


@check
def search_suffix(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    step = Step(seed, size)
    pool = pool_of(step)
    count = torch.minimum(step.ints(0, size.k, size.entries), step.plan.budget.clamp(min=0))
    begun = step.ints(0, size.letters - 1, size.entries, size.k)
    begun[torch.arange(size.k) >= count[:, None]] = POISON
    rules = SuffixOptions(1, 1.0, 0.05), SuffixOptions(2, 0.5, 0.3), SuffixOptions(4, 2.0, 0.0)
    for drafts, rule in ((None, rules[seed % 3]), ((begun, count), rules[(seed + 1) % 3])):
        done = []
        for by in (ref, ops):
            columns, mine, plan = (copied(x, by.device) for x in (step.columns, pool, step.plan))
            given = None if drafts is None else tuple(x.clone().to(by.device) for x in drafts)
            batch = DeviceBatch(columns, plan.slots, plan.budget)
            tokens, number, expected = by.search.search_suffix(batch, mine, rule, given)
            made = torch.arange(size.k, device=by.device) < number[:, None]
            done.append((torch.where(made, tokens, 0), number, expected, mine.used))
            all_same(columns, step.columns, "columns")
        for name, want, got in zip(("tokens", "count", "expected", "used"), *done, strict=True):
            same(got, want, name)


def offered(device: torch.device, tokens: Tensor, count: Tensor, expected: Tensor) -> list[DraftCandidate]:
    """Return candidates; the second is laid out draft by draft, as a model's; all negative becomes None."""
    found = []
    for m, (mine, number, scores) in enumerate(zip(tokens, count, expected, strict=True)):
        mine = mine.t().contiguous().to(device).t() if m == 1 else mine.clone().to(device)
        known = None if bool((scores < 0).all()) else scores.clone().to(device)
        found.append(DraftCandidate(mine, number.clone().to(device), known))
    return found


@check
def select_drafts(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    """Run several steps of the same slots: the record is kept until another request arrives."""
    step, members = Step(seed, size), 3
    slots, search = len(step.columns.length), (-1, 0, 2)[seed % 3]
    used = step.columns.length > 0
    step.columns.seed[used] = step.ints(0, 2, slots)[used]
    start = AcceptanceRecord(
        step.ints(0, 5, 4, slots), *(step.ints(0, 3 * FIXED_ONE, slots, members) for _ in range(2))
    )
    records = {by: copied(start, by.device) for by in (ref, ops)}
    for _ in range(3):
        shape = (members, size.entries)
        tokens, count = step.ints(0, size.vocab - 1, *shape, size.k), step.ints(0, size.k, *shape)
        expected = torch.where(step.floats(*shape) > 0, step.ints(0, 2 * FIXED_ONE, *shape), -1)
        expected[1] = -1
        done = []
        for by, record in records.items():
            columns, plan = copied(step.columns, by.device), copied(step.plan, by.device)
            offers = offered(by.device, tokens, count, expected)
            got = by.search.select_drafts(
                DeviceBatch(columns, plan.slots, plan.budget), record, offers, search
            )
            made = torch.arange(size.k, device=by.device) < got[1][:, None]
            done.append((torch.where(made, got[0], 0), *got[1:]))
            all_same(columns, step.columns, "columns")
        for name, want, got in zip(("tokens", "number", "source", "room"), *done, strict=True):
            same(got, want, name)
        all_same(records[ops], records[ref], "record")
        step.columns.length[used] += step.ints(1, 3, slots)[used]
        step.columns.seed[used] += step.ints(0, 5, slots)[used] // 5


@check
def store_drafts(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    step = Step(seed, size)
    shape = (size.entries, size.k)
    tokens = step.ints(-1, size.vocab, *shape)
    tokens[step.floats(*shape) > 0.2] = 1
    tokens[-1, -1] = 2**40
    count = step.ints(0, size.k, size.entries)
    tokens[torch.arange(size.k) >= count[:, None]] = POISON
    count[step.floats(size.entries) < 0.1] = -3  # as of a wrong proposer
    own = step.floats(*shape) if seed % 2 else None
    sources = step.ints(0, 3, *shape).to(torch.int8) if seed // 2 % 2 else None
    draft = Draft(tokens, count, logprobs=own, sources=sources)
    columns, mine = copied(step.columns, ref.device), copied(step.columns, ops.device)
    ref.step.store_drafts(columns, step.plan.slots.to(ref.device), step.plan.budget.to(ref.device), draft)
    plan = copied(step.plan, ops.device)
    given = copied(draft, ops.device)
    if seed % 3 == 2:
        given = replace(given, tokens=given.tokens.t().contiguous().t())
    ops.step.store_drafts(mine, plan.slots, plan.budget, given)
    all_same(mine, columns, "columns")
    all_same(plan, step.plan, "plan")


@check
def store_ranking(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    step = Step(seed, size)
    lines, width, top = len(step.columns.length) + 1, 4, seed % 3
    held = DraftRanking(
        step.ints(0, 9, lines, size.k),
        step.ints(0, 9, lines, size.k, width),
        step.floats(lines, size.k, width),
    )
    shape = (size.k, size.entries)
    found = DraftRanking(step.ints(1, 9, *shape), step.ints(0, 9, *shape, top), step.floats(*shape, 1 + top))
    done = []
    for by in (ref, ops):
        mine, given = copied(held, by.device), copied(found, by.device)
        ranks, ids, values = (
            part.transpose(0, 1) for part in (given.ranks, given.top_ids, given.top_logprobs)
        )
        given = DraftRanking(ranks, ids, values[..., 1:])  # as `DraftLogprobs` returns them
        slots = step.plan.slots.to(by.device)
        by.step.store_ranking(mine, slots, given if seed % 4 else None)
        done.append(DraftRanking(mine.ranks[:-1], mine.top_ids[:-1], mine.top_logprobs[:-1]))
    all_same(done[1], done[0], "ranking")


def committed(step: Step, seed: int) -> Rows:
    """Return the rows of a step that has been committed."""
    rows, logits = step.room(spare_of(seed))
    out = step.out(Guarded(CPU), rows, logits)
    TorchStep().layout(step.plan, step.columns, PAGE, out)
    choice, bad = choice_of(step, out.windows, seed)
    table = torch.zeros((step.size.entries, TOKENS + step.size.k + 1), dtype=torch.int64)
    picks = torch.zeros((2, logits), dtype=torch.int64)
    REF.step.commit(step.plan, out.windows, choice, bad, Outcome(table, *picks))
    return out.rows


@check
def shift_rows(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    """Shift the rows of a step, then plan the draft rows."""
    step = Step(seed, size)
    rows, k = committed(step, seed), size.k
    done: list[list[Any]] = []
    for by in (ref, ops):
        columns, plan, mine = (copied(x, by.device) for x in (step.columns, step.plan, rows))
        shifted, last = by.rounds.shift_rows(mine, columns, plan.slots)
        made = [shifted, PlanColumns(last, last, last, last)]
        for rounds, lag in ((0, 1), (1, 0), (k, 1), (max(1, k // 2), 0)):
            batch = DeviceBatch(columns, plan.slots, plan.budget)
            made.append(by.rounds.plan_draft_rows(batch, last, rounds, lag, PAGE))
        all_same(columns, step.columns, "columns")
        all_same(mine, rows, "rows")
        done.append(made)
    for got, want in zip(done[1], done[0], strict=True):
        all_same(got, want, type(want).__name__)


@check
def lm_head_sample(ops: Ops, seed: int, size: Size, ref: Any = REF) -> None:
    """Compare the tokens with those of norm, LM head and sampling op by op, and their probabilities too.

    The logits must equal those of `linear` on normed rows bit for bit.
    """
    step = Step(seed, size)
    windows = step.windows(spare_of(seed), ops.device)
    if seed % 6 in (2, 5):  # no entry has a budget, or one alone has
        one = windows.slot.max()
        windows.slot.fill_(-1)[-1] = one if seed % 6 == 2 else -1
    count, hidden, some = len(windows.slot), 128, seed % 2 == 1
    dtype = torch.float32 if seed % 5 == 4 else torch.bfloat16
    wide = max(1, size.vocab - 4) if some else size.vocab
    ids = torch.randperm(size.vocab, generator=step.random)[:wide] if some else None
    weight, norm, x = step.floats(wide, hidden) / 3, step.floats(hidden), step.floats(count + 3, hidden)
    weight[wide // 2] = weight[0]  # a tie
    at = step.ints(-1, count + 2, count) if seed % 3 else None
    x = x if at is not None else x[:count]
    x, weight, norm = (part.to(ops.device, dtype) for part in (x, weight, norm))
    packed = ops.forward.pack_linear(weight)
    ids, at = (None if part is None else part.to(ops.device) for part in (ids, at))
    tokens, rows, sure, logits = [], [], [], []
    if seed % 6 == 1:
        windows.columns.temperature.zero_()
    for call in (partial(TorchRounds.lm_head_sample, ops.rounds), ops.rounds.lm_head_sample):
        out = Guarded(ops.device)
        tokens.append(out(count))
        sure.append(torch.full((count,), -1.0, device=ops.device) if seed % 5 != 2 else None)
        given = x.clone(), at, norm, 1e-5, packed, ids, windows, seed % 4 == 3, tokens[-1], sure[-1]
        logits.append(torch.full((count, wide), -7.0, device=ops.device) if seed % 3 else None)
        rows.append(call(*given, logits[-1]))
        out.check()
    same(tokens[1], tokens[0], "drafts")
    real = windows.slot >= 0
    for stored in (part for part in logits if part is not None):
        used = ops.forward.linear(ops.forward.rms_norm(rows[0], norm, 1e-5), packed, torch.float32)
        same(stored[real], used[real], "logits")
    same(rows[1][real].float(), rows[0][real].float(), "rows")
    if sure[0] is not None and sure[1] is not None:
        assert torch.allclose(sure[1][real], sure[0][real], rtol=1e-4, atol=1e-6)
        assert bool((sure[0][real] > 0).all())
    if ops is not REF and seed == 0:
        lm_head_sample(REF, 1, size, ref)
