"""Merge of stored spans in the order of `online_softmax.py`: ascending.

`merge_rows` runs in the last program of a tile, one row and KV head at a time. A tile is padded to the height
of the tensor core, but partial results exist for its rows alone. One row of them is small enough that many
spans fit into registers, so their loads overlap. `merge_spans_kernel` is a launch of its own behind
`few_rows.py`, with a program per row, query head and 32 columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.attention import online_softmax

MAX_SPANS_IN_FLIGHT = 16  # whose loads overlap; more make the kernel slow to compile
REGISTERS = 128  # of a thread that may hold loaded partial results
MERGE_COLUMNS = 32  # of a program of `merge_spans_kernel`, one per thread


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


@triton.jit
def _maximum(a, b):
    """Return the maximum, for a scan."""
    return tl.maximum(a, b)


@triton.jit
def load_chunk(parts, stats, num_spans, D: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr):
    """Load CHUNK spans of a row: maxima [CHUNK], sums [CHUNK] and CHUNK tensors of values.

    parts: pointers to the first values, one per thread. MASKED: only `num_spans` of them exist.
    """
    span = tl.arange(0, CHUNK)
    values = ()
    if MASKED:
        maxima = tl.load(stats + span * 2, mask=span < num_spans, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stats + span * 2 + 1, mask=span < num_spans, other=0.0, cache_modifier=".cg")
        for i in tl.static_range(CHUNK):
            exists = span * 0 + i < num_spans
            values += (tl.load(parts + i * D, mask=exists, other=0.0, cache_modifier=".cg"),)
    else:
        maxima = tl.load(stats + span * 2, cache_modifier=".cg")
        sums = tl.load(stats + span * 2 + 1, cache_modifier=".cg")
        for i in tl.static_range(CHUNK):
            values += (tl.load(parts + i * D, cache_modifier=".cg"),)
    return maxima, sums, values


@triton.jit
def merge_chunk(top, total, acc, maxima, sums, values, CHUNK: tl.constexpr):
    """Do `merge_partials` with CHUNK spans in sequence; all tensors but `values` [CHUNK] of them.

    The running maximum is a prefix maximum, so the factors of all spans are computed together. What remains
    in sequence is a multiplication and an addition per span.
    """
    lane = tl.arange(0, CHUNK)
    tops = tl.maximum(tl.associative_scan(maxima, 0, _maximum), top)
    previous = tl.where(lane == 0, top, tl.gather(tops, tl.maximum(lane - 1, 0), 0))
    base = tl.where(tops == float("-inf"), 0.0, tops)
    a, b = tl.exp2(previous - base), tl.exp2(maxima - base)
    weighted_sums = sums * b
    for i in tl.static_range(CHUNK):
        a_i = tl.gather(a, lane * 0 + i, 0)
        total = total * a_i + tl.gather(weighted_sums, lane * 0 + i, 0)
        acc = acc * a_i + values[i] * tl.gather(b, lane * 0 + i, 0)
    return tl.gather(tops, lane * 0 + (CHUNK - 1), 0), total, acc


@triton.jit(do_not_specialize=["spans"])
def merge_spans_kernel(
    slots, positions, parts, stats, out, spans,
    HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge all spans of a row and head; grid (rows, HEADS, D / COLUMNS), a column per thread of one warp."""
    row, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(positions + row).to(tl.int32) // SPAN + 1
    count = tl.where(tl.load(slots + row) >= 0, count, 0)
    row_head = (row * HEADS + head).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    parts += row_head * spans * D + column
    stats += row_head * spans * 2
    top = tl.full((COLUMNS,), float("-inf"), tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    acc = tl.zeros((COLUMNS,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    last_start = (count - 1) // COLUMNS * COLUMNS
    # The loads of a chunk are in flight during the merge of the one before.
    maxima, sums, values = load_chunk(parts, stats, count, D, COLUMNS, True)
    for start in range(COLUMNS, last_start, COLUMNS):
        chunk = load_chunk(parts + start * D, stats + start * 2, count, D, COLUMNS, False)
        top, total, acc = merge_chunk(top, total, acc, maxima, sums, values, COLUMNS)
        maxima, sums, values = chunk
    if last_start > 0:
        chunk = load_chunk(
            parts + last_start * D, stats + last_start * 2, count - last_start, D, COLUMNS, True
        )
        top, total, acc = merge_chunk(top, total, acc, maxima, sums, values, COLUMNS)
        maxima, sums, values = chunk
    if count > 0:
        top, total, acc = merge_chunk(top, total, acc, maxima, sums, values, COLUMNS)
        tl.store(out + row_head * D + column, (acc / total + 0.0).to(out.dtype.element_ty))
