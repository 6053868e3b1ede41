"""Vector load and store of fp32 or bf16 tensors, so that one kernel source serves both.

`bf16` is a compile-time constant of the kernel, so the branches are removed.
"""

from __future__ import annotations

from typing import Any

from draftproof.ops.cpu.jit.compile import copy_bytes, inlined
from draftproof.ops.cpu.jit.simd import (
    iload,
    istore,
    vload,
    vload_bf16,
    vload_bf16_n,
    vload_n,
    vround_bf16,
    vstore,
    vstore_bf16,
    vstore_bf16_n,
    vstore_n,
)


@inlined
def tload(addr: int, index: int, count: int, bf16: bool) -> Any:
    """Load elements [index, index + min(count, 16)) of the tensor at `addr` as fp32, then zeros."""
    if bf16:
        if count >= 16:
            return vload_bf16(addr + 2 * index)
        return vload_bf16_n(addr + 2 * index, count)
    if count >= 16:
        return vload(addr + 4 * index)
    return vload_n(addr + 4 * index, count)


@inlined
def tstore(addr: int, index: int, x: Any, count: int, bf16: bool) -> None:
    """Store the first min(count, 16) lanes, rounded to the tensor's type."""
    if bf16:
        if count >= 16:
            vstore_bf16(addr + 2 * index, x)
        else:
            vstore_bf16_n(addr + 2 * index, x, count)
    elif count >= 16:
        vstore(addr + 4 * index, x)
    else:
        vstore_n(addr + 4 * index, x, count)


@inlined
def tround(x: Any, bf16: bool) -> Any:
    """Round lanes as a store and a load would."""
    if bf16:
        return vround_bf16(x)
    return x


@inlined
def copy_bf16(target: int, source: int, count: int) -> None:
    """Copy `count` bf16."""
    if count % 32 == 0:
        for at in range(0, count * 2, 64):
            istore(target + at, iload(source + at))
    else:
        copy_bytes(target, source, count * 2)
