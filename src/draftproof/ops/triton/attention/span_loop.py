"""Loop over whole spans of keys, for tiles of any height: fewer instructions a key than a loop over blocks.

The sums are those of `online_softmax.py`, bit for bit. All blocks of a span are loaded together. The tensor
core computes the scores of a block while the softmax of the block before runs, and the first block has no
earlier sums to scale. The merge is no branch of the loop: a branch that reads the accumulators of an
asynchronous product makes the assembler wait after every tensor core instruction. Keys and values are loaded
in one layout, so that they share their offsets. Spans that every row of the tile sees in full have no masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.attention import online_softmax
from draftproof.ops.triton.attention.kv_cache import (
    convert_elements,
    is_quantized,
    kv_offset,
    load_rows,
    load_scales,
)


@triton.jit
def load_page_ids(
    pages, span, first, last, PAGE: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, MASKED: tl.constexpr
):
    """Load the page ids of a span, a tensor [KEYS] per block; MASKED: 0 where a key does not exist."""
    page_ids = ()
    for block in tl.static_range(SPAN // KEYS):
        key = span * SPAN + block * KEYS + tl.arange(0, KEYS)
        if MASKED:
            page_ids = page_ids + (
                tl.load(pages + key // PAGE, mask=(key >= first) & (key <= last), other=0),
            )
        elif KEYS % PAGE == 0:  # the division is the same in every block
            at = span * (SPAN // PAGE) + block * (KEYS // PAGE) + tl.arange(0, KEYS) // PAGE
            page_ids = page_ids + (tl.load(pages + at),)
        else:
            page_ids = page_ids + (tl.load(pages + key // PAGE),)
    return page_ids


@triton.jit
def attend_loaded_span(
    q, pos, page_ids, kv, first, last, span, scale,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return maximum [BM], sum [BM] and weighted values [BM, BD] of a span whose page ids are loaded.

    MASKED: some keys do not exist or are not visible to all rows.
    """
    ks, vs, scores = (), (), ()
    for block in tl.static_range(SPAN // KEYS):
        key = span * SPAN + block * KEYS + tl.arange(0, KEYS)
        exists = (key >= first) & (key <= last) if MASKED else None
        token = tl.arange(0, KEYS) if KEYS % PAGE == 0 else key
        offset = kv_offset(kv[0], page_ids[block], token, NUM_KV, D, PAGE)
        ks = ks + (load_rows(kv[0], offset, exists, 0.0, D, BD, ""),)
        vs = vs + (load_rows(kv[1], offset, exists, 0.0, D, BD, ""),)
    for block in tl.static_range(SPAN // KEYS):
        key = span * SPAN + block * KEYS + tl.arange(0, KEYS)
        exists = (key >= first) & (key <= last) if MASKED else None
        factor = online_softmax.score_factor(scale, kv, page_ids[block], key, exists, NUM_KV, D, PAGE)
        k = tl.trans(ks[block])
        if MASKED:
            scores = scores + (online_softmax.masked_scores(q, k, key, pos, factor, WINDOW),)
        else:
            product = tl.dot(q, convert_elements(k, q.dtype), input_precision="ieee")
            scores = scores + (product * factor,)
    m = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM, ONES), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for block in tl.static_range(SPAN // KEYS):
        m, p, decay = online_softmax.softmax_step(scores[block], m)
        value_scales = None
        if is_quantized(kv[0].dtype.element_ty):
            key = span * SPAN + block * KEYS + tl.arange(0, KEYS)
            exists = (key >= first) & (key <= last) if MASKED else None
            value_scales = load_scales(kv[3], page_ids[block], key, exists, NUM_KV, D, PAGE)
        if block == 0:
            sums, acc = first_values(p, vs[0], value_scales, q.dtype, KEYS, ONES)
        else:
            sums, acc = online_softmax.accumulate_values(
                p, vs[block], value_scales, decay, sums, acc, q.dtype, KEYS, ONES
            )
    return m, tl.max(sums, axis=1), acc  # all columns of `sums` are equal


@triton.jit
def first_values(p, v, value_scales, dtype: tl.constexpr, KEYS: tl.constexpr, ONES: tl.constexpr):
    """Do `accumulate_values` without earlier sums: they would be zeros. The longer product comes first."""
    ones = tl.full((KEYS, ONES), 1.0, tl.float32).to(dtype)
    weights = p.to(dtype)
    scaled = weights
    if value_scales is not None:
        scaled = (p * value_scales[None, :]).to(dtype)
    acc = tl.dot(scaled, convert_elements(v, dtype), input_precision="ieee")
    return tl.dot(weights, ones, input_precision="ieee"), acc


@triton.jit
def attend_spans(
    q, pos, pages, kv, first, last, first_position, start, end, scale,
    parts, stats, base, stores, ok, inside,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Return maximum [BM], sum [BM] and weighted values [BM, BD] of spans start..end, merged.

    STORE: return those of the last span; where `stores`, each span is stored at index base [BM] + span.
    """
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    masked_start = start
    if WINDOW == 0:
        masked_start = tl.maximum(start, tl.minimum((first_position + 1) // SPAN, end))
        next_ids = load_page_ids(pages, start, first, last, PAGE, KEYS, SPAN, True)
        for span in range(start, masked_start):
            # page ids are loaded one iteration early, so that the loads of keys do not wait for them
            page_ids = next_ids
            next_span = tl.minimum(span + 1, masked_start - 1)
            next_ids = load_page_ids(pages, next_span, first, last, PAGE, KEYS, SPAN, False)
            m1, total1, acc1 = attend_loaded_span(
                q, pos, page_ids, kv, first, last, span, scale,
                NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, False,
            )  # fmt: skip
            if STORE:
                if stores:
                    online_softmax.store_partial(parts, stats, base + span, m1, total1, acc1, ok, inside, BD)
                m, total, acc = m1, total1, acc1
            else:
                m, total, acc = online_softmax.merge_partials(m, total, acc, m1, total1, acc1)
    for span in range(masked_start, end):
        page_ids = load_page_ids(pages, span, first, last, PAGE, KEYS, SPAN, True)
        m1, total1, acc1 = attend_loaded_span(
            q, pos, page_ids, kv, first, last, span, scale,
            NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, True,
        )  # fmt: skip
        if STORE:
            if stores:
                online_softmax.store_partial(parts, stats, base + span, m1, total1, acc1, ok, inside, BD)
            m, total, acc = m1, total1, acc1
        else:
            m, total, acc = online_softmax.merge_partials(m, total, acc, m1, total1, acc1)
    return m, total, acc
