"""The stages of `blocks`: matrix products and attention of few rows, cut into items for the programs.

A matrix product's item is a tile of columns. Its weights are loaded and laid into shared memory before the
program waits for the stage before; then the rows come in, in pieces of K. An item's columns are more than its
rows (32 to 16), so that the warps share out the columns and none does another's work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton_cuda import attention
from draftproof.ops.triton_cuda.barrier import arrive, turn, wait
from draftproof.ops.triton_cuda.elementwise import gated, row_scale, tree
from draftproof.ops.triton_cuda.pair import places, rotate_store


@triton.constexpr_function
def pieces(depth: int, largest: int) -> list[int]:
    """Powers of two that add up to `depth`, falling."""
    found = []
    while depth:
        found.append(min(largest, 1 << (depth.bit_length() - 1)))
        depth -= found[-1]
    return found


@triton.constexpr_function
def count_of(depth: int, largest: int) -> int:
    return len(pieces(depth, largest))


@triton.constexpr_function
def size_of(depth: int, largest: int, i: int) -> int:
    return pieces(depth, largest)[i]


@triton.constexpr_function
def start_of(depth: int, largest: int, i: int) -> int:
    return sum(pieces(depth, largest)[:i])


@triton.constexpr_function
def levels_above(count: int) -> int:
    return (count - 1).bit_length()


@triton.jit
def weights(w, rn, col_ok, first, DEPTH: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr):
    """The rows rn [BN] of a weight, columns first .. first + DEPTH, in pieces [size, BN]."""
    found = ()
    for i in tl.static_range(count_of(DEPTH, PIECE)):
        rk = first + start_of(DEPTH, PIECE, i) + tl.arange(0, size_of(DEPTH, PIECE, i))
        found = found + (tl.load(w + rn[None, :] * STRIDE + rk[:, None], mask=col_ok[None, :], other=0.0),)
    return found


@triton.jit
def inputs(x, rm, row_ok, first, DEPTH: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr):
    """The rows rm [BM] of x in pieces [BM, size]; written by other programs of this launch."""
    found = ()
    for i in tl.static_range(count_of(DEPTH, PIECE)):
        rk = first + start_of(DEPTH, PIECE, i) + tl.arange(0, size_of(DEPTH, PIECE, i))
        at = x + rm[:, None] * STRIDE + rk[None, :]
        found = found + (tl.load(at, mask=row_ok[:, None], other=0.0, cache_modifier=".cg"),)
    return found


@triton.jit
def norm_weights(weight, K: tl.constexpr, PIECE: tl.constexpr):
    found = ()
    for i in tl.static_range(count_of(K, PIECE)):
        at = weight + start_of(K, PIECE, i) + tl.arange(0, size_of(K, PIECE, i))
        found = found + (tl.load(at).to(tl.float32),)
    return found


@triton.jit
def scale_of(xs, eps, K: tl.constexpr, PIECE: tl.constexpr):
    """1 / rms of rows in pieces; as the tree over all of a row goes on above the pieces."""
    sums = ()
    for i in tl.static_range(count_of(K, PIECE)):
        wide = xs[i].to(tl.float32)
        sums = sums + (tree(wide * wide),)
    for _ in tl.static_range(levels_above(count_of(K, PIECE))):
        above = ()
        for i in tl.static_range(0, len(sums) - 1, 2):
            above = above + (sums[i] + sums[i + 1],)
        if len(sums) % 2 == 1:
            above = above + (sums[len(sums) - 1],)
        sums = above
    return row_scale(sums[0], eps, K)


@triton.jit
def normed_pair(
    x, weight, w, bias, rm, row_ok, first, columns, apart, eps, counter, goal, wait_now,
    K: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """The norm of rows rm times `BN // 2` columns from `first`, and times those `apart` further on.

    Both rounded, then fp32, [BM, BN // 2]. `columns`: how many there are; `bias`: where its address stands.
    Partners lie side by side in the product, so that a thread holds both.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BN) // 2
    col_ok = column < columns
    rn = first + tl.minimum(column, columns - 1) + (tl.arange(0, BN) % 2) * apart
    held = weights(w, rn, col_ok, 0, K, K, PIECE)
    gains = norm_weights(weight, K, PIECE)
    if HAS_BIAS:
        extra = tl.load(tl.load(bias).to(tl.pointer_type(tl.float32)) + rn, mask=col_ok, other=0.0)
    if wait_now:
        wait(counter, goal, ALL)
    xs = inputs(x, rm, row_ok, 0, K, K, PIECE)
    scale = scale_of(xs, eps, K, PIECE)[:, None]
    rows = ()
    for i in tl.static_range(count_of(K, PIECE)):
        unit = (xs[i].to(tl.float32) * scale).to(dtype).to(tl.float32)
        rows = rows + ((unit * gains[i][None, :]).to(dtype),)
    total = tl.zeros((BM, BN), tl.float32)
    for i in tl.static_range(count_of(K, PIECE)):
        total = tl.dot(rows[i], held[i], total)
    if HAS_BIAS:
        total += extra[None, :]
    low, high = tl.split(tl.reshape(total.to(dtype).to(tl.float32), (BM, BN // 2, 2)))
    return low, high


@triton.jit
def qkv_stage(
    x, weight, w, bias, q, cache, positions, slots, kv_index, rope, plane, eps, counter, goal, R,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """q of the norm of x [R, K], rotated, to q [R, NUM_Q * D]; k and v to the cache. Returns the new goal."""
    MIDDLE: tl.constexpr = D // 2
    HALF: tl.constexpr = BN // 2
    grid_m = tl.cdiv(R, BM)
    items = grid_m * ((NUM_Q + 2 * NUM_KV) * (MIDDLE // HALF))
    begin = turn(goal)
    for item in range(begin, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        head = item // grid_m // (MIDDLE // HALF)
        first = item // grid_m % (MIDDLE // HALF) * HALF
        j = first + tl.arange(0, HALF)
        cos, sin, place, live = places(rm, rm < R, j, positions, slots, kv_index, rope, D)
        low, high = normed_pair(
            x, weight, w, bias, rm, rm < R, head * D + first, HALF, MIDDLE, eps, counter, goal, item == begin,
            K, PIECE, BM, BN, HAS_BIAS, ALL,
        )  # fmt: skip
        rotate_store(low, high, cos, sin, place, live, rm, rm < R, head, j, cache, q, plane, NUM_Q, NUM_KV, D)
        arrive(counter, ALL)
    return goal + items


@triton.jit
def gate_stage(
    x, weight, w, bias, out, eps, counter, goal, R,
    INNER: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """out [R, INNER] = silu(gate) * up of the norm of x [R, K]. Returns the new goal."""
    HALF: tl.constexpr = BN // 2
    grid_m = tl.cdiv(R, BM)
    items = grid_m * tl.cdiv(INNER, HALF)
    begin = turn(goal)
    for item in range(begin, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        first = item // grid_m * HALF
        low, high = normed_pair(
            x, weight, w, bias, rm, rm < R, first, INNER - first, INNER, eps, counter, goal, item == begin,
            K, PIECE, BM, BN, HAS_BIAS, ALL,
        )  # fmt: skip
        rn = first + tl.arange(0, HALF)
        inside = (rm < R)[:, None] & (rn < INNER)[None, :]
        at = out + rm[:, None] * INNER + rn[None, :]
        tl.store(at, gated(low, high).to(out.dtype.element_ty), mask=inside)
        arrive(counter, ALL)
    return goal + items


@triton.jit
def add_linear(
    x, w, bias, residual, counter, goal, R, N,
    K: tl.constexpr, SPLIT: tl.constexpr, PANELS: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, HAS_BIAS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """residual [R, N] += x [R, K] times w [N, K], rounded twice as the two ops round. Returns the new goal.

    What is held of a weight at a time is one of PANELS parts of each span of K.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = K // SPLIT
    DEEP: tl.constexpr = SPAN // PANELS
    grid_m = tl.cdiv(R, BM)
    items = grid_m * tl.cdiv(N, BN)
    begin = turn(goal)
    for item in range(begin, items, tl.num_programs(0)):
        rm = (item % grid_m) * BM + tl.arange(0, BM)
        rn = (item // grid_m) * BN + tl.arange(0, BN)
        row_ok, col_ok = rm < R, rn < N
        if HAS_BIAS:
            extra = tl.load(tl.load(bias).to(tl.pointer_type(tl.float32)) + rn, mask=col_ok, other=0.0)
        total = tl.zeros((BM, BN), tl.float32)
        second = tl.zeros((BM, BN), tl.float32)
        inside = row_ok[:, None] & col_ok[None, :]
        at = residual + rm[:, None] * N + rn[None, :]
        before = tl.zeros((BM, BN), dtype)
        for panel in range(PANELS):
            held = weights(w, rn, col_ok, panel * DEEP, DEEP, K, PIECE)
            if SPLIT == 2:
                more = weights(w, rn, col_ok, SPAN + panel * DEEP, DEEP, K, PIECE)
            if (item == begin) & (panel == 0):
                wait(counter, goal, ALL)
            xs = inputs(x, rm, row_ok, panel * DEEP, DEEP, K, PIECE)
            if SPLIT == 2:
                ys = inputs(x, rm, row_ok, SPAN + panel * DEEP, DEEP, K, PIECE)
            before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
            for i in tl.static_range(count_of(DEEP, PIECE)):
                total = tl.dot(xs[i], held[i], total)
                if SPLIT == 2:
                    second = tl.dot(ys[i], more[i], second)
        if SPLIT == 2:
            total += second
        if HAS_BIAS:
            total += extra[None, :]
        tl.store(at, (total.to(dtype).to(tl.float32) + before.to(tl.float32)).to(dtype), mask=inside)
        arrive(counter, ALL)
    return goal + items


@triton.jit
def tiles_of_keys(
    slots, positions, R, GROUP: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What `attend` wants to know of the tile of rows that starts at a row, [ROWS] int32 each.

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
def find_item(tiles, at, SPAN: tl.constexpr, ROWS: tl.constexpr):
    """Item `at`: the row where its tile starts, its span, the tile's first span, and what the tile is."""
    earlier = tiles[1] <= at
    row = tl.sum(earlier.to(tl.int32), axis=0)
    part = at - tl.sum(tl.where(earlier, tiles[0], 0), axis=0)
    count, slot = at_row(tiles[0], row, ROWS), at_row(tiles[2], row, ROWS)
    first, last, new = at_row(tiles[3], row, ROWS), at_row(tiles[4], row, ROWS), at_row(tiles[5], row, ROWS)
    first_span = first // SPAN
    return row, first_span + part, first_span, count, slot, first, last, new


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
        scores = scores + (attention.score(query, ks[b], key, pos, scale, WINDOW),)
    for b in tl.static_range(SPAN // KEYS):
        m, p, decay = attention.weigh(scores[b], m, query.dtype)
        sums, acc = attention.gain(p, vs[b], decay, sums, acc, KEYS, ONES)
    return m, tl.max(sums, axis=1), acc  # all columns of `sums` are equal


@triton.jit
def fold_last(
    m, total, acc, parts, stats, arrived, tile, line, s, first_span, count, spans, ok, inside, out, here, d,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A tile of one span is done. Of several, each is stored, and who comes last folds them."""
    if count == 1:
        attention._finish(total, acc, out + here, inside)
    else:
        where = line * spans + s
        tl.store(parts + where[:, None] * BD + d[None, :], acc, mask=inside)
        tl.store(stats + where * 2, m, mask=ok)
        tl.store(stats + where * 2 + 1, total, mask=ok)
        tl.debug_barrier()
        counter = arrived + tile
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if done == count - 1:
            tl.store(counter, 0)
            attention._gather(parts, stats, line * spans, first_span, count, ok, inside, out + here, BM, BD)


@triton.jit
def attend(
    q, slots, positions, page_table, cache, out, parts, stats, arrived, counter, goal,
    tiles, R, max_pages, plane, spans, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    ROWS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """As `attention_kernel` with spans side by side; `tiles` as `tiles_of_keys` gives them.

    Keys and values of earlier passes are loaded before the wait, those of this pass after it. So a slot may
    read a page that another one fills only after the pass that fills it.
    """
    HEIGHT: tl.constexpr = BM // GROUP
    HEADS: tl.constexpr = NUM_KV * GROUP
    items = tl.max(tiles[1], axis=0) * NUM_KV
    begin = turn(goal)
    for item in range(begin, items, tl.num_programs(0)):
        head = item % NUM_KV
        row, s, first_span, count, slot, first, last, new = find_item(tiles, item // NUM_KV, SPAN, ROWS)
        place, old, now, nothing = (), (), (), ()
        for b in tl.static_range(SPAN // KEYS):
            key = s * SPAN + b * KEYS + tl.arange(0, KEYS)
            exists = (key >= first) & (key <= last)  # other places may hold anything, NaN too
            page = tl.load(page_table + slot * max_pages + key // PAGE, mask=exists, other=0).to(tl.int64)
            place = place + ((page * PAGE + key % PAGE) * (NUM_KV * D) + head * D,)
            old, now = old + (exists & (key < new),), now + (exists & (key >= new),)
            nothing = nothing + (0.0,)
        ks, vs = keys_and_values(cache, plane, place, old, nothing, nothing, D, BD, KEYS, SPAN)
        i = tl.arange(0, BM)
        r = row + i // GROUP
        ok = (i < HEIGHT * GROUP) & (r < R) & (r // HEIGHT == row // HEIGHT)
        ok = ok & (tl.load(slots + r, mask=ok, other=-1) == slot)
        pos = tl.load(positions + r, mask=ok, other=-1).to(tl.int32)
        d = tl.arange(0, BD)
        line = r.to(tl.int64) * HEADS + head * GROUP + i % GROUP  # [BM]: which (row, head)
        inside = ok[:, None] & (d < D)[None, :]
        here = line[:, None] * D + d[None, :]
        if item == begin:
            wait(counter, goal, ALL)
        ks, vs = keys_and_values(cache, plane, place, now, ks, vs, D, BD, KEYS, SPAN)
        query = tl.load(q + here, mask=inside, other=0.0, cache_modifier=".cg")
        m, total, acc = attend_span(query, ks, vs, pos, s * SPAN, scale, BD, BM, WINDOW, KEYS, SPAN, ONES)
        fold_last(
            m, total, acc, parts, stats, arrived, row * NUM_KV + head, line, s, first_span, count, spans, ok,
            inside, out, here, d, BM, BD,
        )  # fmt: skip
        arrive(counter, ALL)
    return goal + items
