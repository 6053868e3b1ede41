"""Grid barrier between the programs of one launch: a counter of arrivals, see `fused/barrier.py`.

The warps that compute are the first ones of a program, so its first thread is one of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from draftproof.ops.triton.attention.kv_rings import thread_barrier
from draftproof.ops.triton.fused.barrier import ARRIVE_PTX, WAIT_PTX

NUM_COUNTERS = gl.constexpr(4)  # arrivals, programs that have ended, and two for the use of the kernel
FREE_COUNTERS = gl.constexpr(2)  # index of the first of those two
COUNTER_STRIDE = gl.constexpr(32)  # int32 elements, so that counters are on different cache lines


@gluon.jit
def arrive(counter):
    """Add an arrival with release semantics: the stores of this program precede it."""
    thread_barrier()
    gl.inline_asm_elementwise(
        ARRIVE_PTX, "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait(counter, goal):
    """Wait for `goal` arrivals, with acquire semantics."""
    gl.inline_asm_elementwise(
        WAIT_PTX, "=r,l,r", [counter.to(gl.int64), goal], dtype=gl.int32, is_pure=False, pack=1
    )
    thread_barrier()


@gluon.jit
def synchronise(counter, goal):
    """Arrive and wait until every program has arrived; return the new goal."""
    goal += gl.num_programs(0)
    arrive(counter)
    wait(counter, goal)
    return goal


@gluon.jit
def reset(counter):
    """Set all counters to zero in the last program, for the next launch."""
    num_left = gl.atomic_add(counter + COUNTER_STRIDE, 1, sem="acq_rel", scope="gpu")
    if num_left == gl.num_programs(0) - 1:
        for i in gl.static_range(NUM_COUNTERS):
            gl.store(counter + i * COUNTER_STRIDE, 0)
