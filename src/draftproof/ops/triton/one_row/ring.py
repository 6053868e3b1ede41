"""Ring of weights, keys and values in shared memory, and the GEMM of one row that reads it.

A stage of the ring holds STAGE_ROWS rows of 64 bf16 columns. Four warps copy stages in the order in which
four others compute with them, and are ahead by as many stages as the ring has. Only the weights of experts
depend on the routing, so others are copied while the computing warps wait for other programs.

The weights are the left operand and the row is the right one, repeated in 8 columns: the tensor core
multiplies 8 columns at least. A left operand of one row would need a copy of each register, which makes the
code of a product twice as long. Sums over k have the order of `gemm/dense.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, mma_v2

from draftproof.ops.triton.attention.kv_rings import thread_barrier

BF16 = gl.bfloat16
STAGE_ROWS = gl.constexpr(128)  # rows of a stage
CHUNK = gl.constexpr(64)  # columns of a row in a stage
COPY_THREADS = gl.constexpr(128)  # threads that copy: four warps
# Rows of a stage, divided between four warps.
ROWS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Result [rows of the weight, columns] of a product, the weight and the row.
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
WEIGHT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
COLUMN = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
MMA_COLUMNS = gl.constexpr(8)  # columns of the right operand: the minimum of the tensor core


@gluon.jit
def make_ring(STAGES: gl.constexpr):
    """Return the ring [STAGES, STAGE_ROWS, CHUNK] and its barriers: stages that are full, and empty."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STAGE_ROWS, CHUNK], BF16)
    ring = gl.allocate_shared_memory(BF16, [STAGES, STAGE_ROWS, CHUNK], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=COPY_THREADS)  # every thread that copies
        mbarrier.init(empty.index(stage), count=1)
    return ring, full, empty


@gluon.jit
def blocks_of(ring, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Return the memory of a ring as COUNT blocks [ROWS, WIDTH]; the chunks of a block are contiguous."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], BF16)
    return ring._reinterpret(BF16, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def copy_stage(ring, full, empty, index, pointers, mask, STAGES: gl.constexpr):
    """Start the copy of stage `index` once it is empty; return the next index. Masked elements are zeros."""
    mbarrier.wait(empty.index(index % STAGES), (index // STAGES & 1) ^ 1)
    if mask is None:
        async_copy.async_copy_global_to_shared(ring.index(index % STAGES), pointers)
    else:
        async_copy.async_copy_global_to_shared(ring.index(index % STAGES), pointers, mask=mask)
    async_copy.mbarrier_arrive(full.index(index % STAGES), increment_count=False)
    return index + 1


@gluon.jit
def wait_full(full, index, STAGES: gl.constexpr):
    """Wait until stage `index` is copied."""
    mbarrier.wait(full.index(index % STAGES), index // STAGES & 1)


@gluon.jit
def release(empty, index, COUNT: gl.constexpr, STAGES: gl.constexpr):
    """Mark COUNT stages from `index` on as empty, after all warps have read them."""
    thread_barrier()
    for i in gl.static_range(COUNT):
        mbarrier.arrive(empty.index((index + i) % STAGES), count=1)


@gluon.jit
def repeated_column(line):
    """Return a line [WIDTH] of shared memory as every column of a right operand."""
    row = line.load(gl.SliceLayout(1, COLUMN))
    column, _ = gl.broadcast(row[:, None], gl.zeros([row.shape[0], MMA_COLUMNS], BF16, COLUMN))
    return column


@gluon.jit
def multiply(lines, ring, full, empty, index, N: gl.constexpr, PER_STAGE: gl.constexpr, STAGES: gl.constexpr):
    """Multiply COUNT blocks [N, WIDTH] of the ring, PER_STAGE in a stage, by the row in lines [COUNT, WIDTH].

    Return the product, the same [N] in MMA_COLUMNS columns, and the next index.
    """
    blocks = blocks_of(ring, STAGES * PER_STAGE, N, lines.shape[1])
    acc = gl.zeros([N, MMA_COLUMNS], gl.float32, PRODUCT)
    for i in range(lines.shape[0] // PER_STAGE):
        wait_full(full, index, STAGES)
        for b in gl.static_range(PER_STAGE):
            block = blocks.index(index % STAGES * PER_STAGE + b).load(WEIGHT)
            column = repeated_column(lines.index(i * PER_STAGE + b))
            if b == PER_STAGE - 1:
                release(empty, index, 1, STAGES)
            acc = mma_v2(block, column, acc)
        index += 1
    return acc, index


@gluon.jit
def rows_of_product(N: gl.constexpr):
    """Return the indices [N] of the rows of a product."""
    return gl.arange(0, N, layout=gl.SliceLayout(1, PRODUCT))


@gluon.jit
def store_first_column(target, value, COUNT: gl.constexpr):
    """Store the first COUNT elements of column 0 of value [N, MMA_COLUMNS]."""
    row = gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
    column = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
    offset, _ = gl.broadcast(row[:, None], value)
    gl.store(target + offset, value, mask=(row < COUNT)[:, None] & (column == 0)[None, :])


@gluon.jit
def store_lines(lines, x):
    """Store x [N, CHUNK] to shared memory, one line after the other."""
    flat = lines._reinterpret(BF16, [x.shape[0] * x.shape[1]], lines.type.layout)
    flat.store(gl.reshape(x, [x.shape[0] * x.shape[1]]))
    thread_barrier()


@gluon.jit
def lines_of(lines, LENGTH: gl.constexpr, WIDTH: gl.constexpr):
    """Return the memory of lines as LENGTH elements in lines of WIDTH."""
    return lines._reinterpret(BF16, [LENGTH // WIDTH, WIDTH], lines.type.layout)


@gluon.jit
def load_lines(row, LENGTH: gl.constexpr):
    """Load a row that other programs of this launch have written, as [LENGTH // CHUNK, CHUNK]."""
    i = gl.arange(0, LENGTH // CHUNK, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    return gl.load(row + i[:, None] * CHUNK + j[None, :], cache_modifier=".cg")
