"""Paged attention: prefill chunks, verify rows and decode rows, with one order of sums.

A program takes a tile of adjacent rows of one slot times the query heads that share a KV head. The order of
a row's sum is a function of its position: keys in blocks of KEYS, blocks in spans of SPAN tokens, spans
folded in ascending order. A key that a row may not see contributes exact zeros, so rows of one tile do
not feel each other. Row sums run on the tensor core (p times 1), in the order of p times V. Compiled without
contraction of multiply and add, so that folding inside a kernel's loop and folding partial results
give the same bits.

Here is the kernel for few tiles: the spans of one run side by side, and the last program of a tile to
arrive folds them. Tiles are found on the device: a program starts a tile if its row is the first of its slot
or a multiple of the tile's height, and ends at once otherwise. So the grid depends on the number of rows
alone, and a graph holds it. Where there are many tiles, `walk` does them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.runtime import launch_options, next_power_of_two, prefetch_l2

KEYS = 64  # keys of one block: part of the numerics
SPAN = 128  # tokens of one span: part of the numerics
PROGRAMS = 800  # about six for each SM of an H200: below that, spans run side by side
MOST_SCRATCH = 256 << 20  # bytes of partial results; where they would be more, `walk` serves
LOG2_E = 1.4426950408889634
ONES = 16  # columns of the matrix of ones: the narrowest the tensor core takes

# Largest number of rows -> (tile height in rows times heads, warps, stages); speed alone. Two blocks of keys
# are in flight with three stages, because a span holds two.
TILES = ((8, (16, 4, 3)), (1 << 30, (16, 2, 3)))


@triton.jit
def _fold(m, total, acc, m_new, total_new, acc_new):
    """Two partial results of the same rows, the earlier span first."""
    top = tl.maximum(m, m_new)
    base = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp2(m - base), tl.exp2(m_new - base)
    return top, total * a + total_new * b, acc * a[:, None] + acc_new * b[:, None]


@triton.jit
def score(q, k, key, pos, scale, WINDOW: tl.constexpr):
    """Keys k [BD, KEYS] at positions `key`: scores [BM, KEYS], -inf where a row may not look."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    seen = key[None, :] <= pos[:, None]
    if WINDOW:
        seen = seen & (key[None, :] > pos[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def weigh(scores, m, dtype: tl.constexpr):
    """The new maximum [BM], weights [BM, KEYS], and the decay of what was."""
    top = tl.maximum(m, tl.max(scores, axis=1))
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(scores - base[:, None]).to(dtype), tl.exp2(m - base)[:, None]


@triton.jit
def gain(p, v, decay, sums, acc, KEYS: tl.constexpr, ONES: tl.constexpr):
    """The weights' sum [BM, ONES] and the weighted values [BM, BD] with v [KEYS, BD] added."""
    ones = tl.full((KEYS, ONES), 1.0, tl.float32).to(p.dtype)
    sums = tl.dot(p, ones, sums * decay, input_precision="ieee")
    return sums, tl.dot(p, v, acc * decay, input_precision="ieee")


@triton.jit
def _block(
    q, pos, pages, cache_k, cache_v, first, last, at, scale, m, sums, acc,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """The keys at..at + KEYS go into maximum [BM], sum [BM, ONES], weighted values [BM, BD] of their span."""
    key = at + tl.arange(0, KEYS)
    page = tl.load(pages + key // PAGE, mask=(key >= first) & (key <= last), other=0)
    return paged_block(q, pos, page, cache_k, cache_v, first, last, at, scale, m, sums, acc, NUM_KV, D, BD,
                       PAGE, WINDOW, KEYS, ONES)  # fmt: skip


@triton.jit
def paged_block(
    q, pos, page, cache_k, cache_v, first, last, at, scale, m, sums, acc,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """`_block` of keys whose pages [KEYS] are known."""
    d = tl.arange(0, BD)
    key = at + tl.arange(0, KEYS)
    exists = (key >= first) & (key <= last)  # other places may hold anything, NaN too
    place = (page.to(tl.int64) * PAGE + key % PAGE) * (NUM_KV * D)
    k = tl.load(cache_k + place[None, :] + d[:, None], mask=exists[None, :] & (d < D)[:, None], other=0.0)
    top, p, decay = weigh(score(q, k, key, pos, scale, WINDOW), m, q.dtype)
    v = tl.load(cache_v + place[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)
    sums, acc = gain(p, v, decay, sums, acc, KEYS, ONES)
    return top, sums, acc


@triton.jit
def _span(
    q, pos, pages, cache_k, cache_v, first, last, start, scale,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """The keys of one span: maximum [BM], sum [BM], weighted values [BM, BD]. Keys first..last exist.

    A block without a key that exists changes nothing, so there are always SPAN // KEYS of them.
    """
    m = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM, ONES), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for block in tl.static_range(0, SPAN, KEYS):
        m, sums, acc = _block(q, pos, pages, cache_k, cache_v, first, last, start + block, scale, m, sums,
                              acc, NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES)  # fmt: skip
    return m, tl.max(sums, axis=1), acc  # all columns of `sums` are equal


@triton.jit
def _ask(
    slots, positions, page_table, cache, row, head, part, max_pages, plane,
    NUM_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Before the last kernel has ended: asks for the keys and values of span `part`; see `prefetch_l2`."""
    key = part * SPAN + tl.arange(0, SPAN)
    page = page_table + tl.maximum(tl.load(slots + row), 0) * max_pages + key // PAGE
    page = tl.load(page, mask=key <= tl.load(positions + row), other=0).to(tl.int64)
    place = (page * PAGE + key % PAGE) * (NUM_KV * D) + head * D
    for further in tl.static_range(0, D, 64):
        prefetch_l2(cache + place + further)
        prefetch_l2(cache + plane + place + further)


@triton.jit
def _finish(total, acc, out_at, ok):
    """Normalise, make -0 +0 (an added zero block would), round, store."""
    tl.store(out_at, (acc / total[:, None] + 0.0).to(out_at.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["R", "abreast"])  # one binary for every number of rows
def attention_kernel(
    q, slots, positions, page_table, cache, out, parts, stats, arrived,
    R, max_pages, plane, spans, abreast, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """q, out [R, heads * D]; parts [R * heads, spans, BD], stats [R * heads, spans, 2]."""
    HEIGHT: tl.constexpr = BM // GROUP
    HEADS: tl.constexpr = NUM_KV * GROUP
    row = R - 1 - tl.program_id(0)  # late rows see the most keys: they start first
    head, part = tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        _ask(slots, positions, page_table, cache, row, head, part, max_pages, plane, NUM_KV, D, PAGE, SPAN)
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row)
    before = tl.load(slots + tl.maximum(row - 1, 0))
    starts = (slot >= 0) & ((row % HEIGHT == 0) | (row == 0) | (before != slot))
    if starts:
        i = tl.arange(0, BM)
        r = row + i // GROUP
        ok = (i < HEIGHT * GROUP) & (r < R) & (r // HEIGHT == row // HEIGHT)
        ok = ok & (tl.load(slots + r, mask=ok, other=-1) == slot)
        pos = tl.load(positions + r, mask=ok, other=-1).to(tl.int32)
        last = tl.max(pos, axis=0)
        first = tl.min(tl.where(ok, pos, last), axis=0)
        first = tl.maximum(first - WINDOW + 1, 0) if WINDOW else first * 0
        d = tl.arange(0, BD)
        line = r.to(tl.int64) * HEADS + head * GROUP + i % GROUP  # [BM]: which (row, head)
        inside = ok[:, None] & (d < D)[None, :]
        here = line[:, None] * D + d[None, :]
        query = tl.load(q + here, mask=inside, other=0.0)
        pages = page_table + slot * max_pages
        cache_k = cache + head * D
        cache_v = cache_k + plane
        first_span = first // SPAN
        count = last // SPAN - first_span + 1
        step = tl.where(count == 1, 1, abreast)
        if part < count:
            for s in range(first_span + part, first_span + count, step):
                m, total, acc = _span(query, pos, pages, cache_k, cache_v, first, last, s * SPAN, scale,
                                      NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES)  # fmt: skip
                if count == 1:
                    _finish(total, acc, out + here, inside)
                else:
                    where = line * spans + s
                    tl.store(parts + where[:, None] * BD + d[None, :], acc, mask=inside)
                    tl.store(stats + where * 2, m, mask=ok)
                    tl.store(stats + where * 2 + 1, total, mask=ok)
            if count > 1:
                tl.debug_barrier()
                counter = arrived + row * NUM_KV + head
                done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if done == tl.minimum(count, abreast) - 1:
                    tl.store(counter, 0)
                    _gather(parts, stats, line * spans, first_span, count, ok, inside, out + here, BM, BD)


@triton.jit
def _part(parts, stats, at, d, ok, inside, BD: tl.constexpr):
    """A stored span; an empty one where there is none."""
    m = tl.load(stats + at * 2, mask=ok, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + at * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
    here = parts + at[:, None] * BD + d[None, :]
    acc = tl.load(here, mask=inside & ok[:, None], other=0.0, cache_modifier=".cg")
    return m, total, acc


@triton.jit
def _gather(parts, stats, base, first_span, count, ok, inside, out_at, BM: tl.constexpr, BD: tl.constexpr):
    """Fold the stored spans in ascending order, as one program would have; then finish."""
    d = tl.arange(0, BD)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    end = first_span + count
    for s in range(first_span, end, 4):  # four at a time: their loads overlap
        m1, total1, acc1 = _part(parts, stats, base + s, d, ok, inside, BD)
        m2, total2, acc2 = _part(parts, stats, base + s + 1, d, ok & (s + 1 < end), inside, BD)
        m3, total3, acc3 = _part(parts, stats, base + s + 2, d, ok & (s + 2 < end), inside, BD)
        m4, total4, acc4 = _part(parts, stats, base + s + 3, d, ok & (s + 3 < end), inside, BD)
        m, total, acc = _fold(m, total, acc, m1, total1, acc1)
        m, total, acc = _fold(m, total, acc, m2, total2, acc2)
        m, total, acc = _fold(m, total, acc, m3, total3, acc3)
        m, total, acc = _fold(m, total, acc, m4, total4, acc4)
    _finish(total, acc, out_at, inside)


class Partials:
    """Scratch of spans that run side by side: their results, and how many programs of a tile have arrived."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: list[Tensor] = []  # captured graphs may still point at scratch that was outgrown
        self.parts = torch.empty(1, dtype=torch.float32, device=device)
        self.stats = torch.empty(1, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)

    def reserve(self, lines: int, width: int, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.parts.numel() < lines * width or self.stats.numel() < lines * 2:
            self._held += [self.parts, self.stats]
            self.parts = torch.empty(lines * width, dtype=torch.float32, device=self.device)
            self.stats = torch.empty(lines * 2, dtype=torch.float32, device=self.device)
        if self.arrived.numel() < tiles:
            self._held.append(self.arrived)
            self.arrived = torch.zeros(tiles, dtype=torch.int32, device=self.device)
        return self.parts, self.stats, self.arrived


def scratch_fits(num_rows: int, heads: AttentionShape, spans: int) -> bool:
    return num_rows * heads.num_q * spans * max(16, next_power_of_two(heads.dim)) * 4 <= MOST_SCRATCH


class Attention:
    """Launches the kernel."""

    def __init__(self, partials: Partials) -> None:
        self._partials = partials

    def abreast(self, num_rows: int, heads: AttentionShape, table: Tensor, page_size: int) -> int:
        """How many spans run side by side; with 1 this kernel has nothing to offer."""
        spans = triton.cdiv(table.shape[1] * page_size, SPAN)
        if not scratch_fits(num_rows, heads, spans):
            return 1
        return max(1, min(spans, PROGRAMS // (num_rows * heads.num_kv)))

    def __call__(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, pdl: bool
    ) -> None:
        num_rows, max_pages, page_size = len(q), rows.page_table.shape[1], cache.shape[2]
        group, width = heads.num_q // heads.num_kv, max(16, next_power_of_two(heads.dim))
        spans = triton.cdiv(max_pages * page_size, SPAN)
        abreast = self.abreast(num_rows, heads, rows.page_table, page_size)
        scratch = self._partials.reserve(num_rows * heads.num_q * spans, width, num_rows * heads.num_kv)
        height, warps, stages = next(tile for limit, tile in TILES if num_rows <= limit)
        if width > 128 or cache.dtype == torch.float32:
            stages = 2
        attention_kernel[(num_rows, heads.num_kv, abreast)](
            q, rows.slots, rows.positions, rows.page_table, cache, out, *scratch,
            num_rows, max_pages, cache.stride(0), spans, abreast, heads.scale * LOG2_E,
            NUM_KV=heads.num_kv, GROUP=group, D=heads.dim, BD=width, BM=max(height, next_power_of_two(group)),
            PAGE=page_size, WINDOW=heads.window, KEYS=KEYS, SPAN=SPAN, ONES=ONES,
            **launch_options(pdl, num_warps=warps, num_stages=stages, enable_fp_fusion=False),
        )  # fmt: skip
