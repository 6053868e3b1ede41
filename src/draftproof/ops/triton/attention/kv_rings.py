"""Rings of keys and values in shared memory, and the loop over spans that reads them, for Hopper.

The sums are those of `online_softmax.py`, bit for bit. One warpgroup copies spans into the rings, others
compute. The scores of block 1 are in flight during the softmax of block 0, and the weighted values of block
0 during that of block 1. Written in Gluon, which Triton's interpreter does not run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the name in Triton 3.7 and 3.6


@gluon.jit
def make_rings(
    dtype: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Return rings of keys and of values, and their barriers: full of keys, empty, full of values, empty.

    A stage holds a span; PARTS computing warpgroups release it.
    """
    BLOCKS: gl.constexpr = STAGES * (SPAN // KEYS)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    ks = gl.allocate_shared_memory(dtype, [BLOCKS, KEYS, D], layout)
    vs = gl.allocate_shared_memory(dtype, [BLOCKS, KEYS, D], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for block in gl.static_range(BLOCKS):
        mbarrier.init(k_full.index(block), count=128)  # every thread that loads
        mbarrier.init(v_full.index(block), count=128)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_empty.index(stage), count=PARTS)
        mbarrier.init(v_empty.index(stage), count=PARTS)
    return ks, vs, k_full, k_empty, v_full, v_empty


@gluon.jit
def make_ones(dtype: gl.constexpr, KEYS: gl.constexpr, ONES: gl.constexpr):
    """Return the matrix of ones [KEYS, ONES] and make it and the barriers visible to all warpgroups."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ONES, KEYS], dtype)
    ones = gl.allocate_shared_memory(dtype, [ONES, KEYS], layout)
    ones.store(gl.full([ONES, KEYS], 1.0, dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    fence_async_shared()
    thread_barrier()
    return ones.permute((1, 0))


@gluon.jit
def load_page_ids(
    pages, span, last, PAGE: gl.constexpr, KEYS: gl.constexpr, SPAN: gl.constexpr, LAYOUT: gl.constexpr
):
    """Load the page ids of a span, a tensor [KEYS] per block; 0 where a key does not exist.

    A thread loads one id for its consecutive keys, which are in one page.
    """
    TOKENS: gl.constexpr = LAYOUT.parent.size_per_thread[0]
    groups: gl.constexpr = gl.BlockedLayout([1, TOKENS], [2, 16], [4, 1], [1, 0])
    page_ids = ()
    for block in gl.static_range(SPAN // KEYS):
        if TOKENS == 1:
            key = span * SPAN + block * KEYS + gl.arange(0, KEYS, layout=LAYOUT)
            page_ids = page_ids + (gl.load(pages + key // PAGE, mask=key <= last, other=0),)
        else:
            group = gl.arange(0, KEYS // TOKENS, layout=gl.SliceLayout(1, groups))
            key = span * SPAN + block * KEYS + group * TOKENS
            page_id = gl.load(pages + key // PAGE, mask=key <= last, other=0)
            of_keys = page_id[:, None] + gl.zeros([KEYS // TOKENS, TOKENS], gl.int32, groups)
            page_ids = page_ids + (gl.convert_layout(gl.reshape(of_keys, [KEYS]), LAYOUT),)
    return page_ids


@gluon.jit
def copy_span(
    shared, heads, page_ids, full, empty, index, span, last,
    NUM_KV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPAN: gl.constexpr,
    STAGES: gl.constexpr, LAYOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Start the copy of the keys or values of a span into the ring; heads: pointers to a row of page 0."""
    BLOCKS: gl.constexpr = SPAN // KEYS
    stage = index % STAGES
    mbarrier.wait(empty.index(stage), (index // STAGES & 1) ^ 1)
    for block in gl.static_range(BLOCKS):
        key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
        offset = (page_ids[block].to(gl.int64) * PAGE + key % PAGE) * (NUM_KV * D)
        pointers = heads[None, :] + offset[:, None]
        target = shared.index(stage * BLOCKS + block)
        if MASKED:
            exists = span * SPAN + key <= last  # memory of other keys may hold NaN
            async_copy.async_copy_global_to_shared(target, pointers, mask=exists[:, None])
        else:
            async_copy.async_copy_global_to_shared(target, pointers)
        async_copy.mbarrier_arrive(full.index(stage * BLOCKS + block), increment_count=False)


@gluon.jit
def copy_keys_and_values(
    keys, values, ks, vs, k_full, k_empty, v_full, v_empty, page_ids, index, span, last,
    NUM_KV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPAN: gl.constexpr,
    STAGES: gl.constexpr, LAYOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Start the copies of a span into both rings."""
    copy_span(
        ks, keys, page_ids, k_full, k_empty, index, span, last,
        NUM_KV, D, PAGE, KEYS, SPAN, STAGES, LAYOUT, MASKED,
    )  # fmt: skip
    copy_span(
        vs, values, page_ids, v_full, v_empty, index, span, last,
        NUM_KV, D, PAGE, KEYS, SPAN, STAGES, LAYOUT, MASKED,
    )  # fmt: skip


@gluon.jit
def count_steps(start, end, step):
    """Return the number of elements of range(start, end, step); not negative."""
    return gl.maximum(end - start + step - 1, 0) // step


@gluon.jit
def load_spans(
    pages, keys, values, ks, vs, k_full, k_empty, v_full, v_empty, index, start, end, step, num_full, last,
    NUM_KV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPAN: gl.constexpr,
    STAGES: gl.constexpr, LAYOUT: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Copy every `step`-th span of start..end into the rings; return the index in them after the last.

    All keys of the first `num_full` spans exist. WAIT: the previous kernel stores none of them, but it may
    store keys of the other spans, so they are copied after it.
    """
    key_layout: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    masked_start = start + count_steps(start, gl.minimum(num_full, end), step) * step
    next_ids = load_page_ids(pages, start, last, PAGE, KEYS, SPAN, key_layout)
    for span in range(start, masked_start, step):
        page_ids = next_ids  # they are loaded one span early, so that the copies do not wait for them
        next_ids = load_page_ids(pages, span + step, last, PAGE, KEYS, SPAN, key_layout)
        copy_keys_and_values(
            keys, values, ks, vs, k_full, k_empty, v_full, v_empty, page_ids, index, span, last,
            NUM_KV, D, PAGE, KEYS, SPAN, STAGES, LAYOUT, False,
        )  # fmt: skip
        index += 1
    if WAIT:
        cuda.gdc_wait()
    for span in range(masked_start, end, step):
        page_ids = next_ids
        next_ids = load_page_ids(pages, span + step, last, PAGE, KEYS, SPAN, key_layout)
        copy_keys_and_values(
            keys, values, ks, vs, k_full, k_empty, v_full, v_empty, page_ids, index, span, last,
            NUM_KV, D, PAGE, KEYS, SPAN, STAGES, LAYOUT, True,
        )  # fmt: skip
        index += 1
    return index


@gluon.jit
def scaled_scores(product, pos, scale, block, KEYS: gl.constexpr, LAYOUT: gl.constexpr, MASKED: gl.constexpr):
    """Return the scores of a block; MASKED: -inf where a key is not visible."""
    scores = product * scale
    if MASKED:
        key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
        scores = gl.where(key[None, :] <= pos[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def finite(top):
    """Return the maximum, 0 where there is no visible key."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def to_rows(x, LAYOUT: gl.constexpr):
    """Convert a value per row [HALF_ROWS] to another layout of the same rows: no data moves."""
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def attend_span(
    q, ks, vs, ones, k_full, k_empty, v_full, v_empty, pos, scale, span, index,
    HALF_ROWS: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, ONES: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, VALUES: gl.constexpr, SUMS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Return maximum, sums and weighted values of a span of two blocks of keys; index: of it in the rings.

    Nothing is in flight at the end: the other warpgroup occupies the tensor core then.
    """
    dtype: gl.constexpr = q.dtype
    stage = index % STAGES
    phase = index // STAGES & 1
    no_scores = gl.zeros([HALF_ROWS, KEYS], gl.float32, SCORES)
    mbarrier.wait(k_full.index(stage * 2), phase)
    fence_async_shared()
    product0 = warpgroup_mma(q, ks.index(stage * 2).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(k_full.index(stage * 2 + 1), phase)
    fence_async_shared()
    product1 = warpgroup_mma(
        q, ks.index(stage * 2 + 1).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    product0 = warpgroup_mma_wait(1, deps=[product0])
    scores = scaled_scores(product0, pos, scale, 2 * span, KEYS, SCORES, MASKED)
    m0 = gl.max(scores, axis=1)
    p0 = gl.exp2(scores - finite(m0)[:, None]).to(dtype)
    weights0 = gl.convert_layout(p0, gl.DotOperandLayout(0, VALUES, 2))
    ones_weights0 = gl.convert_layout(p0, gl.DotOperandLayout(0, SUMS, 2))
    mbarrier.wait(v_full.index(stage * 2), phase)
    fence_async_shared()
    no_values = gl.zeros([HALF_ROWS, D], gl.float32, VALUES)
    no_sums = gl.zeros([HALF_ROWS, ONES], gl.float32, SUMS)
    values = warpgroup_mma(weights0, vs.index(stage * 2), no_values, use_acc=False, is_async=True)
    sums = warpgroup_mma(ones_weights0, ones, no_sums, use_acc=False, is_async=True)
    product1 = warpgroup_mma_wait(2, deps=[product1])
    thread_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = scaled_scores(product1, pos, scale, 2 * span + 1, KEYS, SCORES, MASKED)
    m1 = gl.maximum(m0, gl.max(scores, axis=1))
    base = finite(m1)
    p1 = gl.exp2(scores - base[:, None]).to(dtype)
    decay = gl.exp2(m0 - base)
    weights1 = gl.convert_layout(p1, gl.DotOperandLayout(0, VALUES, 2))
    ones_weights1 = gl.convert_layout(p1, gl.DotOperandLayout(0, SUMS, 2))
    # the assembler would move the softmax behind the wait for the tensor core, but not behind this one
    mbarrier.wait(v_full.index(stage * 2 + 1), phase)
    fence_async_shared()
    values, sums = warpgroup_mma_wait(0, deps=[values, sums])
    values = values * to_rows(decay, VALUES)[:, None]
    sums = sums * to_rows(decay, SUMS)[:, None]
    values = warpgroup_mma(weights1, vs.index(stage * 2 + 1), values, is_async=True)
    sums = warpgroup_mma(ones_weights1, ones, sums, is_async=True)
    values, sums = warpgroup_mma_wait(0, deps=[values, sums])
    thread_barrier()
    mbarrier.arrive(v_empty.index(stage), count=1)
    return m1, sums, values


@gluon.jit
def merge(m, total, acc, m1, sums1, acc1, VALUES: gl.constexpr):
    """Do `online_softmax.merge_partials`."""
    total1 = gl.convert_layout(gl.max(sums1, axis=1), m.type.layout)  # all columns are equal
    top = gl.maximum(m, m1)
    base = finite(top)
    a, b = gl.exp2(m - base), gl.exp2(m1 - base)
    acc = acc * to_rows(a, VALUES)[:, None] + acc1 * to_rows(b, VALUES)[:, None]
    return top, total * a + total1 * b, acc


@gluon.jit
def store_span(parts, stats, index, m1, sums1, acc1, ok, D: gl.constexpr, VALUES: gl.constexpr):
    """Do `online_softmax.store_partial`; index [HALF_ROWS]: of the partial result of the span."""
    d = gl.arange(0, D, layout=gl.SliceLayout(0, VALUES))
    parts_at = parts + to_rows(index, VALUES)[:, None] * D + d[None, :]
    gl.store(parts_at, acc1, mask=to_rows(ok, VALUES)[:, None])
    gl.store(stats + index * 2, m1, mask=ok)
    total1 = gl.convert_layout(gl.max(sums1, axis=1), m1.type.layout)  # all columns are equal
    gl.store(stats + index * 2 + 1, total1, mask=ok)
