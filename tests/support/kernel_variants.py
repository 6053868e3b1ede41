"""Kernels of one factory with different device functions, each run in a process of its own.

    python kernel_variants.py VALUES [FIRST_SYMBOL_NUMBER]

Prints what the kernel of each value stores, in this order. Run from a copy of this file, beside which the
kernels are cached.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.bytecode import FunctionIdentity

import draftproof

# The package around the compiler imports torch, which takes longer than all kernels here.
sys.path.insert(0, str(Path(draftproof.__file__).parent / "ops" / "cpu" / "jit"))
from compile import Kernel, device, kernel, load_i64, store_f32


def make(value: int) -> Kernel:
    """Return the kernel of a value; its device function is too long to be inlined twice."""

    @device
    def step(x: Any, i: int) -> Any:
        for k in range(2, 9):
            x = x * np.float32(0.5) + np.float32(value) if i % k == 0 else x - np.float32(k)
            x = x * np.float32(0.25) + np.float32(value) if i % (k + 1) == 0 else x + np.float32(k)
            x = x * np.float32(0.75) - np.float32(value) if i % (k + 2) == 0 else x - np.float32(1)
        return x

    @kernel
    def run(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        x = np.float32(0)
        for i in range(rows):
            x = step(x, i) + step(x, i + 1)
        store_f32(load_i64(args), x)

    return run


def stored(value: int) -> float:
    """Return what the kernel of a value stores."""
    found = (ctypes.c_float * 1)()
    args = (ctypes.c_int64 * 1)(ctypes.addressof(found))
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(make(value).address)
    call(ctypes.addressof(args), 3, 0, 1, 0)
    return found[0]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        FunctionIdentity._unique_ids = itertools.count(int(sys.argv[2]))
    print(*(stored(int(value)) for value in sys.argv[1].split(",")))
