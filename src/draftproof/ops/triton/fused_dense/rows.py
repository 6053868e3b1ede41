"""Steps of one row that every program computes: loading it, its norms and sums, and a product with the ring.

A stage of the ring holds a block [N, WIDTH] of a weight, N columns of the product and WIDTH of its depth. The
operands of a stage are loaded before the product of the stage before, so that the chain of tensor core
instructions is not interrupted. Sums over k have the order of `gemm/dense.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from draftproof.ops.triton import elementwise
from draftproof.ops.triton.attention.kv_rings import thread_barrier
from draftproof.ops.triton.one_row.ring import (
    BF16,
    CHUNK,
    MMA_COLUMNS,
    PRODUCT,
    ROWS_LAYOUT,
    STAGE_ROWS,
    WEIGHT,
    blocks_of,
    lines_of,
    release,
    repeated_column,
    store_lines,
    wait_full,
)

# Result [copies, columns] of a product with few columns, the row and the weight.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]), 2))
MMA_ROWS = gl.constexpr(16)  # rows of the left operand: the minimum of the tensor core
FEW_COLUMNS = gl.constexpr(32)  # columns of a block whose product has the row as its left operand
PIECE = gl.constexpr(1024)  # elements of a row that are copied together: 16 bytes a thread
PIECE_LAYOUT = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))

tree_sum_rows = gluon.jit(elementwise.tree_sum_rows.fn)


@gluon.jit
def copy_row(source, lines, length, LENGTH: gl.constexpr):
    """Copy `length` elements that all programs have written to lines in shared memory, LENGTH at most."""
    pieces = lines_of(lines, (LENGTH + PIECE - 1) // PIECE * PIECE, PIECE)
    i = gl.arange(0, PIECE, layout=PIECE_LAYOUT)
    for piece in range((length + PIECE - 1) // PIECE):
        at = piece * PIECE + i
        async_copy.async_copy_global_to_shared(pieces.index(piece), source + at, mask=at < length)
    async_copy.commit_group()
    async_copy.wait_group(0)
    thread_barrier()


@gluon.jit
def row_offsets(H: gl.constexpr, PADDED: gl.constexpr):
    """Return the offsets [PADDED // CHUNK, CHUNK] of a row of H elements, and which of them exist."""
    i = gl.arange(0, PADDED // CHUNK, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    return i[:, None] * CHUNK + j[None, :], (i < H // CHUNK)[:, None] & (j >= 0)[None, :]


@gluon.jit
def normed(x, weight, eps, H: gl.constexpr):
    """Return the RMS norm of a row x [M, CHUNK] in fp32, zero beyond H, with the bits of `elementwise.py`."""
    M: gl.constexpr = x.shape[0]
    every: gl.constexpr = gl.BlockedLayout([M // 32], [32], [4], [0])  # each warp has all sums of lines
    sums = gl.convert_layout(tree_sum_rows(x * x), every)
    total = gl.sum(tree_sum_rows(gl.reshape(sums, [1, M])), axis=0)
    scale = gl.rsqrt(total / H + eps)
    return ((x * scale).to(BF16).to(gl.float32) * weight.to(gl.float32)).to(BF16)


@gluon.jit
def add_and_norm(
    output, residual, lines, ring, full, empty, index, is_first, eps,
    H: gl.constexpr, PADDED: gl.constexpr, OUTPUT_NORM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the row output [H] to the residual and store the norm of the sum to lines; return the next index.

    A stage has the weights: rows 0 to 63 of the norm, the others of the norm of the output before the sum.
    is_first: there is no output yet.
    """
    ROWS: gl.constexpr = PADDED // CHUNK
    BLOCKS: gl.constexpr = STAGE_ROWS // ROWS
    weights = blocks_of(ring, STAGES * BLOCKS, ROWS, CHUNK)
    offsets, exists = row_offsets(H, PADDED)
    x = gl.load(output + offsets, mask=exists, other=0.0, cache_modifier=".cg").to(gl.float32)
    before = residual.load(ROWS_LAYOUT).to(gl.float32)
    wait_full(full, index, STAGES)
    if OUTPUT_NORM:
        output_weight = weights.index(index % STAGES * BLOCKS + BLOCKS // 2).load(ROWS_LAYOUT)
        x = normed(x, output_weight, eps, H).to(gl.float32)
    total = gl.where(is_first, before, (x + before).to(BF16).to(gl.float32))
    residual.store(total.to(BF16))
    weight = weights.index(index % STAGES * BLOCKS).load(ROWS_LAYOUT)
    store_lines(lines, normed(total, weight, eps, H))
    release(empty, index, 1, STAGES)
    return index + 1


@gluon.jit
def load_operands(lines, blocks, full, index, i, N: gl.constexpr, STAGES: gl.constexpr):
    """Load the operands of a product: line i of the row and the block of stage `index`, in either order.

    The row is repeated, 16 times as the left operand and 8 times as the right one. It is the left operand if
    a block has too few columns for the rows of four warps.
    """
    WIDTH: gl.constexpr = STAGE_ROWS * CHUNK // N
    wait_full(full, index, STAGES)
    block, line = blocks.index(index % STAGES), lines.index(i)
    if N == FEW_COLUMNS:
        row = line.load(gl.SliceLayout(0, LEFT))[None, :]
        row = gl.broadcast(row, gl.zeros([MMA_ROWS, WIDTH], BF16, LEFT))[0]
        return row, block.permute((1, 0)).load(RIGHT)
    else:
        return block.load(WEIGHT), repeated_column(line)


@gluon.jit
def multiply_row(lines, ring, full, empty, index, count, N: gl.constexpr, STAGES: gl.constexpr):
    """Multiply `count` lines [_, WIDTH] by as many stages; return the product and the next index.

    The product is [16, N] if N is FEW_COLUMNS, otherwise [N, 8]; all rows, or columns, are the same.
    """
    blocks = blocks_of(ring, STAGES, N, STAGE_ROWS * CHUNK // N)
    left, right = load_operands(lines, blocks, full, index, 0, N, STAGES)
    if N == FEW_COLUMNS:
        acc = gl.zeros([MMA_ROWS, N], gl.float32, MMA)
    else:
        acc = gl.zeros([N, MMA_COLUMNS], gl.float32, PRODUCT)
    for i in range(1, count):
        release(empty, index, 1, STAGES)
        index += 1
        next_left, next_right = load_operands(lines, blocks, full, index, i, N, STAGES)
        acc = mma_v2(left, right, acc)
        left, right = next_left, next_right
    release(empty, index, 1, STAGES)
    return mma_v2(left, right, acc), index + 1


@gluon.jit
def half_of_copies(product, N: gl.constexpr):
    """Return half of the equal rows or columns of a product of N columns: no data moves."""
    if N == FEW_COLUMNS:
        pairs = gl.permute(gl.reshape(product, [2, MMA_ROWS // 2, N]), (1, 2, 0))
    else:
        pairs = gl.reshape(product, [N, MMA_COLUMNS // 2, 2])
    return gl.split(pairs)[0]


@gluon.jit
def split_pairs(product):
    """Return the even and the odd columns of a product of FEW_COLUMNS: no data moves."""
    return gl.split(gl.reshape(product, [product.shape[0], product.shape[1] // 2, 2]))


@gluon.jit
def columns_of(product, N: gl.constexpr):
    """Return the column of each element of a product of N columns, and whether it is the first copy."""
    if product.shape[0] == MMA_ROWS // 2:
        column = gl.arange(0, N, layout=gl.SliceLayout(0, product.type.layout))[None, :]
        copy = gl.arange(0, product.shape[0], layout=gl.SliceLayout(1, product.type.layout))[:, None]
    else:
        column = gl.arange(0, N, layout=gl.SliceLayout(1, product.type.layout))[:, None]
        copy = gl.arange(0, product.shape[1], layout=gl.SliceLayout(0, product.type.layout))[None, :]
    column, copy = gl.broadcast(column, copy)
    return column, copy == 0


@gluon.jit
def store_columns(target, product, count, N: gl.constexpr):
    """Store the first `count` columns of a product of N."""
    column, is_first = columns_of(product, N)
    gl.store(target + column, product, mask=is_first & (column < count))
