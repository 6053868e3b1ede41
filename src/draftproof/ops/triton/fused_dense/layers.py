"""All layers of a dense model in one cooperative kernel, for one row.

With one row most of the time of an op is its launch and its chain of dependent loads. Here every program
runs all sublayers, attention blocks and MLPs. A sublayer has these stages: sum and norm; QKV and attention,
or gate and up; output or down projection. A grid barrier separates stages that read what other programs have
computed. Every program has the whole residual and computes all norms, and its own columns of each product.
Four warps copy weights ahead of the stage that reads them, see `copies.py`.

Bits equal those of the separate ops. Written in Gluon, which Triton's interpreter does not run. The size of
the code matters: each stage runs once a layer, so its instructions are no longer in the instruction cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from draftproof.ops.triton import elementwise
from draftproof.ops.triton.attention.kv_rings import thread_barrier
from draftproof.ops.triton.fused_dense import copies, pool
from draftproof.ops.triton.fused_dense.attention import (
    MERGED_COLUMNS,
    attend_items,
    load_head_inputs,
    visible_keys,
)
from draftproof.ops.triton.fused_dense.copies import OUTPUT_TILE, as_tensor, field
from draftproof.ops.triton.fused_dense.rows import (
    PIECE,
    add_and_norm,
    columns_of,
    copy_row,
    half_of_copies,
    multiply_row,
    row_offsets,
    split_pairs,
    store_columns,
)
from draftproof.ops.triton.one_row.grid_barrier import reset, synchronise
from draftproof.ops.triton.one_row.ring import (
    BF16,
    CHUNK,
    ROWS_LAYOUT,
    STAGE_ROWS,
    lines_of,
    make_ring,
)
from draftproof.ops.triton.one_row.spans import FEW_SPANS, HEAD_ROWS, merge_spans

act_gate = gluon.jit(elementwise.act_gate.fn)


@gluon.jit
def attention_stage(
    line, qkv, out, parts, stats, position, kv_index, is_real, plane, spans, scale, eps, counter, goal,
    ring, lines, full, empty, index,
    H: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, QKV: gl.constexpr,
    QKV_TILE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_Q_NORM: gl.constexpr, HAS_K_NORM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Store the attention of the normed row in lines to out; return the new goal and the next index."""
    WIDTH: gl.constexpr = STAGE_ROWS * CHUNK // QKV_TILE
    program = gl.program_id(0)
    window = (line[1] // copies.WINDOW_UNIT).to(gl.int32)
    inputs = load_head_inputs(
        as_tensor(line[2]), as_tensor(line[3]), as_tensor(line[4], gl.float32), position,
        D, HAS_Q_NORM, HAS_K_NORM,
    )  # fmt: skip
    acc, index = multiply_row(
        lines_of(lines, H, WIDTH), ring, full, empty, index, H // WIDTH, QKV_TILE, STAGES
    )
    product = half_of_copies(acc, QKV_TILE)
    if HAS_BIAS:  # added in fp32; the sum is rounded once
        column = columns_of(product, QKV_TILE)[0]
        bias = as_tensor(line[5], gl.float32) + program * QKV
        product += gl.load(bias + column, mask=column < QKV, other=0.0)
    store_columns(qkv + program * QKV, product.to(BF16), QKV, QKV_TILE)
    goal = synchronise(counter, goal)
    index = attend_items(
        qkv, inputs, as_tensor(line[0]), out, parts, stats, position, window, kv_index, is_real, plane, spans,
        scale, eps, ring, lines, full, empty, index, NUM_KV, GROUP, D, HAS_Q_NORM, HAS_K_NORM, STAGES,
    )  # fmt: skip
    num_spans = visible_keys(position, window)[2]
    if num_spans > FEW_SPANS:
        goal = synchronise(counter, goal)
        if program < NUM_KV * GROUP * D // MERGED_COLUMNS:
            merge_spans(parts, stats, out, num_spans, spans, MERGED_COLUMNS, D)
    return goal, index


@gluon.jit
def gate_up_stage(
    out, ring, lines, full, empty, index, num_own, units, claimed, num_claims,
    H: gl.constexpr, INNER: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store act(gate) * up of the normed row in lines: own units, then those claimed of the pool.

    Return the next index and the number of claims.
    """
    UNIT: gl.constexpr = pool.UNIT
    WIDTH: gl.constexpr = STAGE_ROWS * CHUNK // (2 * UNIT)
    column = gl.program_id(0) * num_own * UNIT
    num_units = 0
    while column < INNER:
        acc, index = multiply_row(
            lines_of(lines, H, WIDTH), ring, full, empty, index, H // WIDTH, 2 * UNIT, STAGES
        )
        gate, up = split_pairs(half_of_copies(acc, 2 * UNIT))
        gate, up = gate.to(BF16).to(gl.float32), up.to(BF16).to(gl.float32)
        store_columns(out + column, act_gate(gate, up, ACTIVATION).to(BF16), UNIT, UNIT)
        num_units += 1
        if num_units < num_own:
            column += UNIT
        else:
            unit = pool.claimed_unit(units, claimed, num_claims)
            num_claims += 1
            column = (gl.num_programs(0) * num_own + unit) * UNIT
    return index, num_claims


@gluon.jit
def compute_layers(
    table, x, output, qkv, wide, parts, stats, taps, positions, slots, kv_indices, counter, ring, lines,
    residual, full, empty, units, claimed, num_layers, plane, spans, num_own, eps, scale,
    H: gl.constexpr, PADDED: gl.constexpr, INNER: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, QKV: gl.constexpr, QKV_TILE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_Q_NORM: gl.constexpr, HAS_K_NORM: gl.constexpr, HAS_OUTPUT_NORM: gl.constexpr,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the sublayers of all layers, then the last sum."""
    program = gl.program_id(0)
    Q: gl.constexpr = NUM_KV * GROUP * D
    OUT: gl.constexpr = H // 128
    WIDTH: gl.constexpr = STAGE_ROWS * CHUNK // OUTPUT_TILE
    position = gl.load(positions).to(gl.int32)
    is_real, kv_index = gl.load(slots) >= 0, gl.load(kv_indices)
    offsets, exists = row_offsets(H, PADDED)
    residual.store(gl.load(x + offsets, mask=exists, other=0.0))
    index = 0
    num_claims = 0
    goal = 0
    last = 2 * num_layers - 1
    for sublayer in range(last + 2):
        at = gl.minimum(sublayer, last)
        line = (
            field(table, at, copies.CACHE), field(table, at, copies.WINDOW), field(table, at, copies.Q_NORM),
            field(table, at, copies.K_NORM), field(table, at, copies.ROPE), field(table, at, copies.BIAS),
        )  # fmt: skip
        tap = field(table, gl.maximum(sublayer - 1, 0), copies.TAP)
        index = add_and_norm(
            output, residual, lines, ring, full, empty, index, sublayer == 0, eps, H, PADDED, HAS_OUTPUT_NORM,
            STAGES,
        )  # fmt: skip
        if (tap >= 0) & (program == 0):
            gl.store(taps + tap * H + offsets, residual.load(ROWS_LAYOUT), mask=exists)
        if sublayer <= last:
            is_attention = sublayer % 2 == 0
            if is_attention:
                goal, index = attention_stage(
                    line, qkv, wide, parts, stats, position, kv_index, is_real, plane, spans, scale, eps,
                    counter, goal, ring, lines, full, empty, index, H, NUM_KV, GROUP, D, QKV, QKV_TILE,
                    HAS_BIAS, HAS_Q_NORM, HAS_K_NORM, STAGES,
                )  # fmt: skip
                pool.reset_next(counter, sublayer // 2)
            else:
                index, num_claims = gate_up_stage(
                    wide, ring, lines, full, empty, index, num_own, units, claimed,
                    num_claims, H, INNER, ACTIVATION, STAGES,
                )  # fmt: skip
            length = gl.where(is_attention, Q, INNER)
            goal = synchronise(counter, goal)
            copy_row(wide, lines, length, max(Q, INNER))
            acc, index = multiply_row(
                lines_of(lines, max(Q, INNER), WIDTH), ring, full, empty, index, length // WIDTH,
                OUTPUT_TILE, STAGES,
            )  # fmt: skip
            product = half_of_copies(acc, OUTPUT_TILE).to(BF16)
            store_columns(output + program * OUT, product, OUT, OUTPUT_TILE)
            goal = synchronise(counter, goal)
    if program == 0:
        gl.store(x + offsets, residual.load(ROWS_LAYOUT), mask=exists)
    reset(counter)


@gluon.jit(do_not_specialize=["num_layers", "spans", "num_own"])  # one binary
def fused_dense_kernel(
    table, x, output, qkv, wide, parts, stats, taps, positions, slots, kv_indices, page_table, counter,
    num_layers, max_pages, plane, spans, num_own, eps, scale,
    H: gl.constexpr, PADDED: gl.constexpr, INNER: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, PAGE: gl.constexpr, QKV: gl.constexpr, QKV_TILE: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_Q_NORM: gl.constexpr, HAS_K_NORM: gl.constexpr,
    HAS_OUTPUT_NORM: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Run all layers on the row x [H] in place.

    PADDED: H, or the next power of two. QKV: columns of a program in q, k and v; QKV_TILE: padded. num_own:
    units of gate and up of a program besides those of the pool, see `pool.py`.

    output [H], qkv, wide [Q or INNER]: rows of a product that all programs read. taps [_, H]: the residual
    after the layers that have a tap. parts, stats: see `online_softmax`.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring, full, empty = make_ring(STAGES)
    # the row of a product in whole pieces, or the heads of an item of attention and its queries
    LENGTH: gl.constexpr = max(PADDED, NUM_KV * GROUP * D, INNER, 2 * HEAD_ROWS * D)
    lines = gl.allocate_shared_memory(BF16, [(LENGTH + PIECE - 1) // PIECE * (PIECE // CHUNK), CHUNK], plain)
    residual = gl.allocate_shared_memory(
        BF16, [PADDED // CHUNK, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    units, claimed = pool.make_claims()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute_layers, (table, x, output, qkv, wide, parts, stats, taps, positions, slots, kv_indices,
                              counter, ring, lines, residual, full, empty, units, claimed, num_layers, plane,
                              spans, num_own, eps, scale, H, PADDED, INNER, NUM_KV, GROUP, D, QKV, QKV_TILE,
                              HAS_BIAS, HAS_Q_NORM, HAS_K_NORM, HAS_OUTPUT_NORM, ACTIVATION, STAGES)),
            (copies.copy_layers, (table, page_table, positions, slots, ring, full, empty, num_layers,
                                  max_pages, plane, num_own, counter, units, claimed, H, INNER, NUM_KV,
                                  GROUP, D, PAGE, QKV, QKV_TILE, HAS_OUTPUT_NORM, STAGES)),
        ],
        [4], [COPY_REGISTERS],
    )  # fmt: skip
