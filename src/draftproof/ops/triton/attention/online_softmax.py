"""Softmax over blocks and spans of keys: the order of sums that all attention kernels share.

The order of the sums of a row is a function of its position: keys in blocks, blocks in spans, spans merged in
ascending order (KEYS, SPAN). A masked key contributes exact zeros, so the rows of a tile
do not affect each other. Row sums run on the tensor core (p times 1), in the order of p times V. Kernels are
compiled without contraction of multiply and add, so that merging inside a loop and merging stored partial
results give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.attention.kv_cache import convert_elements, is_quantized, load_scales

KEYS = 64  # keys of one block; determines the bits
SPAN = 128  # tokens of one span; determines the bits
LOG2_E = 1.4426950408889634


@triton.jit
def merge_partials(m, total, acc, m_new, total_new, acc_new):
    """Merge two partial results of the same rows, the earlier span first."""
    top = tl.maximum(m, m_new)
    base = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp2(m - base), tl.exp2(m_new - base)
    return top, total * a + total_new * b, acc * a[:, None] + acc_new * b[:, None]


@triton.jit
def masked_scores(q, k, key, pos, scale, WINDOW: tl.constexpr):
    """Return scores [BM, KEYS] of keys k [BD, KEYS] at positions `key`, -inf where masked."""
    scores = tl.dot(q, convert_elements(k, q.dtype), input_precision="ieee") * scale
    visible = key[None, :] <= pos[:, None]
    if WINDOW:
        visible = visible & (key[None, :] > pos[:, None] - WINDOW)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def score_factor(scale, kv, page, key, exists, NUM_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Return the factor of scores: `scale`, times the scales of quantised keys [1, KEYS]."""
    if is_quantized(kv[0].dtype.element_ty):
        return (load_scales(kv[2], page, key, exists, NUM_KV, D, PAGE) * scale)[None, :]
    else:
        return scale


@triton.jit
def softmax_step(scores, m):
    """Return the new maximum [BM], weights [BM, KEYS] in fp32 and the decay of the old sums [BM, 1]."""
    top = tl.maximum(m, tl.max(scores, axis=1))
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(scores - base[:, None]), tl.exp2(m - base)[:, None]


@triton.jit
def accumulate_values(
    p, v, value_scales, decay, sums, acc, dtype: tl.constexpr, KEYS: tl.constexpr, ONES: tl.constexpr
):
    """Add v [KEYS, BD]: return the sum of weights [BM, ONES] and the weighted values [BM, BD].

    The tensor core multiplies in `dtype`. value_scales [KEYS] multiply the weights; None: there are none.
    """
    ones = tl.full((KEYS, ONES), 1.0, tl.float32).to(dtype)
    weights = p.to(dtype)
    sums = tl.dot(weights, ones, sums * decay, input_precision="ieee")
    if value_scales is not None:
        weights = (p * value_scales[None, :]).to(dtype)
    return sums, tl.dot(weights, convert_elements(v, dtype), acc * decay, input_precision="ieee")


@triton.jit
def load_sinks(sinks, head):
    """Load the sink logits of query heads [BM], for exp2."""
    return tl.load(sinks + head) * 1.4426950408889634


@triton.jit
def store_normalised(m, total, acc, sink, out_at, ok):
    """Normalise, turn -0 into +0 (as adding a zero block would), round and store.

    A `sink` [BM] takes part in the sum of weights only.
    """
    if sink is not None:
        top = tl.maximum(m, sink)
        decay = tl.exp2(m - top)
        total = total * decay + tl.exp2(sink - top)
        acc = acc * decay[:, None]
    tl.store(out_at, (acc / total[:, None] + 0.0).to(out_at.dtype.element_ty), mask=ok)


@triton.jit
def store_partial(parts, stats, partial_index, m, total, acc, ok, inside, BD: tl.constexpr):
    """Store a partial result at index `partial_index` [BM] for `merge_stored_spans`."""
    d = tl.arange(0, BD)
    tl.store(parts + partial_index[:, None] * BD + d[None, :], acc, mask=inside)
    tl.store(stats + partial_index * 2, m, mask=ok)
    tl.store(stats + partial_index * 2 + 1, total, mask=ok)


@triton.jit
def load_partial(parts, stats, at, d, ok, inside, BD: tl.constexpr):
    """Load the partial result of a span; an empty one where masked."""
    m = tl.load(stats + at * 2, mask=ok, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + at * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
    q_offset = parts + at[:, None] * BD + d[None, :]
    acc = tl.load(q_offset, mask=inside & ok[:, None], other=0.0, cache_modifier=".cg")
    return m, total, acc


@triton.jit
def merge_stored_spans(
    parts, stats, base, first_span, count, sink, ok, inside, out_at, BM: tl.constexpr, BD: tl.constexpr
):
    """Merge the stored spans in ascending order and store the result."""
    d = tl.arange(0, BD)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    end = first_span + count
    for s in range(first_span, end, 4):  # four at a time, so that their loads overlap
        m1, total1, acc1 = load_partial(parts, stats, base + s, d, ok, inside, BD)
        m2, total2, acc2 = load_partial(parts, stats, base + s + 1, d, ok & (s + 1 < end), inside, BD)
        m3, total3, acc3 = load_partial(parts, stats, base + s + 2, d, ok & (s + 2 < end), inside, BD)
        m4, total4, acc4 = load_partial(parts, stats, base + s + 3, d, ok & (s + 3 < end), inside, BD)
        m, total, acc = merge_partials(m, total, acc, m1, total1, acc1)
        m, total, acc = merge_partials(m, total, acc, m2, total2, acc2)
        m, total, acc = merge_partials(m, total, acc, m3, total3, acc3)
        m, total, acc = merge_partials(m, total, acc, m4, total4, acc4)
    store_normalised(m, total, acc, sink, out_at, inside)
