"""Copies of weights, keys and values into the ring, in the order in which the sublayers read them.

A sublayer is an attention block or an MLP. Each has a line in the address table, so that layers may differ in
their window and their rotary table. The addresses of a sublayer are loaded one sublayer early.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from draftproof.ops.triton.fused_dense import pool
from draftproof.ops.triton.fused_dense.attention import copy_keys_values
from draftproof.ops.triton.one_row.ring import BF16, CHUNK, ROWS_LAYOUT, STAGE_ROWS, copy_stage

# Fields of a line of the address table; the last field is the place among the taps.
NORM, OUTPUT_NORM, INPUT, OUTPUT, CACHE, WINDOW = (gl.constexpr(i) for i in range(6))
Q_NORM, K_NORM, ROPE, BIAS, TAP = (gl.constexpr(i) for i in range(6, 11))
FIELDS = gl.constexpr(11)  # fields of a line
WINDOW_UNIT = gl.constexpr(16)  # of the field of the window, because fields are multiples of 16
OUTPUT_TILE = gl.constexpr(32)  # columns of the output in a stage


@gluon.jit
def field(table, sublayer, FIELD: gl.constexpr):
    """Return a field of a line of the address table."""
    return gl.load(table + sublayer * FIELDS + FIELD)


@gluon.jit
def as_tensor(address, dtype: gl.constexpr = BF16):
    """Return a pointer to the elements of a tensor."""
    return gl.multiple_of(address.to(gl.pointer_type(dtype)), 16)


@gluon.jit
def load_sources(table, sublayer, last):
    """Return what is copied in a sublayer: norm, output norm before it, weights, cache and window."""
    line = gl.minimum(sublayer, last)
    return (
        field(table, line, NORM), field(table, gl.maximum(sublayer - 1, 0), OUTPUT_NORM),
        field(table, line, INPUT), field(table, line, OUTPUT), field(table, line, CACHE),
        field(table, line, WINDOW),
    )  # fmt: skip


@gluon.jit
def copy_norms(
    norm, output_norm, ring, full, empty, index,
    H: gl.constexpr, HAS_OUTPUT_NORM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the weights of a norm and of the output norm before it, as one stage; return the next index."""
    r = gl.arange(0, STAGE_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    c = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    row = r % (STAGE_ROWS // 2)
    exists = row < H // CHUNK
    tensors = as_tensor(norm) + row * CHUNK
    if HAS_OUTPUT_NORM:
        tensors = gl.where(r < STAGE_ROWS // 2, tensors, as_tensor(output_norm) + row * CHUNK)
    else:
        exists = exists & (r < STAGE_ROWS // 2)
    pointers = gl.multiple_of(tensors, 16)[:, None] + c[None, :]
    return copy_stage(ring, full, empty, index, pointers, exists[:, None] & (c >= 0)[None, :], STAGES)


@gluon.jit
def copy_rows(
    weight, ring, full, empty, index, first, count, depth, num_stages,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy rows first..first + count of a weight [_, depth], blocks of N rows; return the next index."""
    r = gl.arange(0, STAGE_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    c = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    n = r % N
    pointers = weight + ((first + n) * depth + r // N * CHUNK)[:, None] + c[None, :]
    exists = (n < count)[:, None] & (c >= 0)[None, :]
    for i in range(num_stages):
        index = copy_stage(ring, full, empty, index, pointers + i * (STAGE_ROWS // N * CHUNK), exists, STAGES)
    return index


@gluon.jit
def copy_mlp_input(
    weight, ring, full, empty, index, num_own, counter, layer, units, claimed, num_claims,
    H: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the units of this program, rows of gate and of up in turn, then those that it claims of the pool.

    The same thread has gate and up of a column in the product: see `rows.split_pairs`. Return the next index
    and the number of claims.
    """
    N: gl.constexpr = 2 * pool.UNIT
    r = gl.arange(0, STAGE_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    c = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    offsets = ((r % N // 2 + r % 2 * INNER) * H + r // N * CHUNK)[:, None] + c[None, :]
    column = gl.program_id(0) * num_own * pool.UNIT
    num_units = 0
    while column < INNER:
        pointers = weight + column * H + offsets
        for i in range(H * N // (STAGE_ROWS * CHUNK)):
            index = copy_stage(
                ring, full, empty, index, pointers + i * (STAGE_ROWS // N * CHUNK), None, STAGES
            )
        num_units += 1
        if num_units < num_own:
            column += pool.UNIT
        else:
            unit = pool.claim(counter, layer, units, claimed, num_claims)
            num_claims += 1
            column = (gl.num_programs(0) * num_own + unit) * pool.UNIT
    return index, num_claims


@gluon.jit
def copy_layers(
    table, page_table, positions, slots, ring, full, empty, num_layers, max_pages, plane, num_own,
    counter, units, claimed,
    H: gl.constexpr, INNER: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, QKV: gl.constexpr, QKV_TILE: gl.constexpr,
    HAS_OUTPUT_NORM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy what the sublayers of all layers read."""
    program = gl.program_id(0)
    Q: gl.constexpr = NUM_KV * GROUP * D
    OUT: gl.constexpr = H // 128
    position = gl.load(positions).to(gl.int32)
    pages = page_table + gl.maximum(gl.load(slots), 0) * max_pages
    index = 0
    num_claims = 0
    last = 2 * num_layers - 1
    following = load_sources(table, 0, last)
    for sublayer in range(last + 2):
        sources = following
        following = load_sources(table, sublayer + 1, last)
        index = copy_norms(sources[0], sources[1], ring, full, empty, index, H, HAS_OUTPUT_NORM, STAGES)
        if sublayer <= last:
            is_attention = sublayer % 2 == 0
            if is_attention:
                index = copy_rows(
                    as_tensor(sources[2]), ring, full, empty, index, program * QKV, QKV, H,
                    H * QKV_TILE // (STAGE_ROWS * CHUNK), QKV_TILE, STAGES,
                )  # fmt: skip
                index = copy_keys_values(
                    as_tensor(sources[4]), plane, pages, position, (sources[5] // WINDOW_UNIT).to(gl.int32),
                    ring, full, empty, index, NUM_KV, D, PAGE, STAGES,
                )  # fmt: skip
            else:
                index, num_claims = copy_mlp_input(
                    as_tensor(sources[2]), ring, full, empty, index, num_own, counter, sublayer // 2,
                    units, claimed, num_claims, H, INNER, STAGES,
                )  # fmt: skip
            depth = gl.multiple_of(gl.where(is_attention, Q, INNER), 16)
            index = copy_rows(
                as_tensor(sources[3]), ring, full, empty, index, program * OUT, OUT, depth,
                depth * OUTPUT_TILE // (STAGE_ROWS * CHUNK), OUTPUT_TILE, STAGES,
            )  # fmt: skip
