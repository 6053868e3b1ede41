"""Paged latent attention: all query heads attend to one row a token, whose first columns are the value.

The order of sums is that of `splitkv.py` with blocks of KEYS: it is a function of a row's position. A program
handles a tile: adjacent rows of one slot times some query heads. With few tiles their spans run in parallel,
and the last program of a tile merges them; with many a program loops over the spans of its tile. A block of
latent rows is loaded once, as keys and as values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention import online_softmax, splitkv
from draftproof.ops.triton.attention.splitkv import PartialBuffers
from draftproof.ops.triton.kernel_utils import Chip, launch_options, next_power_of_two, pdl_sync

KEYS = 32  # keys of one block, which must fit into shared memory twice; determines the bits
MAX_SPLIT_PROGRAMS = 264  # two per SM of an H200; the spans of a tile are divided up to this number
MAX_SCRATCH_BYTES = 512 << 20  # of partial results; above it a program handles all spans of its tile
LARGE_LATENT_WIDTH, MIN_FP32_SHARED_BYTES = 512, 112_704  # of the kernel in fp32 at DeepSeek's width
MAX_TILE_HEADS = 32  # query heads of one program: their sums stay in registers


@triton.jit
def attend_latent_span(
    q_latent, q_rope, pos, pages, cache, last, start, scale,
    LATENT: tl.constexpr, BL: tl.constexpr, ROPE: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Return maximum [BM], sum [BM] and weighted latents [BM, BL] of one span; keys 0..last exist."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM, ONES), tl.float32)
    acc = tl.zeros((BM, BL), tl.float32)
    d, e = tl.arange(0, BL), tl.arange(0, BR)
    for at in range(start, tl.minimum(start + SPAN, last + 1), KEYS):
        key = at + tl.arange(0, KEYS)
        exists = key <= last  # memory of other keys may hold NaN
        page = tl.load(pages + key // PAGE, mask=exists, other=0).to(tl.int64)
        row = cache + ((page * PAGE + key % PAGE) * (LATENT + ROPE))[:, None]
        latent = tl.load(row + d[None, :], mask=exists[:, None] & (d < LATENT)[None, :], other=0.0)
        rope_key = tl.load(row + (LATENT + e)[None, :], mask=exists[:, None] & (e < ROPE)[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope_key), scores, input_precision="ieee") * scale
        scores = tl.where(key[None, :] <= pos[:, None], scores, float("-inf"))
        m, p, decay = online_softmax.softmax_step(scores, m)
        sums, acc = online_softmax.accumulate_values(
            p, latent, None, decay, sums, acc, q_latent.dtype, KEYS, ONES
        )  # fmt: skip
    return m, tl.max(sums, axis=1), acc  # all columns of `sums` are equal


@triton.jit(do_not_specialize=["R", "num_parallel"])  # one binary for every number of rows
def latent_attention_kernel(
    q, slots, positions, page_table, cache, out, parts, stats, counters,
    R, max_pages, spans, num_parallel, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, BL: tl.constexpr, ROPE: tl.constexpr,
    BR: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    ONES: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of q [R, HEADS * (LATENT + ROPE)] -> out [R, HEADS * LATENT].

    Grid: rows, groups of GROUP heads, parallel spans (1 without SPLIT). parts [R * HEADS, spans, BL] and
    stats [R * HEADS, spans, 2] are used with SPLIT only.
    """
    pdl_sync(PDL)
    HEIGHT: tl.constexpr = BM // GROUP
    row = R - 1 - tl.program_id(0)  # later rows have the most keys, so they start first
    group, split = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    previous_slot = tl.load(slots + tl.maximum(row - 1, 0))
    starts_tile = (slot >= 0) & ((row % HEIGHT == 0) | (row == 0) | (previous_slot != slot))
    if starts_tile:
        i = tl.arange(0, BM)
        r, head = row + i // GROUP, group * GROUP + i % GROUP
        ok = (head < HEADS) & (r < R) & (r // HEIGHT == row // HEIGHT)
        ok = ok & (tl.load(slots + r, mask=ok, other=-1) == slot)
        pos = tl.load(positions + r, mask=ok, other=-1).to(tl.int32)
        last = tl.max(pos, axis=0)
        row_head = r.to(tl.int64) * HEADS + head  # [BM]
        d, e = tl.arange(0, BL), tl.arange(0, BR)
        inside = ok[:, None] & (d < LATENT)[None, :]
        query = q + (row_head * (LATENT + ROPE))[:, None]
        q_latent = tl.load(query + d[None, :], mask=inside, other=0.0)
        q_rope = tl.load(query + (LATENT + e)[None, :], mask=ok[:, None] & (e < ROPE)[None, :], other=0.0)
        pages = page_table + slot * max_pages
        out_at = out + row_head[:, None] * LATENT + d[None, :]
        count = last // SPAN + 1
        if SPLIT:
            if split < count:
                for s in range(split, count, num_parallel):
                    m, total, acc = attend_latent_span(
                        q_latent, q_rope, pos, pages, cache, last, s * SPAN, scale,
                        LATENT, BL, ROPE, BR, BM, PAGE, KEYS, SPAN, ONES,
                    )  # fmt: skip
                    if count == 1:
                        online_softmax.store_normalised(m, total, acc, None, out_at, inside)
                    else:
                        at = row_head * spans + s
                        online_softmax.store_partial(parts, stats, at, m, total, acc, ok, inside, BL)
                if count > 1:
                    tl.debug_barrier()
                    counter = counters + row * tl.num_programs(1) + group
                    num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                    if num_done == tl.minimum(count, num_parallel) - 1:
                        tl.store(counter, 0)
                        online_softmax.merge_stored_spans(
                            parts, stats, row_head * spans, 0, count, None, ok, inside, out_at, BM, BL
                        )  # fmt: skip
        else:
            m = tl.full((BM,), float("-inf"), tl.float32)
            total = tl.zeros((BM,), tl.float32)
            acc = tl.zeros((BM, BL), tl.float32)
            for s in range(count):
                m_new, total_new, acc_new = attend_latent_span(
                    q_latent, q_rope, pos, pages, cache, last, s * SPAN, scale,
                    LATENT, BL, ROPE, BR, BM, PAGE, KEYS, SPAN, ONES,
                )  # fmt: skip
                m, total, acc = online_softmax.merge_partials(m, total, acc, m_new, total_new, acc_new)
            online_softmax.store_normalised(m, total, acc, None, out_at, inside)


def check_shared_memory(dtype: torch.dtype, heads: AttentionShape, chip: Chip) -> None:
    """Raise ConfigError if the kernel does not fit into the shared memory of the chip."""
    is_large = dtype == torch.float32 and padded(heads.value_dim) >= LARGE_LATENT_WIDTH
    if is_large and chip.shared_per_program < MIN_FP32_SHARED_BYTES:
        raise ConfigError(
            f"latent attention in float32 needs {MIN_FP32_SHARED_BYTES} bytes of shared memory, and "
            f"{chip.name} has {chip.shared_per_program}: use dtype='bfloat16'"
        )


def tile_heads(heads: AttentionShape) -> int:
    """Return the query heads of one program."""
    return min(MAX_TILE_HEADS, next_power_of_two(heads.num_q))


def num_parallel_spans(num_rows: int, heads: AttentionShape, spans: int) -> int:
    """Return the number of spans of a tile that run in parallel; 1: a program handles all of them."""
    if num_rows * heads.num_q * spans * padded(heads.value_dim) * 4 > MAX_SCRATCH_BYTES:
        return 1
    groups = triton.cdiv(heads.num_q, tile_heads(heads))
    return max(1, min(spans, MAX_SPLIT_PROGRAMS // (num_rows * groups)))


def padded(width: int) -> int:
    """Return a width padded for the tensor core."""
    return max(16, next_power_of_two(width))


def latent_attention(
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, partials: PartialBuffers,
    pdl: bool,
) -> None:  # fmt: skip
    """Launch the kernel."""
    num_rows, max_pages, page_size = len(q), rows.page_table.shape[1], cache.shape[2]
    spans = triton.cdiv(max_pages * page_size, splitkv.SPAN)
    group, width = tile_heads(heads), padded(heads.value_dim)
    groups = triton.cdiv(heads.num_q, group)
    num_parallel = num_parallel_spans(num_rows, heads, spans)
    scratch: tuple[Tensor, ...] = (out, out, out)
    if num_parallel > 1:
        scratch = partials.reserve(num_rows * heads.num_q * spans, width, num_rows * groups)
    height = 16 if num_rows == 1 or q.dtype == torch.float32 else 32
    latent_attention_kernel[(num_rows, groups, num_parallel)](
        q, rows.slots, rows.positions, rows.page_table, cache, out, *scratch,
        num_rows, max_pages, spans, num_parallel, heads.scale * splitkv.LOG2_E,
        HEADS=heads.num_q, GROUP=group, LATENT=heads.value_dim, BL=width,
        ROPE=heads.dim - heads.value_dim, BR=padded(heads.dim - heads.value_dim), BM=max(group, height),
        PAGE=page_size, KEYS=KEYS, SPAN=splitkv.SPAN, ONES=splitkv.ONES, SPLIT=num_parallel > 1,
        **launch_options(pdl, num_warps=8 if width > 256 else 4, num_stages=2, enable_fp_fusion=False),
    )  # fmt: skip
