"""Attention of one row: QK norms, rotation, KV write, blocks and spans of keys.

An item is a KV head, COLUMNS columns of its values, and one span, or all spans where they are few. Numerics
are those of `rope.py` and of `attention/online_softmax.py`; blocks without visible keys change nothing there
and are left out. Keys and values of earlier passes are copied into the ring; those of this pass are written
into it by the item that has the last span.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from draftproof.ops.triton.attention.kv_rings import finite, thread_barrier
from draftproof.ops.triton.one_row.ring import (
    BF16,
    CHUNK,
    COLUMN,
    MMA_COLUMNS,
    PRODUCT,
    WEIGHT,
    blocks_of,
    copy_stage,
    lines_of,
    release,
    wait_full,
)
from draftproof.ops.triton.one_row.spans import (
    BLOCK_LAYOUT,
    FEW_SPANS,
    HEAD_ROWS,
    KEYS,
    SPAN,
    merge_factors,
    replace_row,
)

COLUMNS = gl.constexpr(128)  # columns of a head in a stage, and of the values of an item
MERGED_COLUMNS = gl.constexpr(32)  # columns of a program in the merge


@gluon.constexpr_function
def heads_layout(dim):
    """Return the layout of half heads [16, dim // 2] in `rope.py`, which is the tree of their norms."""
    return gl.BlockedLayout([1, 8], [512 // dim, dim // 16], [4, 1], [1, 0])


@gluon.jit
def visible_keys(position, window):
    """Return the first key that is visible at `position`, the first span, and the number of spans."""
    first_key = gl.where(window > 0, gl.maximum(position - window + 1, 0), 0)
    first_span = first_key // SPAN
    return first_key, first_span, position // SPAN - first_span + 1


@gluon.jit
def item_blocks(item, position, window, NUM_KV: gl.constexpr, PARTS: gl.constexpr):
    """Return the KV head of an item, its part of the values, its first block and the one after its last."""
    first_key, first_span, num_spans = visible_keys(position, window)
    length = gl.where(num_spans <= FEW_SPANS, num_spans, 1)
    span = first_span + item // (NUM_KV * PARTS) * length
    begin = gl.maximum(span * (SPAN // KEYS), first_key // KEYS)
    end = gl.minimum((span + length) * (SPAN // KEYS), position // KEYS + 1)
    return item % NUM_KV, item // NUM_KV % PARTS, begin, end


@gluon.jit
def num_items(position, window, NUM_KV: gl.constexpr, PARTS: gl.constexpr):
    """Return the number of items."""
    num_spans = visible_keys(position, window)[2]
    return gl.where(num_spans <= FEW_SPANS, 1, num_spans) * (NUM_KV * PARTS)


@gluon.jit
def copy_keys_values(
    cache, plane, pages, position, window, ring, full, empty, index,
    NUM_KV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys before `position` of the items of this program, and their values; return the index."""
    PARTS: gl.constexpr = D // COLUMNS
    blocks = blocks_of(ring, STAGES, KEYS, COLUMNS)
    key_in_block = gl.arange(0, KEYS, layout=gl.SliceLayout(1, BLOCK_LAYOUT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, BLOCK_LAYOUT))
    first_key = visible_keys(position, window)[0]
    for item in range(gl.program_id(0), num_items(position, window, NUM_KV, PARTS), gl.num_programs(0)):
        kv_head, part, begin, end = item_blocks(item, position, window, NUM_KV, PARTS)
        for block in range(begin, end):
            key = block * KEYS + key_in_block
            visible = (key >= first_key) & (key < position)
            page = gl.load(pages + key // PAGE, mask=visible, other=0).to(gl.int64)
            offset = (page * PAGE + key % PAGE) * (NUM_KV * D) + kv_head * D
            exists = visible[:, None] & (column >= 0)[None, :]
            for kind in range(PARTS + 1):  # keys, then values
                is_value = kind == PARTS
                first = gl.where(is_value, part, kind) * COLUMNS + gl.where(is_value, plane, 0)
                pointers = cache + (offset + first)[:, None] + column[None, :]
                index = copy_stage(blocks, full, empty, index, pointers, exists, STAGES)
    return index


@gluon.jit
def load_head_inputs(
    q_norm, k_norm, rope, position, D: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr
):
    """Load cos and sin [D // 2], then both halves of the norm weights of q and of k, where they exist."""
    j = gl.arange(0, D // 2, layout=gl.SliceLayout(0, heads_layout(D)))
    angle = rope + position * D + j
    cos, sin = gl.load(angle), gl.load(angle + D // 2)
    q1 = gl.load(q_norm + j) if Q_NORM else j
    q2 = gl.load(q_norm + D // 2 + j) if Q_NORM else j
    k1 = gl.load(k_norm + j) if K_NORM else j
    k2 = gl.load(k_norm + D // 2 + j) if K_NORM else j
    return cos, sin, q1, q2, k1, k2


@gluon.jit
def rotated_heads(
    qkv, inputs, kv_head, eps,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr,
):  # fmt: skip
    """Return both halves [16, D // 2] of the queries of a KV head, then of its key and of its value.

    inputs: see `load_head_inputs`.
    """
    layout: gl.constexpr = heads_layout(D)
    MIDDLE: gl.constexpr = D // 2
    i = gl.arange(0, HEAD_ROWS, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, MIDDLE, layout=gl.SliceLayout(0, layout))
    own = gl.where(i == GROUP, kv_head, NUM_KV + kv_head)
    head = gl.where(i < GROUP, kv_head * GROUP + i, NUM_KV * GROUP + own)
    valid = (i < GROUP + 2)[:, None] & (j < MIDDLE)[None, :]
    source = qkv + head[:, None] * D + j[None, :]
    first = gl.load(source, mask=valid, other=0.0, cache_modifier=".cg").to(gl.float32)
    second = gl.load(source + MIDDLE, mask=valid, other=0.0, cache_modifier=".cg").to(gl.float32)
    cos, sin = inputs[0][None, :], inputs[1][None, :]
    x, y = first, second
    is_q, is_v = (i < GROUP)[:, None], (i > GROUP)[:, None]
    if Q_NORM or K_NORM:
        scale = gl.rsqrt(gl.sum(x * x + y * y, axis=1) / D + eps)[:, None]
        x_unit, y_unit = (x * scale).to(BF16).to(gl.float32), (y * scale).to(BF16).to(gl.float32)
        if Q_NORM:
            w1, w2 = inputs[2].to(gl.float32)[None, :], inputs[3].to(gl.float32)[None, :]
            x = gl.where(is_q, (x_unit * w1).to(BF16).to(gl.float32), x)
            y = gl.where(is_q, (y_unit * w2).to(BF16).to(gl.float32), y)
        if K_NORM:
            w3, w4 = inputs[4].to(gl.float32)[None, :], inputs[5].to(gl.float32)[None, :]
            x = gl.where(is_q, x, (x_unit * w3).to(BF16).to(gl.float32))
            y = gl.where(is_q, y, (y_unit * w4).to(BF16).to(gl.float32))
    low = gl.where(is_v, first, x * cos - y * sin).to(BF16)
    high = gl.where(is_v, second, y * cos + x * sin).to(BF16)
    return low, high


@gluon.jit
def store_key_value(
    cache, plane, kv_index, stores, kv_head, low, high,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store the key and the value of a KV head to the cache if `stores`."""
    i = gl.arange(0, HEAD_ROWS, layout=gl.SliceLayout(1, heads_layout(D)))
    j = gl.arange(0, D // 2, layout=gl.SliceLayout(0, heads_layout(D)))
    token = cache + kv_index * (NUM_KV * D) + kv_head * D
    target = token + gl.where(i > GROUP, plane, 0)[:, None] + j[None, :]
    stored = ((i == GROUP) | (i == GROUP + 1)) & stores
    stored = gl.broadcast(stored[:, None], low)[0]
    gl.store(target, low, mask=stored)
    gl.store(target + D // 2, high, mask=stored)


@gluon.jit
def attend_block(
    queries, blocks, index, block, first_key, position, scale, m, sums, values,
    PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add a block of keys to the maximum [8], sums [16, 8] and weighted values [COLUMNS, 8] of a span."""
    scores = gl.zeros([KEYS, MMA_COLUMNS], gl.float32, PRODUCT)
    for part in gl.static_range(PARTS):
        q = queries.index(part).slice(0, MMA_COLUMNS, dim=0).permute((1, 0)).load(COLUMN)
        scores = mma_v2(blocks.index((index + part) % STAGES).load(WEIGHT), q, scores)
    key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, PRODUCT))
    visible = (key <= position) & (key >= first_key)
    scores = gl.where(visible[:, None], scores * scale, float("-inf"))
    top = gl.maximum(m, gl.max(scores, axis=0))
    base = finite(top)
    weights = gl.convert_layout(gl.exp2(scores - base[None, :]).to(BF16), COLUMN)
    decay = gl.exp2(m - base)[None, :]
    sums = mma_v2(gl.full([16, KEYS], 1.0, BF16, WEIGHT), weights, sums * decay)
    block_values = blocks.index((index + PARTS) % STAGES).permute((1, 0)).load(WEIGHT)
    return top, sums, mma_v2(block_values, weights, values * decay)


@gluon.jit
def attend_blocks(
    queries, heads, ring, full, empty, index, begin, end, part, position, window, scale,
    GROUP: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return maximum [8], sum [8] and values [COLUMNS, 8] of the blocks of an item, and the next index.

    heads: lines [16 * D // CHUNK, CHUNK] with the key and the value of this pass.
    """
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    blocks = blocks_of(ring, STAGES, KEYS, COLUMNS)
    first_key = visible_keys(position, window)[0]
    lowest = gl.full([MMA_COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, PRODUCT))
    no_sums = gl.zeros([16, MMA_COLUMNS], gl.float32, PRODUCT)
    no_values = gl.zeros([COLUMNS, MMA_COLUMNS], gl.float32, PRODUCT)
    m, total, acc = lowest, gl.zeros([MMA_COLUMNS], gl.float32, gl.SliceLayout(0, PRODUCT)), no_values
    m1, sums, values = lowest, no_sums, no_values  # of the span
    for block in range(begin, end):
        for kind in range(PARTS + 1):
            wait_full(full, index + kind, STAGES)
        if block == position // KEYS:
            for kind in range(PARTS + 1):
                line = gl.where(kind == PARTS, (GROUP + 1) * PARTS + part, GROUP * PARTS + kind) * CHUNKS
                replace_row(ring, (index + kind) % STAGES, position % KEYS, heads, line, COLUMNS)
            thread_barrier()
        m1, sums, values = attend_block(
            queries, blocks, index, block, first_key, position, scale, m1, sums, values, PARTS, STAGES
        )
        release(empty, index, PARTS + 1, STAGES)
        index += PARTS + 1
        if (block + 1) % (SPAN // KEYS) == 0 or block + 1 == end:
            m, a, b = merge_factors(m, m1)
            total = total * a + gl.max(sums, axis=0) * b  # all rows of `sums` are equal
            acc = acc * a[None, :] + values * b[None, :]
            m1, sums, values = lowest, no_sums, no_values
    return m, total, acc, index


@gluon.jit
def attend_items(
    qkv, inputs, cache, out, parts, stats, position, window, kv_index, is_real, plane, spans, scale, eps,
    ring, lines, full, empty, index,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the items of this program; return the next index of the ring.

    Results go to out [heads, D] where one item has all spans of a head, otherwise to parts and stats, see
    `online_softmax.store_partial`. Lines have the heads, then the queries.
    """
    PARTS: gl.constexpr = D // COLUMNS
    SIZE: gl.constexpr = HEAD_ROWS * D
    flat = lines_of(lines, 2 * SIZE, SIZE)
    queries = flat.index(1)._reinterpret(
        BF16, [HEAD_ROWS, D], gl.NVMMASharedLayout.get_default_for([HEAD_ROWS, D], BF16)
    )
    query_parts = queries._reinterpret(
        BF16, [PARTS, HEAD_ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([HEAD_ROWS, COLUMNS], BF16)
    )
    heads = lines_of(lines, SIZE, CHUNK)
    first_key, first_span, num_spans = visible_keys(position, window)
    for item in range(gl.program_id(0), num_items(position, window, NUM_KV, PARTS), gl.num_programs(0)):
        kv_head, part, begin, end = item_blocks(item, position, window, NUM_KV, PARTS)
        low, high = rotated_heads(qkv, inputs, kv_head, eps, NUM_KV, GROUP, D, Q_NORM, K_NORM)
        rows = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [HEAD_ROWS, D])
        thread_barrier()
        queries.store(rows)
        flat.index(0).store(gl.reshape(rows, [SIZE]))
        thread_barrier()
        stores = is_real & (part == 0) & (end == position // KEYS + 1)
        store_key_value(cache, plane, kv_index, stores, kv_head, low, high, NUM_KV, GROUP, D)
        m, total, acc, index = attend_blocks(
            query_parts, heads, ring, full, empty, index, begin, end, part, position, window, scale,
            GROUP, PARTS, STAGES,
        )  # fmt: skip
        g = gl.arange(0, MMA_COLUMNS, layout=gl.SliceLayout(0, PRODUCT))
        column = part * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, PRODUCT))
        row_head = kv_head * GROUP + g
        inside = gl.broadcast((g < GROUP)[None, :], acc)[0]
        if num_spans <= FEW_SPANS:
            normalised = (acc / total[None, :] + 0.0).to(BF16)
            gl.store(out + row_head[None, :] * D + column[:, None], normalised, mask=inside)
        else:
            at = row_head * spans + begin // (SPAN // KEYS) - first_span
            gl.store(parts + at[None, :] * D + column[:, None], acc, mask=inside)
            gl.store(stats + at * 2, m, mask=g < GROUP)
            gl.store(stats + at * 2 + 1, total, mask=g < GROUP)
    return index
