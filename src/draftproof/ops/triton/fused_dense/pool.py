"""Pool of columns of gate and up: programs that have multiplied their own columns take units of it.

Streaming multiprocessors read memory at different speeds, depending on how many share a path to the L2 cache:
with equal shares the slowest takes 1.4 times as long as the fastest. So each program has most of its columns
fixed, and the rest of the columns of a layer is divided into units that are claimed one after another.

The warps that copy claim a unit, publish it in shared memory, and copy its weights; a claim beyond the last
unit ends the stage. Which program computes a unit changes no bit of the result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from draftproof.ops.triton.attention.kv_rings import thread_barrier
from draftproof.ops.triton.one_row.grid_barrier import COUNTER_STRIDE, FREE_COUNTERS

UNIT = gl.constexpr(16)  # columns of gate, and as many of up
SLOTS = gl.constexpr(4)  # claims in shared memory; the ring allows fewer that are not read yet
SLOT_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def make_claims():
    """Return the claimed units [SLOTS, 1] in shared memory, and a barrier for each."""
    units = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    claimed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(claimed.index(slot), count=1)
    return units, claimed


@gluon.jit
def counter_of(counter, layer):
    """Return the counter of the claims of a layer; two layers in turn have their own."""
    return counter + (FREE_COUNTERS + layer % 2) * COUNTER_STRIDE


@gluon.jit
def claim(counter, layer, units, claimed, index):
    """Claim a unit, as claim `index` of this program, and publish it; return the unit."""
    unit = gl.atomic_add(counter_of(counter, layer), 1, sem="relaxed", scope="gpu")
    units.index(index % SLOTS).store(gl.zeros([1], gl.int32, SLOT_LAYOUT) + unit)
    thread_barrier()
    mbarrier.arrive(claimed.index(index % SLOTS), count=1)
    return unit


@gluon.jit
def claimed_unit(units, claimed, index):
    """Return the unit of claim `index` once it is published."""
    mbarrier.wait(claimed.index(index % SLOTS), index // SLOTS & 1)
    return gl.max(units.index(index % SLOTS).load(SLOT_LAYOUT), axis=0)


@gluon.jit
def reset_next(counter, layer):
    """Set the counter of the next layer to zero; all claims of the layer before this one have been made."""
    if gl.program_id(0) == 0:
        gl.store(counter_of(counter, layer + 1), 0)
