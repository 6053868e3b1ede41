"""Split-KV attention of one row with wide heads, whose first span is loaded before the previous kernel ends.

With one row attention is a chain of dependent loads: page ids, keys and values, queries. Keys and values of
earlier passes do not depend on the previous kernel, so a program loads those of its first span before it
waits. After the wait it loads the queries and the keys of this pass. The sums are those of `splitkv.py`, bit
for bit. Measured on sm_90 only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention import online_softmax
from draftproof.ops.triton.attention.kv_cache import kv_offset
from draftproof.ops.triton.attention.merge import merge_rows, spans_in_flight
from draftproof.ops.triton.attention.online_softmax import load_sinks, store_normalised, store_partial
from draftproof.ops.triton.fused.attention import attend_span, load_kv_blocks
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_launch_next, pdl_wait

MAX_ROWS = 8  # rows that the kernel supports
MAX_SELECTED_ROWS = 1  # rows up to which it is used
WIDTH = 256  # elements of a padded head; narrower heads gain nothing
NUM_WARPS = 8
EXTRA_SHARED_BYTES = 12 << 10  # shared memory for queries and scores, beside keys and values
HEIGHT, ONES = 16, 16  # rows times heads of a tile, columns of ones: the minimum of the tensor core


@triton.jit
def load_span(
    cache, plane, pages, span, head, first, last, new,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Load the blocks of keys and values of a span, without keys from position `new` on.

    Also returned: the offset of each key, and which keys from `new` on exist.
    """
    offsets, old, recent, zeros = (), (), (), ()
    for b in tl.static_range(SPAN // KEYS):
        key = span * SPAN + b * KEYS + tl.arange(0, KEYS)
        exists = (key >= first) & (key <= last)  # memory of other keys may hold NaN
        page = tl.load(pages + key // PAGE, mask=exists, other=0)
        offsets = offsets + (kv_offset(cache, page, key, NUM_KV, D, PAGE) + head * D,)
        old = old + (exists & (key < new),)
        recent = recent + (exists & (key >= new),)
        zeros = zeros + (0.0,)
    ks, vs = load_kv_blocks(cache, plane, offsets, old, zeros, zeros, D, BD, KEYS, SPAN)
    return ks, vs, offsets, recent


@triton.jit
def first_new_key(slots, positions, slot, last, R, MAX_ROWS: tl.constexpr):
    """Return the position of the first key that this pass stores for a slot."""
    r = tl.arange(0, MAX_ROWS)
    is_own = tl.load(slots + r, mask=r < R, other=-1) == slot
    position = tl.load(positions + r, mask=r < R, other=0).to(tl.int32)
    return tl.min(tl.where(is_own, position, last), axis=0)


@triton.jit(do_not_specialize=["R", "num_parallel"])  # one binary for every number of rows
def preloaded_attention_kernel(
    q, slots, positions, page_table, cache, out, parts, stats, counters, sinks,
    R, max_pages, plane, spans, num_parallel, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    MAX_ROWS: tl.constexpr, GROUP_PADDED: tl.constexpr, IN_FLIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of q [R, heads * D] -> out, R <= MAX_ROWS; parts, stats: see `splitkv_attention_kernel`."""
    pdl_launch_next(PDL)
    HEIGHT: tl.constexpr = BM // GROUP
    HEADS: tl.constexpr = NUM_KV * GROUP
    row, head, split = R - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    previous_slot = tl.load(slots + tl.maximum(row - 1, 0))
    starts_tile = (slot >= 0) & ((row % HEIGHT == 0) | (row == 0) | (previous_slot != slot))
    if starts_tile:
        i = tl.arange(0, BM)
        r = row + i // GROUP
        ok = (i < HEIGHT * GROUP) & (r < R) & (r // HEIGHT == row // HEIGHT)
        ok = ok & (tl.load(slots + r, mask=ok, other=-1) == slot)
        pos = tl.load(positions + r, mask=ok, other=-1).to(tl.int32)
        last = tl.max(pos, axis=0)
        first_position = tl.min(tl.where(ok, pos, last), axis=0)
        first = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW else first_position * 0
        first_span = first // SPAN
        count = last // SPAN - first_span + 1
        length = tl.cdiv(count, num_parallel)  # spans of a program, the same number in all but the last
        start = first_span + split * length
        if split * length < count:  # otherwise nothing is read that the previous kernel writes
            end = tl.minimum(start + length, first_span + count)
            pages = page_table + slot * max_pages
            d = tl.arange(0, BD)
            row_head = r.to(tl.int64) * HEADS + head * GROUP + i % GROUP  # [BM]: which (row, head)
            inside = ok[:, None] & (d < D)[None, :]
            q_offset = row_head[:, None] * D + d[None, :]
            base = row_head * spans
            new = first_new_key(slots, positions, slot, last, R, MAX_ROWS)
            ks, vs, offsets, recent = load_span(
                cache, plane, pages, start, head, first, last, new, NUM_KV, D, BD, PAGE, KEYS, SPAN
            )
            sink = None if sinks is None else load_sinks(sinks, head * GROUP + i % GROUP)
            pdl_wait(PDL)
            query = tl.load(q + q_offset, mask=inside, other=0.0)
            ks, vs = load_kv_blocks(cache, plane, offsets, recent, ks, vs, D, BD, KEYS, SPAN)
            m, total, acc = attend_span(
                query, ks, vs, pos, start * SPAN, scale, BD, BM, WINDOW, KEYS, SPAN, ONES
            )
            if count == 1:
                store_normalised(m, total, acc, sink, out + q_offset, inside)
            else:
                store_partial(parts, stats, base + start, m, total, acc, ok, inside, BD)
            for span in tl.range(start + 1, end, num_stages=1):
                ks, vs, _, _ = load_span(
                    cache, plane, pages, span, head, first, last, last + 1, NUM_KV, D, BD, PAGE, KEYS, SPAN
                )
                m, total, acc = attend_span(
                    query, ks, vs, pos, span * SPAN, scale, BD, BM, WINDOW, KEYS, SPAN, ONES
                )
                store_partial(parts, stats, base + span, m, total, acc, ok, inside, BD)
            if count > 1:
                tl.debug_barrier()
                counter = counters + row * NUM_KV + head
                num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if num_done == tl.cdiv(count, length) - 1:
                    tl.store(counter, 0)
                    merge_rows(
                        parts, stats, sinks, out, row, tl.sum(ok.to(tl.int32)) // GROUP, head, spans,
                        first_span, count, NUM_KV, GROUP, D, BD, GROUP_PADDED, IN_FLIGHT,
                    )  # fmt: skip
    else:  # a pass of padding alone must not complete before the previous kernel either
        pdl_wait(PDL)


def is_selected(q: Tensor, width: int, cache: Tensor, max_shared_bytes: int) -> bool:
    """Return whether `launch` is used for queries q [R, heads * D] of heads padded to `width`."""
    if len(q) > MAX_SELECTED_ROWS or width != WIDTH:
        return False
    span_bytes = 2 * online_softmax.SPAN * width * cache.element_size()
    return q.dtype == cache.dtype == torch.bfloat16 and span_bytes + EXTRA_SHARED_BYTES <= max_shared_bytes


def launch(
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, scratch: tuple[Tensor, ...],
    num_parallel: int, width: int, pdl: bool, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Store the attention of q to `out`; scratch: see `splitkv.PartialBuffers.reserve`."""
    num_rows, max_pages, page_size = len(q), rows.page_table.shape[1], cache.shape[2]
    group = heads.num_q // heads.num_kv
    padded = next_power_of_two(group)
    preloaded_attention_kernel[(num_rows, heads.num_kv, num_parallel)](
        q, rows.slots, rows.positions, rows.page_table, cache, out, *scratch, sinks,
        num_rows, max_pages, cache.stride(0), triton.cdiv(max_pages * page_size, online_softmax.SPAN),
        num_parallel, heads.scale * online_softmax.LOG2_E,
        NUM_KV=heads.num_kv, GROUP=group, D=heads.dim, BD=width, BM=max(HEIGHT, padded), PAGE=page_size,
        WINDOW=heads.window, KEYS=online_softmax.KEYS, SPAN=online_softmax.SPAN, ONES=ONES, MAX_ROWS=MAX_ROWS,
        GROUP_PADDED=padded, IN_FLIGHT=spans_in_flight(NUM_WARPS, padded, width),
        **launch_options(pdl, num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=False),
    )  # fmt: skip
