"""Compile the kernels of the exactness matrix into the disk cache.

`make test` runs this file while packages are installed, which uses one core. A kernel that is missing is
compiled by the first test that needs it, and a wrong one is found there.
"""

from __future__ import annotations

import traceback

import torch

import compile_once
from covering import each_level
from draftproof.ops.cpu.jit import parallel_compile
from exact_matrix import KERNEL_FACTORS, MATRIX, check, num_rows


def main() -> None:
    """Run cases that have every level of the factors which select kernels."""
    torch.set_num_threads(1)
    parallel_compile.MAX_PROCESSES = 1  # pip uses the other core
    compile_once.install()  # tests begin before the last kernel is compiled
    for case in each_level(MATRIX, num_rows, {*KERNEL_FACTORS, "method"}):
        try:
            check(dict(case))
        except Exception:  # the test of this case fails as well
            traceback.print_exc()


if __name__ == "__main__":
    main()
