"""The stage of `blocks` that is attention, cut into spans of keys, or into tiles of rows if spans are many.

A span's keys are loaded before the wait, and the last of a tile's spans to be done folds them all; a tile
walks through its spans, the next keys on their way. Where one request has many more keys than the others, and
all would wait for its tile, tiles are walked through in pieces, and who comes last folds their spans. A
list, made at the start of a pass, says which items there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.attention import splitkv
from draftproof.ops.triton.fused.barrier import arrive, turn, wait


@triton.jit
def tiles_of_keys(
    slots, positions, R, GROUP: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The tile of rows that starts at a row, [ROWS] int32 each.

    How many spans it has (none: no tile starts there) and their running sum; its slot; the first key that
    it sees, the last one, and the first that this pass itself writes.
    """
    HEIGHT: tl.constexpr = BM // GROUP
    r = tl.arange(0, ROWS)
    slot = tl.load(slots + r, mask=r < R, other=-1).to(tl.int32)
    before = tl.load(slots + tl.maximum(r - 1, 0), mask=r < R, other=-1).to(tl.int32)
    starts = (slot >= 0) & ((r % HEIGHT == 0) | (before != slot))
    pos = tl.load(positions + r, mask=r < R, other=0).to(tl.int32)
    same = slot[:, None] == slot[None, :]
    within = same & ((r // HEIGHT)[:, None] == (r // HEIGHT)[None, :])
    last = tl.max(tl.where(within, pos[None, :], -1), axis=1)
    new = tl.min(tl.where(same, pos[None, :], 2147483647), axis=1)
    first = tl.maximum(pos - WINDOW + 1, 0) if WINDOW else pos * 0
    many = tl.where(starts, last // SPAN - first // SPAN + 1, 0)
    return many, tl.cumsum(many, axis=0), slot, first, last, new


@triton.jit
def at_row(column, row, ROWS: tl.constexpr):
    """One value of a column that lies in registers."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == row, column, 0), axis=0)


@triton.jit
def keys_and_values(
    cache, plane, place, ok, k_before, v_before,
    D: tl.constexpr, BD: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Blocks of keys [BD, KEYS] and values [KEYS, BD] where ok, else what was there before."""
    d = tl.arange(0, BD)
    ks, vs = (), ()
    for b in tl.static_range(SPAN // KEYS):
        k_ok, v_ok = ok[b][None, :] & (d < D)[:, None], ok[b][:, None] & (d < D)[None, :]
        k_at, v_at = cache + place[b][None, :] + d[:, None], cache + plane + place[b][:, None] + d[None, :]
        ks = ks + (tl.load(k_at, mask=k_ok, other=k_before[b], cache_modifier=".cg"),)
        vs = vs + (tl.load(v_at, mask=v_ok, other=v_before[b], cache_modifier=".cg"),)
    return ks, vs


@triton.jit
def list_items(
    slots, positions, listed, counter, room, R, GROUP: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr,
    SPAN: tl.constexpr, TILES: tl.constexpr, WAVE: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """listed [1 + items, 8] int32: how many items a KV head has; 0, or how many spans of a tile an item walks
    through at most; then those items.

    They are spans if TILES is False. Else that depends on what takes longer: `room` of them run at once, and
    while a span is loaded, summed, stored and folded, a tile walks through WAVE of its own; while pieces of
    tiles are stored and folded, through FOLD (0: there are no pieces). Made once a pass; a row's program
    arrives when its entries are written.
    """
    begin = tl.program_id(0)
    if begin < R:
        many, sums, slot, first, last, new = tiles_of_keys(slots, positions, R, GROUP, BM, WINDOW, SPAN, ROWS)
        each, piece, step = many, 0, 1
        if TILES:
            waves = tl.cdiv(tl.max(sums, axis=0), room)
            tiles = tl.sum((many > 0).to(tl.int32), axis=0)
            longest = tl.max(many, axis=0)
            step, cost = longest, tl.cdiv(tiles, room) * longest
            if FOLD:
                for shift in tl.static_range(1, 4):  # pieces of 2, 3, 4, 6, 8, 12 spans
                    for size in tl.static_range(2**shift, 2 ** (shift + 1), 2 ** (shift - 1)):
                        pieces = tl.sum((many + size - 1) // size, axis=0)
                        would = tl.cdiv(pieces, room) * (size + FOLD)
                        better = (size < longest) & (would < cost)
                        step, cost = tl.where(better, size, step), tl.where(better, would, cost)
            walks = (waves > 1) & (cost < waves * WAVE)
            step = tl.where(walks, step, 1)
            piece = tl.where(walks, step, 0)
            each = (many + step - 1) // step
            sums = tl.cumsum(each, axis=0)
        for row in range(begin, R, tl.num_programs(0)):
            if row == 0:
                tl.store(listed, tl.max(sums, axis=0))
                tl.store(listed + 1, piece)
            count, low = at_row(many, row, ROWS), at_row(first, row, ROWS)
            items = at_row(each, row, ROWS)
            here = listed + (1 + at_row(sums, row, ROWS) - items) * 8
            of, high = at_row(slot, row, ROWS), at_row(last, row, ROWS)
            fresh = at_row(new, row, ROWS)
            for s in range(items):
                tl.store(here + s * 8, row)
                tl.store(here + s * 8 + 1, low // SPAN + s * step)
                tl.store(here + s * 8 + 2, count)
                tl.store(here + s * 8 + 3, of)
                tl.store(here + s * 8 + 4, low)
                tl.store(here + s * 8 + 5, high)
                tl.store(here + s * 8 + 6, fresh)
                tl.store(here + s * 8 + 7, items)
            arrive(counter, ALL)


@triton.jit
def find_item(listed, at):
    """Item `at`: the row where its tile starts, its span, and of the tile how many spans, slot, keys."""
    here = listed + (1 + at) * 8
    row, s = tl.load(here, cache_modifier=".cg"), tl.load(here + 1, cache_modifier=".cg")
    count, slot = tl.load(here + 2, cache_modifier=".cg"), tl.load(here + 3, cache_modifier=".cg")
    first, last = tl.load(here + 4, cache_modifier=".cg"), tl.load(here + 5, cache_modifier=".cg")
    return row, s, count, slot, first, last, tl.load(here + 6, cache_modifier=".cg")


@triton.jit
def attend_span(
    query, ks, vs, pos, start, scale,
    BD: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    ONES: tl.constexpr,
):  # fmt: skip
    """The keys of one span, which are here: maximum [BM], sum [BM], weighted values [BM, BD]."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM, ONES), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    scores = ()
    for b in tl.static_range(SPAN // KEYS):
        key = start + b * KEYS + tl.arange(0, KEYS)
        scores = scores + (splitkv.score(query, ks[b], key, pos, scale, WINDOW),)
    for b in tl.static_range(SPAN // KEYS):
        m, p, decay = splitkv.weigh(scores[b], m, query.dtype)
        sums, acc = splitkv.gain(p, vs[b], decay, sums, acc, KEYS, ONES)
    return m, tl.max(sums, axis=1), acc  # all columns of `sums` are equal


@triton.jit
def store_span(m, total, acc, parts, stats, line, s, spans, ok, inside, d, BD: tl.constexpr):
    """What one span of a tile gives, for whoever folds them."""
    where = line * spans + s
    tl.store(parts + where[:, None] * BD + d[None, :], acc, mask=inside)
    tl.store(stats + where * 2, m, mask=ok)
    tl.store(stats + where * 2 + 1, total, mask=ok)


@triton.jit
def fold_last(
    parts, stats, arrived, tile, items, line, first_span, count, spans, ok, inside, out, here,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """An item of a tile has stored its spans; who comes last of them all folds the spans."""
    tl.debug_barrier()
    counter = arrived + tile
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == items - 1:
        tl.store(counter, 0)
        splitkv._gather(parts, stats, line * spans, first_span, count, ok, inside, out + here, BM, BD)


@triton.jit
def rows_of(slots, positions, row, slot, head, R, HEADS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr):
    """The tile that starts at `row`: which of its [BM] are rows, their positions, and their (row, head)."""
    HEIGHT: tl.constexpr = BM // GROUP
    i = tl.arange(0, BM)
    r = row + i // GROUP
    ok = (i < HEIGHT * GROUP) & (r < R) & (r // HEIGHT == row // HEIGHT)
    ok = ok & (tl.load(slots + r, mask=ok, other=-1) == slot)
    pos = tl.load(positions + r, mask=ok, other=-1).to(tl.int32)
    return ok, pos, r.to(tl.int64) * HEADS + head * GROUP + i % GROUP


@triton.jit
def attend_spans(
    q, slots, positions, page_table, cache, out, parts, stats, arrived, counter, goal,
    listed, items, R, max_pages, plane, spans, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """As `attention_kernel` with spans side by side.

    Keys and values of earlier passes are loaded before the wait, those of this pass after it. So a slot may
    read a page that another one fills only after the pass that fills it.
    """
    begin = turn(goal)
    for item in range(begin, items, tl.num_programs(0)):
        head = item % NUM_KV
        row, s, count, slot, first, last, new = find_item(listed, item // NUM_KV)
        place, old, now, nothing = (), (), (), ()
        for b in tl.static_range(SPAN // KEYS):
            key = s * SPAN + b * KEYS + tl.arange(0, KEYS)
            exists = (key >= first) & (key <= last)  # other places may hold anything, NaN too
            page = tl.load(page_table + slot * max_pages + key // PAGE, mask=exists, other=0).to(tl.int64)
            place = place + ((page * PAGE + key % PAGE) * (NUM_KV * D) + head * D,)
            old, now = old + (exists & (key < new),), now + (exists & (key >= new),)
            nothing = nothing + (0.0,)
        ks, vs = keys_and_values(cache, plane, place, old, nothing, nothing, D, BD, KEYS, SPAN)
        ok, pos, line = rows_of(slots, positions, row, slot, head, R, NUM_KV * GROUP, GROUP, BM)
        d = tl.arange(0, BD)
        inside = ok[:, None] & (d < D)[None, :]
        here = line[:, None] * D + d[None, :]
        if item == begin:
            wait(counter, goal, ALL)
        ks, vs = keys_and_values(cache, plane, place, now, ks, vs, D, BD, KEYS, SPAN)
        query = tl.load(q + here, mask=inside, other=0.0, cache_modifier=".cg")
        m, total, acc = attend_span(query, ks, vs, pos, s * SPAN, scale, BD, BM, WINDOW, KEYS, SPAN, ONES)
        if count == 1:
            splitkv._finish(total, acc, out + here, inside)
        else:
            store_span(m, total, acc, parts, stats, line, s, spans, ok, inside, d, BD)
            fold_last(
                parts, stats, arrived, row * NUM_KV + head, count, line, first // SPAN, count, spans, ok,
                inside, out, here, BM, BD,
            )  # fmt: skip
        arrive(counter, ALL)


@triton.jit
def attend_tiles(
    q, slots, positions, page_table, cache, out, parts, stats, arrived, counter, goal,
    listed, items, R, max_pages, plane, spans, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    PIECES: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """As `walk_kernel`: an item walks through the spans of a tile, or through some of them."""
    BLOCKS: tl.constexpr = SPAN // KEYS
    begin = turn(goal)
    for item in range(begin, items, tl.num_programs(0)):
        head = item % NUM_KV
        row, s, count, slot, first, last, new = find_item(listed, item // NUM_KV)
        pages = page_table + slot * max_pages
        ok, pos, line = rows_of(slots, positions, row, slot, head, R, NUM_KV * GROUP, GROUP, BM)
        d = tl.arange(0, BD)
        inside = ok[:, None] & (d < D)[None, :]
        here = line[:, None] * D + d[None, :]
        m = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        m1 = tl.full((BM,), float("-inf"), tl.float32)  # of the span that is being summed
        sums1 = tl.zeros((BM, ONES), tl.float32)
        acc1 = tl.zeros((BM, BD), tl.float32)
        if item == begin:
            wait(counter, goal, ALL)
        query = tl.load(q + here, mask=inside, other=0.0, cache_modifier=".cg")
        # The pages of the next block are looked up a turn early: else its keys would wait for them.
        key = s * SPAN + tl.arange(0, KEYS)
        page = tl.load(pages + key // PAGE, mask=key <= last, other=0)
        end = last // KEYS
        pieces = 1
        if PIECES:
            pieces = tl.load(listed + (1 + item // NUM_KV) * 8 + 7, cache_modifier=".cg")
            size = tl.load(listed + 1, cache_modifier=".cg")
            end = tl.minimum(end, (s + size) * BLOCKS - 1)
        for block in tl.range(s * BLOCKS, end + 1, num_stages=3):
            key = block * KEYS + tl.arange(0, KEYS)
            exists = (key >= first) & (key <= last)
            place = (page.to(tl.int64) * PAGE + key % PAGE) * (NUM_KV * D) + head * D
            page = tl.load(pages + (key + KEYS) // PAGE, mask=key + KEYS <= last, other=0)
            k_ok, v_ok = exists[None, :] & (d < D)[:, None], exists[:, None] & (d < D)[None, :]
            k_at, v_at = cache + place[None, :] + d[:, None], cache + plane + place[:, None] + d[None, :]
            k = tl.load(k_at, mask=k_ok, other=0.0, cache_modifier=".cg")
            v = tl.load(v_at, mask=v_ok, other=0.0, cache_modifier=".cg")
            scores = splitkv.score(query, k, key, pos, scale, WINDOW)
            m1, p, decay = splitkv.weigh(scores, m1, query.dtype)
            sums1, acc1 = splitkv.gain(p, v, decay, sums1, acc1, KEYS, ONES)
            if (block % BLOCKS == BLOCKS - 1) | (block == end):
                total1 = tl.max(sums1, axis=1)
                if PIECES:  # noqa: SIM102 - a constant, then a value on the device
                    if pieces > 1:
                        at = block // BLOCKS
                        store_span(m1, total1, acc1, parts, stats, line, at, spans, ok, inside, d, BD)
                m, total, acc = splitkv._fold(m, total, acc, m1, total1, acc1)
                m1 = tl.full((BM,), float("-inf"), tl.float32)
        if pieces == 1:
            splitkv._finish(total, acc, out + here, inside)
        if PIECES:  # noqa: SIM102 - likewise
            if pieces > 1:
                fold_last(
                    parts, stats, arrived, row * NUM_KV + head, pieces, line, first // SPAN, count, spans,
                    ok, inside, out, here, BM, BD,
                )  # fmt: skip
        arrive(counter, ALL)


@triton.jit
def attend(
    q, slots, positions, page_table, cache, out, parts, stats, arrived, counter, goal,
    listed, R, max_pages, plane, spans, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    TILES: tl.constexpr, PIECES: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Attention of q [R, heads * D] to out; `listed` as `list_items` makes it. Returns the new goal."""
    items = tl.load(listed, cache_modifier=".cg") * NUM_KV
    if not TILES or tl.load(listed + 1, cache_modifier=".cg") == 0:
        attend_spans(
            q, slots, positions, page_table, cache, out, parts, stats, arrived, counter, goal, listed, items,
            R, max_pages, plane, spans, scale, NUM_KV, GROUP, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, ALL,
        )  # fmt: skip
    else:
        attend_tiles(
            q, slots, positions, page_table, cache, out, parts, stats, arrived, counter, goal, listed, items,
            R, max_pages, plane, spans, scale, NUM_KV, GROUP, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES,
            PIECES, ALL,
        )  # fmt: skip
    return goal + items
