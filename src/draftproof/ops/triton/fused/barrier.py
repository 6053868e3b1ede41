"""Grid barrier between the programs of one launch: a monotonic counter of finished items.

All programs must be resident, which a cooperative launch guarantees. The kernel resets the counter to zero
at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The first thread of a program adds 1 to the counter at $1.
ARRIVE_PTX = tl.constexpr(
    """{
    .reg .pred first; .reg .u32 id;
    mov.u32 id, %tid.x;
    setp.eq.u32 first, id, 0;
    @first red.release.gpu.global.add.u32 [$1], 1;
    mov.u32 $0, 0;
    }"""
)
# The first thread of a program waits until the counter at $1 has reached $2.
WAIT_PTX = tl.constexpr(
    """{
    .reg .pred more; .reg .u32 value;
    mov.u32 value, %tid.x;
    setp.ne.u32 more, value, 0;
    @more bra done;
    again:
    ld.acquire.gpu.global.u32 value, [$1];
    setp.lt.u32 more, value, $2;
    @more bra again;
    done:
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def arrive(counter, GRID_SYNC: tl.constexpr):
    """Increment the counter with release semantics: the stores of this program precede the increment."""
    if GRID_SYNC:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            ARRIVE_PTX, "=r,l", [counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait(counter, goal, GRID_SYNC: tl.constexpr):
    """Wait until the counter has reached `goal`, with acquire semantics."""
    if GRID_SYNC:
        tl.inline_asm_elementwise(
            WAIT_PTX, "=r,l,r", [counter.to(tl.int64), goal], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()


@triton.jit
def first_item(goal):
    """Return the first item of this program in the next stage; idle programs of the last stage come first."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - goal % programs) % programs
