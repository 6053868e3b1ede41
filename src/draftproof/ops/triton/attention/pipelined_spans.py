"""Loop over the spans that all rows of a tile see in full, with products of two spans in flight, for Hopper.

The sums are those of `kv_rings.attend_span` and `kv_rings.merge`, bit for bit. The tensor core weights
the values of block 1 during the softmax of block 0 of the next span, and computes the scores of block 1
during the merge. Nothing is in flight at the end of an iteration: the assembler would serialise all products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from draftproof.ops.triton.attention.kv_rings import finite, merge, thread_barrier, to_rows


@gluon.jit
def start_scores(q, ks, k_full, no_scores, block, phase):
    """Start the product of the queries and the keys of a block of the ring."""
    mbarrier.wait(k_full.index(block), phase)
    fence_async_shared()
    return warpgroup_mma(q, ks.index(block).permute((1, 0)), no_scores, use_acc=False, is_async=True)


@gluon.jit
def softmax_of_first_block(product, scale, dtype: gl.constexpr):
    """Return the maximum and the weights of block 0."""
    scores = product * scale
    m0 = gl.max(scores, axis=1)
    return m0, gl.exp2(scores - finite(m0)[:, None]).to(dtype)


@gluon.jit
def add_second_block(p1, vs, ones, sums, values, stage, VALUES: gl.constexpr, SUMS: gl.constexpr):
    """Start the products of the weights of block 1, its values and the ones."""
    weights = gl.convert_layout(p1, gl.DotOperandLayout(0, VALUES, 2))
    ones_weights = gl.convert_layout(p1, gl.DotOperandLayout(0, SUMS, 2))
    values = warpgroup_mma(weights, vs.index(stage * 2 + 1), values, is_async=True)
    return warpgroup_mma(ones_weights, ones, sums, is_async=True), values


@gluon.jit
def finish_span(
    q, vs, ones, k_empty, v_full, scale, index, product1, m0, p0,
    HALF_ROWS: gl.constexpr, D: gl.constexpr, ONES: gl.constexpr, STAGES: gl.constexpr, VALUES: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """Weight the values of block 0 during the softmax of block 1, whose scores are in flight.

    Return maximum, sums and weighted values of block 0, scaled for block 1, and the weights of block 1.
    Nothing is in flight at the end.
    """
    stage, phase = index % STAGES, index // STAGES & 1
    no_values = gl.zeros([HALF_ROWS, D], gl.float32, VALUES)
    no_sums = gl.zeros([HALF_ROWS, ONES], gl.float32, SUMS)
    weights0 = gl.convert_layout(p0, gl.DotOperandLayout(0, VALUES, 2))
    ones_weights0 = gl.convert_layout(p0, gl.DotOperandLayout(0, SUMS, 2))
    mbarrier.wait(v_full.index(stage * 2), phase)
    fence_async_shared()
    values = warpgroup_mma(weights0, vs.index(stage * 2), no_values, use_acc=False, is_async=True)
    sums = warpgroup_mma(ones_weights0, ones, no_sums, use_acc=False, is_async=True)
    product1 = warpgroup_mma_wait(2, deps=[product1])
    thread_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = product1 * scale
    m1 = gl.maximum(m0, gl.max(scores, axis=1))
    base = finite(m1)
    p1 = gl.exp2(scores - base[:, None]).to(q.dtype)
    decay = gl.exp2(m0 - base)
    # the assembler would move the softmax behind the wait for the tensor core, but not behind this one
    mbarrier.wait(v_full.index(stage * 2 + 1), phase)
    fence_async_shared()
    values, sums = warpgroup_mma_wait(0, deps=[values, sums])
    values = values * to_rows(decay, VALUES)[:, None]
    sums = sums * to_rows(decay, SUMS)[:, None]
    return m1, sums, values, p1


@gluon.jit
def attend_full_spans(
    q, ks, vs, ones, k_full, k_empty, v_full, v_empty, scale, first, count, m, total, acc,
    HALF_ROWS: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, ONES: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, VALUES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Merge `count` spans, at least one, into m, total and acc; first: index of the first in the rings."""
    no_scores = gl.zeros([HALF_ROWS, KEYS], gl.float32, SCORES)
    stage, phase = first % STAGES, first // STAGES & 1
    product0 = start_scores(q, ks, k_full, no_scores, stage * 2, phase)
    product1 = start_scores(q, ks, k_full, no_scores, stage * 2 + 1, phase)
    product0 = warpgroup_mma_wait(1, deps=[product0])
    m0, p0 = softmax_of_first_block(product0, scale, q.dtype)
    m1, sums, values, p1 = finish_span(
        q, vs, ones, k_empty, v_full, scale, first, product1, m0, p0,
        HALF_ROWS, D, ONES, STAGES, VALUES, SUMS,
    )  # fmt: skip
    for index in range(first + 1, first + count):
        stage, phase = index % STAGES, index // STAGES & 1
        previous = (index - 1) % STAGES
        mbarrier.wait(k_full.index(stage * 2), phase)
        fence_async_shared()
        # accumulators are defined before the first product starts, otherwise the assembler serialises
        values, sums = warpgroup_mma_wait(0, deps=[values, sums])
        keys = ks.index(stage * 2).permute((1, 0))
        product0 = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
        sums, values = add_second_block(p1, vs, ones, sums, values, previous, VALUES, SUMS)
        product0 = warpgroup_mma_wait(2, deps=[product0])
        m0, p0 = softmax_of_first_block(product0, scale, q.dtype)
        mbarrier.wait(k_full.index(stage * 2 + 1), phase)
        fence_async_shared()
        values, sums = warpgroup_mma_wait(0, deps=[values, sums])
        keys = ks.index(stage * 2 + 1).permute((1, 0))
        product1 = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
        thread_barrier()
        mbarrier.arrive(v_empty.index(previous), count=1)
        m, total, acc = merge(m, total, acc, m1, sums, values, VALUES)
        m1, sums, values, p1 = finish_span(
            q, vs, ones, k_empty, v_full, scale, index, product1, m0, p0,
            HALF_ROWS, D, ONES, STAGES, VALUES, SUMS,
        )  # fmt: skip
    last = (first + count - 1) % STAGES
    sums, values = add_second_block(p1, vs, ones, sums, values, last, VALUES, SUMS)
    values, sums = warpgroup_mma_wait(0, deps=[values, sums])
    thread_barrier()
    mbarrier.arrive(v_empty.index(last), count=1)
    return merge(m, total, acc, m1, sums, values, VALUES)
