"""Spans of quantised keys, one per warp: copies into a ring in shared memory, scores and weighted values.

The sums are those of `online_softmax.py`, bit for bit. Elements are copied as they are stored and converted
in registers on their way to the tensor core. A warp needs nothing of the other warps before the merge.
Written in Gluon, which Triton's interpreter does not run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from draftproof.ops.contract import kv_layout
from draftproof.ops.triton.attention import online_softmax
from draftproof.ops.triton.attention.kv_rings import finite

D = gl.constexpr(128)  # elements of a head
BM = gl.constexpr(16)  # rows times heads of a tile
KEYS, SPAN = gl.constexpr(online_softmax.KEYS), gl.constexpr(online_softmax.SPAN)
WARPS = gl.constexpr(8)  # of a program, each with a span
STAGES = gl.constexpr(3)  # blocks of keys or values of all warps in the ring
PIECE = gl.constexpr(16)  # adjacent tokens of a page
PIECES = gl.constexpr(4)  # of a block of keys
SLICE = gl.constexpr(16)  # keys whose elements are in registers at a time
SCALE_BYTES = gl.constexpr(kv_layout.SCALE_BYTES)

ROWS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
# A thread copies 16 bytes of all tokens of a piece, so that it needs one page id.
COPY = gl.constexpr(gl.BlockedLayout([1, 1, 16, 8], [1, 4, 1, 8], [8, 1, 1, 1], [3, 2, 1, 0]))
COPY_SCALES = gl.constexpr(gl.BlockedLayout([1, 1, 2], [1, 4, 8], [8, 1, 1], [2, 1, 0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
QUERIES = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 4))  # 4 adjacent elements, as 32 bits of keys hold
KEYS_OPERAND = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 4))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
VALUES = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 2))
MERGED = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [8, 1], [1, 0]))
PIECES_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [3, 2, 1, 0]))  # pairs of elements
PAIRS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
ELEMENTS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
STAGED_SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
SCALES_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
TILE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # of a warp of it
ROW_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# Two tokens of two adjacent elements -> the first elements of both tokens in bf16, then the second ones.
FP8_PAIRS = gl.constexpr("""{
.reg .b16 first, second, low, high;
.reg .b32 pairs, halves;
.reg .f32 f, g;
prmt.b32 pairs, $2, 0, 0x3120;
mov.b32 {first, second}, pairs;
cvt.rn.f16x2.e4m3x2 halves, first;
mov.b32 {low, high}, halves;
cvt.f32.f16 f, low;
cvt.f32.f16 g, high;
cvt.rn.bf16x2.f32 $0, g, f;
cvt.rn.f16x2.e4m3x2 halves, second;
mov.b32 {low, high}, halves;
cvt.f32.f16 f, low;
cvt.f32.f16 g, high;
cvt.rn.bf16x2.f32 $1, g, f;
}""")
# The byte plus 128 is the mantissa of 2**23 in fp32; 0x4B000080 is 2**23 + 128.
INT8_PAIRS = gl.constexpr("""{
.reg .b32 bytes, x, y;
.reg .f32 f, g;
xor.b32 bytes, $2, 0x80808080;
prmt.b32 x, bytes, 0x4B000000, 0x7440;
prmt.b32 y, bytes, 0x4B000000, 0x7442;
mov.b32 f, x;
mov.b32 g, y;
sub.rn.f32 f, f, 0f4B000080;
sub.rn.f32 g, g, 0f4B000080;
cvt.rn.bf16x2.f32 $0, g, f;
prmt.b32 x, bytes, 0x4B000000, 0x7441;
prmt.b32 y, bytes, 0x4B000000, 0x7443;
mov.b32 f, x;
mov.b32 g, y;
sub.rn.f32 f, f, 0f4B000080;
sub.rn.f32 g, g, 0f4B000080;
cvt.rn.bf16x2.f32 $1, g, f;
}""")


@gluon.jit
def warps_and_numbers(PARENT: gl.constexpr, AXIS: gl.constexpr, SIZE: gl.constexpr):
    """Return warps [WARPS, 1] and numbers [1, SIZE] in the layout PARENT without dimension AXIS."""
    LAYOUT: gl.constexpr = gl.SliceLayout(AXIS, PARENT)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    return warp, gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def make_ring():
    """Return a ring in shared memory of blocks of keys or values, in pairs of elements, and of scales."""
    ring = gl.allocate_shared_memory(gl.int16, [STAGES, WARPS, PIECES, PIECE, D // 2], PIECES_SHARED)
    return ring, gl.allocate_shared_memory(gl.float32, [STAGES, WARPS, PIECES, PIECE], SCALES_SHARED)


@gluon.jit
def first_tokens(group, step, BLOCK: gl.constexpr):
    """Return the positions of the first tokens of the pieces of a block [WARPS, PIECES]."""
    warp, piece = warps_and_numbers(COPY_SCALES, 2, PIECES)
    return (group[6] + step * warp) * SPAN + BLOCK * KEYS + piece * PIECE


@gluon.jit
def load_page_ids(page_table, group, step, max_pages, PAGE: gl.constexpr):
    """Load the page ids of both blocks of a group [WARPS, PIECES]; 0 where a token does not exist."""
    _, _, slot, last, _, _, _ = group
    page_ids = ()
    for block in gl.static_range(2):
        token = first_tokens(group, step, block)
        page = gl.load(page_table + slot * max_pages + token // PAGE, mask=token <= last, other=0)
        page_ids = page_ids + (page,)
    return page_ids


@gluon.jit
def copy_block(
    ring, scales, index, heads, head_scales, page_ids, group, step, BLOCK: gl.constexpr, NUM_KV: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Start the copy of a block of keys or values, and of their scales, into the ring at `index`.

    heads, head_scales: pointers to a row of page 0 in pairs of elements, and to its scale.
    """
    PAGE_BYTES: gl.constexpr = PAGE * NUM_KV * (D + SCALE_BYTES)
    PIECE_LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, COPY))
    last = group[3]
    first = first_tokens(group, step, BLOCK)
    page = page_ids[BLOCK].to(gl.int64)
    offset = page * (PAGE_BYTES // 2) + first % PAGE * (NUM_KV * D // 2)
    token = gl.arange(0, PIECE, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, COPY))))
    pointers = heads[None, None, None, :] + gl.convert_layout(offset, PIECE_LAYOUT)[:, :, None, None]
    pointers = pointers + (token * (NUM_KV * D // 2))[None, None, :, None]
    scale_token = gl.arange(0, PIECE, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY_SCALES)))[None, None, :]
    scale_pointers = (
        head_scales + (page * (PAGE_BYTES // SCALE_BYTES) + first % PAGE)[:, :, None] + scale_token
    )
    elements_at, scales_at = ring.index(index % STAGES), scales.index(index % STAGES)
    if (group[6] + step * (WARPS - 1) + 1) * SPAN <= last + 1:
        async_copy.async_copy_global_to_shared(elements_at, pointers)
        async_copy.async_copy_global_to_shared(scales_at, scale_pointers)
    else:  # memory of tokens that do not exist may hold NaN
        exists = gl.convert_layout(first, PIECE_LAYOUT)[:, :, None] + token[None, None, :] <= last
        async_copy.async_copy_global_to_shared(elements_at, pointers, mask=exists[:, :, :, None])
        exists = first[:, :, None] + scale_token <= last
        async_copy.async_copy_global_to_shared(scales_at, scale_pointers, mask=exists)
    async_copy.commit_group()


@gluon.jit
def natural_groups(k):
    """Swap bits 1 and 4 of the element number of keys [WARPS, D, SLICE]; only registers are renamed.

    A thread has elements 4c..4c + 3 of 16. The compiler multiplies 4c and 4c + 1 of two such groups together;
    with this order a tensor core instruction adds elements 16i..16i + 15, as it does in other kernels.
    """
    k = gl.reshape(k, [WARPS, D // 32, 2, 4, 2, 2, SLICE])
    k = gl.reshape(gl.permute(k, (0, 1, 4, 3, 2, 5, 6)), [WARPS, D, SLICE])
    return gl.convert_layout(k, KEYS_OPERAND, assert_trivial=True)


@gluon.jit
def block_scores(q, ring, scales, index, block, step, start, pos, scale, dtype: gl.constexpr):
    """Return the scores of a block of keys: tensors [WARPS, BM, SLICE], -inf where a key is not visible.

    block: 0 or 1, of the span.
    """
    async_copy.wait_group(STAGES - 1)
    keys = ring.index(index % STAGES)._reinterpret(dtype, [WARPS, KEYS, D], ELEMENTS_SHARED)
    factors = scales.index(index % STAGES)._reinterpret(gl.float32, [WARPS, KEYS], PLAIN_SHARED)
    warp, token = warps_and_numbers(ACC, 1, SLICE)
    key = (start + step * warp) * SPAN + block * KEYS + token
    scores = ()
    for at in gl.static_range(0, KEYS, SLICE):
        k = keys.slice(at, SLICE, 1).permute((0, 2, 1)).load(KEYS_OPERAND)
        k = natural_groups(k.to(gl.float32).to(q.dtype))
        product = mma_v2(q, k, gl.zeros([WARPS, BM, SLICE], gl.float32, ACC))
        factor = factors.slice(at, SLICE, 1).load(gl.SliceLayout(1, ACC)) * scale
        visible = (key + at)[:, None, :] <= pos[:, :, None]
        scores = scores + (gl.where(visible, product * factor[:, None, :], float("-inf")),)
    return scores


@gluon.jit
def maximum_of(scores):
    """Return the maximum of the scores of every row [WARPS, BM]."""
    top = gl.max(scores[0], axis=2)
    for i in gl.static_range(1, KEYS // SLICE):
        top = gl.maximum(top, gl.max(scores[i], axis=2))
    return top


@gluon.jit
def add_values(scores, base, ring, scales, index, sums, acc, kv_dtype: gl.constexpr):
    """Add a block of values: return sums of weights [WARPS, BM, 8] and four tensors of weighted values.

    Tensor 2 * i + j of them holds columns D / 2 * i + j, + 2, ... [WARPS, BM, D / 4].
    """
    COLUMNS: gl.constexpr = D // 4
    PAIRS: gl.constexpr = INT8_PAIRS if kv_dtype == gl.int8 else FP8_PAIRS
    async_copy.wait_group(STAGES - 1)
    ones = gl.full([WARPS, SLICE, 8], 1.0, gl.bfloat16, VALUES)
    values = ring.index(index % STAGES)._reinterpret(gl.int16, [WARPS, KEYS, D // 2], PAIRS_SHARED)
    factors = scales.index(index % STAGES)._reinterpret(gl.float32, [WARPS, KEYS], PLAIN_SHARED)
    for at in gl.static_range(0, KEYS, SLICE):
        p = gl.exp2(scores[at // SLICE] - base[:, :, None])
        factor = factors.slice(at, SLICE, 1).load(gl.SliceLayout(1, ACC))
        sums = mma_v2(gl.convert_layout(p.to(gl.bfloat16), WEIGHTS), ones, sums)
        weights = gl.convert_layout((p * factor[:, None, :]).to(gl.bfloat16), WEIGHTS)
        added = ()
        for half in gl.static_range(2):
            pairs = values.slice(at, SLICE, 1).slice(half * COLUMNS, COLUMNS, 2).load(VALUES)
            even, odd = gl.inline_asm_elementwise(
                PAIRS, "=r,=r,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
            )
            added = added + (mma_v2(weights, even, acc[2 * half]), mma_v2(weights, odd, acc[2 * half + 1]))
        acc = added
    return sums, acc


@gluon.jit
def attend_group(
    query, pos, scale, ring, scales, index, keys, values, key_scales, value_scales, group, following,
    page_ids, next_page_ids, step, kv_dtype: gl.constexpr, NUM_KV: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Return maxima, sums and weighted values of the spans of a group, whose first blocks are in the ring.

    Blocks are copied in the order keys 0, values 0, keys 1, values 1. A block replaces the one three before
    it, which has been used: values 1 of this group, then the first blocks of the following one.
    """
    start = group[6]
    scores = block_scores(query, ring, scales, index, 0, step, start, pos, scale, kv_dtype)
    copy_block(ring, scales, index + 3, values, value_scales, page_ids, group, step, 1, NUM_KV, PAGE)
    m0 = maximum_of(scores)
    sums = gl.zeros([WARPS, BM, 8], gl.float32, ACC)
    no_values = gl.zeros([WARPS, BM, D // 4], gl.float32, ACC)
    acc = (no_values, no_values, no_values, no_values)
    sums, acc = add_values(scores, finite(m0), ring, scales, index + 1, sums, acc, kv_dtype)
    copy_block(ring, scales, index + 4, keys, key_scales, next_page_ids, following, step, 0, NUM_KV, PAGE)
    scores = block_scores(query, ring, scales, index + 2, 1, step, start, pos, scale, kv_dtype)
    copy_block(ring, scales, index + 5, values, value_scales, next_page_ids, following, step, 0, NUM_KV, PAGE)
    m1 = gl.maximum(m0, maximum_of(scores))
    decay = gl.exp2(m0 - finite(m1))[:, :, None]
    acc = (acc[0] * decay, acc[1] * decay, acc[2] * decay, acc[3] * decay)
    sums, acc = add_values(scores, finite(m1), ring, scales, index + 3, sums * decay, acc, kv_dtype)
    copy_block(ring, scales, index + 6, keys, key_scales, next_page_ids, following, step, 1, NUM_KV, PAGE)
    return m1, sums, acc


@gluon.jit
def store_group(parts, stats, base, start, step, count, ok, m1, sums1, acc1):
    """Do `online_softmax.store_partial` for every warp; base [WARPS, BM]: index of span 0 of `count`."""
    warp, _ = warps_and_numbers(ACC, 2, BM)
    span = start + step * warp
    index, ok = base + span, ok & (span < count)
    column = gl.arange(0, D // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, None, :]
    for part in gl.static_range(4):
        d = part // 2 * (D // 2) + column * 2 + part % 2
        gl.store(parts + index[:, :, None] * D + d, acc1[part], mask=ok[:, :, None])
    gl.store(stats + index * 2, m1, mask=ok)
    gl.store(stats + index * 2 + 1, gl.max(sums1, axis=2), mask=ok)  # all columns are equal


@gluon.jit
def empty_state():
    """Return maximum, sum [BM] and weighted values, four tensors [BM, D / 4], of no span."""
    zeros = gl.zeros([BM, D // 4], gl.float32, MERGED)
    total = gl.zeros([BM], gl.float32, gl.SliceLayout(1, MERGED))
    return (
        gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, MERGED)),
        total,
        (zeros, zeros, zeros, zeros),
    )


@gluon.jit
def merge_group(staged, staged_stats, state, is_first, m1, sums1, acc1):
    """Do `online_softmax.merge_partials` with the spans of all warps in ascending order; return the state.

    is_first: the state is that of another tile. Spans without keys change nothing.
    """
    m, total, acc = state
    m = gl.where(is_first, float("-inf"), m)
    total = gl.where(is_first, 0.0, total)
    staged_stats.index(0).store(m1)
    staged_stats.index(1).store(gl.max(sums1, axis=2))
    stats_of_warps = staged_stats._reinterpret(gl.float32, [2 * WARPS, BM], ROW_SHARED)
    values_of_warps = staged._reinterpret(gl.float32, [WARPS, BM, D // 4], TILE_SHARED)
    old_factors, new_factors = (), ()
    for warp in gl.static_range(WARPS):
        top1 = stats_of_warps.index(warp).load(gl.SliceLayout(1, MERGED))
        total1 = stats_of_warps.index(WARPS + warp).load(gl.SliceLayout(1, MERGED))
        top = gl.maximum(m, top1)
        a, b = gl.exp2(m - finite(top)), gl.exp2(top1 - finite(top))
        m, total = top, total * a + total1 * b
        old_factors, new_factors = old_factors + (a[:, None],), new_factors + (b[:, None],)
    merged = ()
    for part in gl.static_range(4):
        staged.store(acc1[part])
        values = gl.where(is_first, 0.0, acc[part])
        for warp in gl.static_range(WARPS):
            values = values * old_factors[warp] + values_of_warps.index(warp).load(MERGED) * new_factors[warp]
        merged = merged + (values,)
    return m, total, merged
