"""CPU backend: native kernels on a thread pool, optimised for AVX-512 and AMX, correct on any CPU.

Every kernel gives a row the same bits whatever the other rows, the thread count and the row's index. Two GEMM
kernels exist for bf16 (AMX tiles, fused multiply-add); a machine uses one of them for every row count. The
kernels are compiled by numba at first use, then read from its disk cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftproof.errors import ConfigError
from draftproof.ops.contract.backend import Ops
from draftproof.ops.contract.runtime import Forward, Runtime

try:
    from draftproof.ops.cpu.draft_rounds import CpuRounds
    from draftproof.ops.cpu.draft_search import CpuSearch
    from draftproof.ops.cpu.executor import Captured, Executor
    from draftproof.ops.cpu.forward import CpuForward
    from draftproof.ops.cpu.gemm.formats import CpuFeatures
    from draftproof.ops.cpu.jit import amx as amx_tiles
    from draftproof.ops.cpu.jit.parallel_compile import LoopCompilation
    from draftproof.ops.cpu.jit.release_memory import release_start_up_memory
    from draftproof.ops.cpu.sampling.ops import CpuSampling
    from draftproof.ops.cpu.step import LOOPS, CpuStep
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("numba", "llvmlite"):
        raise
    raise ImportError("the cpu backend needs numba: install draftproof[cpu]") from error


class CpuRuntime(Runtime):
    """Runtime that replays recorded passes on the thread pool."""

    def __init__(self, device: torch.device, run: Executor) -> None:
        super().__init__(device)
        self._run = run

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Limit torch to one thread: its OpenMP workers spin after every region, on the cores of the pool."""
        before = torch.get_num_threads()
        if before != 1:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if before != 1:
                torch.set_num_threads(before)

    def capture(self, forward: Forward, max_rows: int) -> Forward:
        return Captured(self._run, forward, max_rows)


class CpuOps(Ops):
    """CPU backend. `threads` defaults to torch's number; `amx=False` selects the FMA kernels."""

    name = "cpu"
    default_rows = 256  # activations of more rows leave the cache: 512 rows took twice as long as 2 x 256

    def __init__(
        self,
        device: torch.device,
        threads: int | None = None,
        amx: bool | None = None,
        numerics: str = "exact",  # "fast" has no other kernels here
    ) -> None:
        super().__init__(device, numerics)
        if device.type != "cpu":
            raise ConfigError(f"the cpu backend cannot run on {device}")
        # the query also makes the operating system enable the tile registers
        has_amx = amx is not False and amx_tiles.available()
        if amx and not has_amx:
            raise ConfigError("this machine has no AMX with bf16")
        self.features = CpuFeatures(
            amx=has_amx,
            amx_int8=has_amx and amx_tiles.takes_bytes(),
        )
        compilation = LoopCompilation(LOOPS)
        release_start_up_memory()
        self.executor = Executor(torch.get_num_threads() if threads is None else threads)
        self.runtime = CpuRuntime(device, self.executor)
        self.forward = CpuForward(self.executor, self.features)
        self.sampling = CpuSampling(self.executor)
        self.step = CpuStep(compilation)
        self.search = CpuSearch()
        self.rounds = CpuRounds(self.forward, self.sampling, self.executor)
