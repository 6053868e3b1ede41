"""Attention of one row: QK norms, rotation, KV write and spans of keys.

An item is a KV head and one span, or all spans where they are few. Numerics are those of `rope.py` and of
`attention/online_softmax.py`. Keys and values of earlier passes are copied into the ring; those of this pass
are written into it by the item that has the last span.
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
    ROWS_LAYOUT,
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

BLOCKS = gl.constexpr(2)  # blocks of a span
SPAN_STAGES = gl.constexpr(4)  # stages of a span: each block of keys, followed by its values


@gluon.jit
def divide_spans(num_spans, NUM_KV: gl.constexpr):
    """Return the number of items of a row, and the number of spans of an item."""
    is_few = num_spans <= FEW_SPANS
    return gl.where(is_few, 1, num_spans) * NUM_KV, gl.where(is_few, num_spans, 1)


@gluon.jit
def copy_spans(
    cache, plane, pages, position, ring, full, empty, index,
    NUM_KV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys before `position` of the items of this program, and their values; return the index."""
    blocks = blocks_of(ring, STAGES, KEYS, D)
    num_spans = position // SPAN + 1
    num_items, length = divide_spans(num_spans, NUM_KV)
    key_in_block = gl.arange(0, KEYS, layout=gl.SliceLayout(1, BLOCK_LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, BLOCK_LAYOUT))
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        kv_head, first = item % NUM_KV, item // NUM_KV * length
        for block in range(first * BLOCKS, gl.minimum(first + length, num_spans) * BLOCKS):
            key = block * KEYS + key_in_block
            page = gl.load(pages + key // PAGE, mask=key < position, other=0)
            offset = (page.to(gl.int64) * PAGE + key % PAGE) * (NUM_KV * D)
            pointers = cache + kv_head * D + offset[:, None] + d[None, :]
            exists = (key < position)[:, None] & (d >= 0)[None, :]
            index = copy_stage(blocks, full, empty, index, pointers, exists, STAGES)
            index = copy_stage(blocks, full, empty, index, pointers + plane, exists, STAGES)
    return index


@gluon.jit
def load_head_norms(q_norm, k_norm, D: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr):
    """Load both halves [D // 2] of the norm weights of q, then of k; unused values without a norm."""
    j = gl.arange(0, D // 2, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    q1 = gl.load(q_norm + j) if Q_NORM else j
    q2 = gl.load(q_norm + D // 2 + j) if Q_NORM else j
    k1 = gl.load(k_norm + j) if K_NORM else j
    k2 = gl.load(k_norm + D // 2 + j) if K_NORM else j
    return q1, q2, k1, k2


@gluon.jit
def rotated_heads(
    qkv, rope, head_norms, position, kv_head, eps,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr,
):  # fmt: skip
    """Return both halves [16, D // 2] of the queries of a KV head, then of its key and of its value.

    The layout is that of `rope.py`, because the sum of a head's squares has the tree of the layout.
    """
    MIDDLE: gl.constexpr = D // 2
    i = gl.arange(0, HEAD_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    j = gl.arange(0, MIDDLE, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    own = gl.where(i == GROUP, kv_head, NUM_KV + kv_head)
    head = gl.where(i < GROUP, kv_head * GROUP + i, NUM_KV * GROUP + own)
    valid = (i < GROUP + 2)[:, None] & (j < MIDDLE)[None, :]
    angle = rope + position * D + j
    cos, sin = gl.load(angle)[None, :], gl.load(angle + MIDDLE)[None, :]
    source = qkv + head[:, None] * D + j[None, :]
    first = gl.load(source, mask=valid, other=0.0, cache_modifier=".cg").to(gl.float32)
    second = gl.load(source + MIDDLE, mask=valid, other=0.0, cache_modifier=".cg").to(gl.float32)
    x, y = first, second
    is_q, is_v = (i < GROUP)[:, None], (i > GROUP)[:, None]
    if Q_NORM or K_NORM:
        scale = gl.rsqrt(gl.sum(x * x + y * y, axis=1) / D + eps)[:, None]
        x_unit, y_unit = (x * scale).to(BF16).to(gl.float32), (y * scale).to(BF16).to(gl.float32)
        if Q_NORM:
            w1, w2 = head_norms[0].to(gl.float32)[None, :], head_norms[1].to(gl.float32)[None, :]
            x = gl.where(is_q, (x_unit * w1).to(BF16).to(gl.float32), x)
            y = gl.where(is_q, (y_unit * w2).to(BF16).to(gl.float32), y)
        if K_NORM:
            w3, w4 = head_norms[2].to(gl.float32)[None, :], head_norms[3].to(gl.float32)[None, :]
            x = gl.where(is_q, x, (x_unit * w3).to(BF16).to(gl.float32))
            y = gl.where(is_q, y, (y_unit * w4).to(BF16).to(gl.float32))
    low = gl.where(is_v, first, x * cos - y * sin).to(BF16)
    high = gl.where(is_v, second, y * cos + x * sin).to(BF16)
    return low, high


@gluon.jit
def store_key_value(
    cache, plane, kv_index, slot, kv_head, low, high,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store the key and the value of a KV head to the cache, unless the row is padding."""
    i = gl.arange(0, HEAD_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    j = gl.arange(0, D // 2, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    token = cache + kv_index * (NUM_KV * D) + kv_head * D
    target = token + gl.where(i > GROUP, plane, 0)[:, None] + j[None, :]
    stored = ((i == GROUP) | (i == GROUP + 1)) & (slot >= 0)
    stored, _ = gl.broadcast(stored[:, None], low)
    gl.store(target, low, mask=stored)
    gl.store(target + D // 2, high, mask=stored)


@gluon.jit
def attend_span(q, blocks, index, span, position, scale, D: gl.constexpr, STAGES: gl.constexpr):
    """Return maximum [N], sum [N] and weighted values [D, N] of a span for the queries q [D, N]."""
    N: gl.constexpr = q.shape[1]
    m = gl.full([N], float("-inf"), gl.float32, gl.SliceLayout(0, PRODUCT))
    sums = gl.zeros([16, N], gl.float32, PRODUCT)
    values = gl.zeros([D, N], gl.float32, PRODUCT)
    ones = gl.full([16, KEYS], 1.0, BF16, WEIGHT)
    for block in range(BLOCKS):
        keys = blocks.index((index + 2 * block) % STAGES).load(WEIGHT)
        scores = mma_v2(keys, q, gl.zeros([KEYS, N], gl.float32, PRODUCT)) * scale
        key = span * SPAN + block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, PRODUCT))
        scores = gl.where((key <= position)[:, None], scores, float("-inf"))
        top = gl.maximum(m, gl.max(scores, axis=0))
        base = finite(top)
        weights = gl.convert_layout(gl.exp2(scores - base[None, :]).to(BF16), COLUMN)
        decay = gl.exp2(m - base)[None, :]
        m = top
        sums = mma_v2(ones, weights, sums * decay)
        block_values = blocks.index((index + 2 * block + 1) % STAGES).permute((1, 0)).load(WEIGHT)
        values = mma_v2(block_values, weights, values * decay)
    return m, gl.max(sums, axis=0), values  # all rows of `sums` are equal


@gluon.jit
def attend_items(
    qkv, rope, head_norms, cache, out, parts, stats, position, slot, kv_index, plane, spans, scale, eps,
    ring, queries, lines, full, empty, index,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the items of this program; return the next index of the ring.

    Results go to out [heads, D] where one item has all spans of a head, otherwise to parts and stats, see
    `online_softmax.store_partial`.
    """
    N: gl.constexpr = MMA_COLUMNS if GROUP <= MMA_COLUMNS else HEAD_ROWS
    blocks = blocks_of(ring, STAGES, KEYS, D)
    heads = lines_of(lines, HEAD_ROWS * D, CHUNK)
    num_spans = position // SPAN + 1
    num_items, length = divide_spans(num_spans, NUM_KV)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        kv_head, first = item % NUM_KV, item // NUM_KV * length
        low, high = rotated_heads(
            qkv, rope, head_norms, position, kv_head, eps, NUM_KV, GROUP, D, Q_NORM, K_NORM
        )
        rows = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [HEAD_ROWS, D])
        thread_barrier()
        queries.store(rows)
        lines_of(lines, HEAD_ROWS * D, HEAD_ROWS * D).index(0).store(gl.reshape(rows, [HEAD_ROWS * D]))
        thread_barrier()
        q = queries.slice(0, N, dim=0).permute((1, 0)).load(COLUMN)
        end = gl.minimum(first + length, num_spans)
        if end == num_spans:
            store_key_value(cache, plane, kv_index, slot, kv_head, low, high, NUM_KV, GROUP, D)
        m = gl.full([N], float("-inf"), gl.float32, gl.SliceLayout(0, PRODUCT))
        total = gl.zeros([N], gl.float32, gl.SliceLayout(0, PRODUCT))
        acc = gl.zeros([D, N], gl.float32, PRODUCT)
        for span in range(first, end):
            for stage in gl.static_range(SPAN_STAGES):
                wait_full(full, index + stage, STAGES)
            if span == num_spans - 1:
                place = position % SPAN
                for kind in range(2):  # key, value
                    replaced = (index + 2 * (place // KEYS) + kind) % STAGES
                    replace_row(ring, replaced, place % KEYS, heads, (GROUP + kind) * (D // CHUNK), D)
                thread_barrier()
            m1, total1, acc1 = attend_span(q, blocks, index, span, position, scale, D, STAGES)
            release(empty, index, SPAN_STAGES, STAGES)
            index += SPAN_STAGES
            m, a, b = merge_factors(m, m1)
            total = total * a + total1 * b
            acc = acc * a[None, :] + acc1 * b[None, :]
        g = gl.arange(0, N, layout=gl.SliceLayout(0, PRODUCT))
        d = gl.arange(0, D, layout=gl.SliceLayout(1, PRODUCT))
        row_head = kv_head * GROUP + g
        inside, _ = gl.broadcast((g < GROUP)[None, :], acc)
        if num_spans <= length:
            normalised = (acc / total[None, :] + 0.0).to(BF16)
            gl.store(out + row_head[None, :] * D + d[:, None], normalised, mask=inside)
        else:
            at = row_head * spans + first
            gl.store(parts + at[None, :] * D + d[:, None], acc, mask=inside)
            gl.store(stats + at * 2, m, mask=g < GROUP)
            gl.store(stats + at * 2 + 1, total, mask=g < GROUP)
    return index
