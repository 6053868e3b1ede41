"""Attention stage of the fused layers kernel, divided into spans of keys or into tiles of rows.

An item is a span if all spans fit on the chip at once: its keys are loaded before the barrier, and the last
span of a tile to finish merges them. Otherwise an item is a tile that loops over its spans. Where one request
has many more keys than the others, tiles are divided into pieces, and the last piece merges the spans. A list
of items is built at the start of a pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.attention import online_softmax
from draftproof.ops.triton.attention.kv_cache import kv_offset, load_keys, load_rows
from draftproof.ops.triton.attention.online_softmax import accumulate_values
from draftproof.ops.triton.fused.barrier import arrive, first_item, wait


@triton.jit
def tile_spans(
    slots, positions, R, GROUP: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return properties of the tile that starts at each row, [ROWS] int32 each.

    These are the number of spans (0: no tile starts there) and its running sum, the slot, the first and the
    last visible key of the tile, and the first key that this pass itself writes.
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
    num_spans = tl.where(starts, last // SPAN - first // SPAN + 1, 0)
    return num_spans, tl.cumsum(num_spans, axis=0), slot, first, last, new


@triton.jit
def column_at(column, row, ROWS: tl.constexpr):
    """Return one value of a column in registers."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == row, column, 0), axis=0)


@triton.jit
def load_kv_blocks(
    cache, plane, offset, ok, k_before, v_before,
    D: tl.constexpr, BD: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Load blocks of keys [BD, KEYS] and values [KEYS, BD] where ok; elsewhere keep the given blocks."""
    ks, vs = (), ()
    for b in tl.static_range(SPAN // KEYS):
        ks = ks + (load_keys(cache, offset[b], ok[b], k_before[b], D, BD, ".cg"),)
        vs = vs + (load_rows(cache + plane, offset[b], ok[b], v_before[b], D, BD, ".cg"),)
    return ks, vs


@triton.jit
def list_work_items(
    slots, positions, work_items, counter, max_parallel, R,
    GROUP: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, TILES: tl.constexpr,
    WAVE_COST: tl.constexpr, MERGE_COST: tl.constexpr, ROWS: tl.constexpr, GRID_SYNC: tl.constexpr,
):  # fmt: skip
    """Store the work items [1 + items, 8] int32; row 0: items of a KV head, spans of an item (0: one).

    Items are spans if TILES is False. Otherwise the estimated duration decides: `max_parallel` items run at
    once, a wave of spans takes as long as WAVE_COST spans of a tile, and merging pieces as long as MERGE_COST
    spans (0: no pieces). Built once per pass; the program of a row arrives when its items are stored.
    """
    program = tl.program_id(0)
    if program < R:
        tiles_by_row = tile_spans(slots, positions, R, GROUP, BM, WINDOW, SPAN, ROWS)
        num_spans, sums, slot, first, last, new = tiles_by_row
        each, piece, step = num_spans, 0, 1
        if TILES:
            waves = tl.cdiv(tl.max(sums, axis=0), max_parallel)
            tiles = tl.sum((num_spans > 0).to(tl.int32), axis=0)
            longest = tl.max(num_spans, axis=0)
            step, cost = longest, tl.cdiv(tiles, max_parallel) * longest
            if MERGE_COST:
                for shift in tl.static_range(1, 4):  # pieces of 2, 3, 4, 6, 8, 12 spans
                    for size in tl.static_range(2**shift, 2 ** (shift + 1), 2 ** (shift - 1)):
                        pieces = tl.sum((num_spans + size - 1) // size, axis=0)
                        piece_cost = tl.cdiv(pieces, max_parallel) * (size + MERGE_COST)
                        better = (size < longest) & (piece_cost < cost)
                        step, cost = tl.where(better, size, step), tl.where(better, piece_cost, cost)
            uses_tiles = (waves > 1) & (cost < waves * WAVE_COST)
            step = tl.where(uses_tiles, step, 1)
            piece = tl.where(uses_tiles, step, 0)
            each = (num_spans + step - 1) // step
            sums = tl.cumsum(each, axis=0)
        for row in range(program, R, tl.num_programs(0)):
            if row == 0:
                tl.store(work_items, tl.max(sums, axis=0))
                tl.store(work_items + 1, piece)
            count, item_first = column_at(num_spans, row, ROWS), column_at(first, row, ROWS)
            items = column_at(each, row, ROWS)
            entry = work_items + (1 + column_at(sums, row, ROWS) - items) * 8
            item_slot, item_last = column_at(slot, row, ROWS), column_at(last, row, ROWS)
            item_new = column_at(new, row, ROWS)
            for s in range(items):
                tl.store(entry + s * 8, row)
                tl.store(entry + s * 8 + 1, item_first // SPAN + s * step)
                tl.store(entry + s * 8 + 2, count)
                tl.store(entry + s * 8 + 3, item_slot)
                tl.store(entry + s * 8 + 4, item_first)
                tl.store(entry + s * 8 + 5, item_last)
                tl.store(entry + s * 8 + 6, item_new)
                tl.store(entry + s * 8 + 7, items)
            arrive(counter, GRID_SYNC)


@triton.jit
def load_item(work_items, at):
    """Load item `at`: first row of its tile, span, and spans, slot, first, last and new key of the tile."""
    entry = work_items + (1 + at) * 8
    row, s = tl.load(entry, cache_modifier=".cg"), tl.load(entry + 1, cache_modifier=".cg")
    count, slot = tl.load(entry + 2, cache_modifier=".cg"), tl.load(entry + 3, cache_modifier=".cg")
    first, last = tl.load(entry + 4, cache_modifier=".cg"), tl.load(entry + 5, cache_modifier=".cg")
    return row, s, count, slot, first, last, tl.load(entry + 6, cache_modifier=".cg")


@triton.jit
def attend_span(
    query, ks, vs, pos, start, scale,
    BD: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    ONES: tl.constexpr,
):  # fmt: skip
    """Return maximum [BM], sum [BM] and weighted values [BM, BD] of one span of loaded keys."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM, ONES), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    scores = ()
    for b in tl.static_range(SPAN // KEYS):
        key = start + b * KEYS + tl.arange(0, KEYS)
        scores = scores + (online_softmax.masked_scores(query, ks[b], key, pos, scale, WINDOW),)
    for b in tl.static_range(SPAN // KEYS):
        m, p, decay = online_softmax.softmax_step(scores[b], m)
        sums, acc = accumulate_values(p, vs[b], None, decay, sums, acc, query.dtype, KEYS, ONES)
    return m, tl.max(sums, axis=1), acc  # all columns of `sums` are equal


@triton.jit
def merge_if_last(
    parts, stats, tile_counters, tile, items, row_head, first_span, count, spans, ok, inside, out, q_offset,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Merge the spans of a tile if this is its last item to finish."""
    tl.debug_barrier()
    counter = tile_counters + tile
    num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if num_done == items - 1:
        tl.store(counter, 0)
        online_softmax.merge_stored_spans(
            parts, stats, row_head * spans, first_span, count, None, ok, inside, out + q_offset, BM, BD
        )


@triton.jit
def tile_rows(
    slots, positions, row, slot, head, R, HEADS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr
):
    """Return validity, positions and (row, head) index [BM] of the tile that starts at `row`."""
    HEIGHT: tl.constexpr = BM // GROUP
    i = tl.arange(0, BM)
    r = row + i // GROUP
    ok = (i < HEIGHT * GROUP) & (r < R) & (r // HEIGHT == row // HEIGHT)
    ok = ok & (tl.load(slots + r, mask=ok, other=-1) == slot)
    pos = tl.load(positions + r, mask=ok, other=-1).to(tl.int32)
    return ok, pos, r.to(tl.int64) * HEADS + head * GROUP + i % GROUP


@triton.jit
def attend_spans(
    q, slots, positions, page_table, cache, out, parts, stats, tile_counters, counter, goal,
    work_items, items, R, max_pages, plane, spans, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    GRID_SYNC: tl.constexpr,
):  # fmt: skip
    """Compute what `splitkv_attention_kernel` computes, one span per item.

    Keys and values of earlier passes are loaded before the barrier, those of this pass after it. So a slot
    may read a page that another slot fills only after the pass that fills it.
    """
    own_item = first_item(goal)
    for item in range(own_item, items, tl.num_programs(0)):
        head = item % NUM_KV
        row, s, count, slot, first, last, new = load_item(work_items, item // NUM_KV)
        offset, exists_before, exists_now, zeros = (), (), (), ()
        for b in tl.static_range(SPAN // KEYS):
            key = s * SPAN + b * KEYS + tl.arange(0, KEYS)
            exists = (key >= first) & (key <= last)  # memory of other keys may hold NaN
            page = tl.load(page_table + slot * max_pages + key // PAGE, mask=exists, other=0)
            offset = offset + (kv_offset(cache, page, key, NUM_KV, D, PAGE) + head * D,)
            exists_before = exists_before + (exists & (key < new),)
            exists_now = exists_now + (exists & (key >= new),)
            zeros = zeros + (0.0,)
        ks, vs = load_kv_blocks(cache, plane, offset, exists_before, zeros, zeros, D, BD, KEYS, SPAN)
        ok, pos, row_head = tile_rows(slots, positions, row, slot, head, R, NUM_KV * GROUP, GROUP, BM)
        d = tl.arange(0, BD)
        inside = ok[:, None] & (d < D)[None, :]
        q_offset = row_head[:, None] * D + d[None, :]
        if item == own_item:
            wait(counter, goal, GRID_SYNC)
        ks, vs = load_kv_blocks(cache, plane, offset, exists_now, ks, vs, D, BD, KEYS, SPAN)
        query = tl.load(q + q_offset, mask=inside, other=0.0, cache_modifier=".cg")
        m, total, acc = attend_span(query, ks, vs, pos, s * SPAN, scale, BD, BM, WINDOW, KEYS, SPAN, ONES)
        if count == 1:
            online_softmax.store_normalised(m, total, acc, None, out + q_offset, inside)
        else:
            online_softmax.store_partial(parts, stats, row_head * spans + s, m, total, acc, ok, inside, BD)
            merge_if_last(
                parts, stats, tile_counters, row * NUM_KV + head, count, row_head, first // SPAN, count,
                spans, ok, inside, out, q_offset, BM, BD,
            )  # fmt: skip
        arrive(counter, GRID_SYNC)


@triton.jit
def attend_tiles(
    q, slots, positions, page_table, cache, out, parts, stats, tile_counters, counter, goal,
    work_items, items, R, max_pages, plane, spans, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    PIECES: tl.constexpr, GRID_SYNC: tl.constexpr,
):  # fmt: skip
    """Compute what `prefill_attention_kernel` computes; an item is a tile or a piece of its spans."""
    BLOCKS: tl.constexpr = SPAN // KEYS
    own_item = first_item(goal)
    for item in range(own_item, items, tl.num_programs(0)):
        head = item % NUM_KV
        row, s, count, slot, first, last, new = load_item(work_items, item // NUM_KV)
        pages = page_table + slot * max_pages
        ok, pos, row_head = tile_rows(slots, positions, row, slot, head, R, NUM_KV * GROUP, GROUP, BM)
        d = tl.arange(0, BD)
        inside = ok[:, None] & (d < D)[None, :]
        q_offset = row_head[:, None] * D + d[None, :]
        m = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        m1 = tl.full((BM,), float("-inf"), tl.float32)  # of the current span
        sums1 = tl.zeros((BM, ONES), tl.float32)
        acc1 = tl.zeros((BM, BD), tl.float32)
        if item == own_item:
            wait(counter, goal, GRID_SYNC)
        query = tl.load(q + q_offset, mask=inside, other=0.0, cache_modifier=".cg")
        # page ids are loaded one iteration early, so that the loads of keys do not wait for them
        key = s * SPAN + tl.arange(0, KEYS)
        page = tl.load(pages + key // PAGE, mask=key <= last, other=0)
        end = last // KEYS
        pieces = 1
        if PIECES:
            pieces = tl.load(work_items + (1 + item // NUM_KV) * 8 + 7, cache_modifier=".cg")
            size = tl.load(work_items + 1, cache_modifier=".cg")
            end = tl.minimum(end, (s + size) * BLOCKS - 1)
        for block in tl.range(s * BLOCKS, end + 1, num_stages=3):
            key = block * KEYS + tl.arange(0, KEYS)
            exists = (key >= first) & (key <= last)
            offset = kv_offset(cache, page, key, NUM_KV, D, PAGE) + head * D
            page = tl.load(pages + (key + KEYS) // PAGE, mask=key + KEYS <= last, other=0)
            k = load_keys(cache, offset, exists, 0.0, D, BD, ".cg")
            v = load_rows(cache + plane, offset, exists, 0.0, D, BD, ".cg")
            scores = online_softmax.masked_scores(query, k, key, pos, scale, WINDOW)
            m1, p, decay = online_softmax.softmax_step(scores, m1)
            sums1, acc1 = accumulate_values(p, v, None, decay, sums1, acc1, query.dtype, KEYS, ONES)
            if (block % BLOCKS == BLOCKS - 1) | (block == end):
                total1 = tl.max(sums1, axis=1)
                if PIECES:  # noqa: SIM102 - a constant, then a value on the device
                    if pieces > 1:
                        at = row_head * spans + block // BLOCKS
                        online_softmax.store_partial(parts, stats, at, m1, total1, acc1, ok, inside, BD)
                m, total, acc = online_softmax.merge_partials(m, total, acc, m1, total1, acc1)
                m1 = tl.full((BM,), float("-inf"), tl.float32)
        if pieces == 1:
            online_softmax.store_normalised(m, total, acc, None, out + q_offset, inside)
        if PIECES:  # noqa: SIM102 - likewise
            if pieces > 1:
                merge_if_last(
                    parts, stats, tile_counters, row * NUM_KV + head, pieces, row_head, first // SPAN, count,
                    spans, ok, inside, out, q_offset, BM, BD,
                )  # fmt: skip
        arrive(counter, GRID_SYNC)


@triton.jit
def attention_stage(
    q, slots, positions, page_table, cache, out, parts, stats, tile_counters, counter, goal,
    work_items, R, max_pages, plane, spans, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    TILES: tl.constexpr, PIECES: tl.constexpr, GRID_SYNC: tl.constexpr,
):  # fmt: skip
    """Attention of q [R, heads * D] -> out over the items of `list_work_items`. Return the new goal."""
    items = tl.load(work_items, cache_modifier=".cg") * NUM_KV
    if not TILES or tl.load(work_items + 1, cache_modifier=".cg") == 0:
        attend_spans(
            q, slots, positions, page_table, cache, out, parts, stats, tile_counters, counter, goal,
            work_items, items, R, max_pages, plane, spans, scale, NUM_KV, GROUP, D, BD, BM, PAGE, WINDOW,
            KEYS, SPAN, ONES, GRID_SYNC,
        )  # fmt: skip
    else:
        attend_tiles(
            q, slots, positions, page_table, cache, out, parts, stats, tile_counters, counter, goal,
            work_items, items, R, max_pages, plane, spans, scale, NUM_KV, GROUP, D, BD, BM, PAGE, WINDOW,
            KEYS, SPAN, ONES, PIECES, GRID_SYNC,
        )  # fmt: skip
    return goal + items
