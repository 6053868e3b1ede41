"""A barrier between the programs of one launch: a counter of finished items that only grows.

Every program has to be on the chip (a cooperative launch sees to that). The kernel that uses it puts the
counter back to zero at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive(counter, ALL: tl.constexpr):
    """What this program has stored is there for whoever sees the counter grown by one."""
    if ALL:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred first; .reg .u32 id;
            mov.u32 id, %tid.x;
            setp.eq.u32 first, id, 0;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l", [counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait(counter, goal, ALL: tl.constexpr):
    """Until the counter has reached `goal`."""
    if ALL:
        tl.inline_asm_elementwise(
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
            }""",
            "=r,l,r", [counter.to(tl.int64), goal], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def turn(goal):
    """Which item of the next stage is this program's first: they go round, so that an idle one is next."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - goal % programs) % programs
