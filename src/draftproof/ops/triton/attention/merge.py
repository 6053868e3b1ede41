"""Merge of the stored spans of a tile, one row and KV head at a time.

A tile is padded to the height of the tensor core, but partial results exist for its rows alone. One row of
them is small enough that many spans fit into registers, so their loads overlap. The order is that of
`online_softmax.py`: ascending.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.attention import online_softmax

MAX_SPANS_IN_FLIGHT = 16  # whose loads overlap; more make the kernel slow to compile
REGISTERS = 128  # of a thread that may hold loaded partial results


def spans_in_flight(warps: int, group_padded: int, width: int) -> int:
    """Return the number of spans whose partial results of one row fit into registers."""
    return max(4, min(MAX_SPANS_IN_FLIGHT, REGISTERS * 32 * warps // (group_padded * width)))


@triton.jit
def merge_several(
    parts, stats, index, num_spans, d, m, total, acc, ok, inside, BD: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Merge the spans at index [GROUP_PADDED], index + 1, ...: SPANS of them, of which `num_spans` exist."""
    loaded = ()
    for i in tl.static_range(SPANS):
        exists = ok & (i < num_spans)
        loaded = loaded + (online_softmax.load_partial(parts, stats, index + i, d, exists, inside, BD),)
    for i in tl.static_range(SPANS):
        m, total, acc = online_softmax.merge_partials(m, total, acc, loaded[i][0], loaded[i][1], loaded[i][2])
    return m, total, acc


@triton.jit
def merge_rows(
    parts, stats, sinks, out, row, num_rows, head, spans, first_span, count,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, GROUP_PADDED: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """Merge spans first_span..first_span + count of rows row..row + num_rows and store the results."""
    TAIL: tl.constexpr = IN_FLIGHT // 4  # a step of the last spans, of which some may not exist
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, BD)
    ok = g < GROUP
    inside = ok[:, None] & (d < D)[None, :]
    sink = None if sinks is None else online_softmax.load_sinks(sinks + head * GROUP, tl.where(ok, g, 0))
    for r in range(row, row + num_rows):
        row_head = (r * (NUM_KV * GROUP) + head * GROUP + g).to(tl.int64)  # [GROUP_PADDED]
        index = row_head * spans + first_span
        m = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PADDED,), tl.float32)
        acc = tl.zeros((GROUP_PADDED, BD), tl.float32)
        tail = count // IN_FLIGHT * IN_FLIGHT
        for at in range(0, tail, IN_FLIGHT):
            m, total, acc = merge_several(
                parts, stats, index + at, IN_FLIGHT, d, m, total, acc, ok, inside, BD, IN_FLIGHT
            )
        for at in range(tail, count, TAIL):
            m, total, acc = merge_several(
                parts, stats, index + at, count - at, d, m, total, acc, ok, inside, BD, TAIL
            )
        out_at = out + row_head[:, None] * D + d[None, :]
        online_softmax.store_normalised(m, total, acc, sink, out_at, inside)
