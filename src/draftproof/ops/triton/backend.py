"""CUDA backend: Triton kernels whose bits for a row do not depend on the rest of the batch.

Compute capability 8.0 or newer. Every op is a launch or two without a host sync, so a forward pass can be
captured into a CUDA graph. With TRITON_INTERPRET=1 in the environment the kernels run on the CPU, for tests.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import torch

from draftproof.errors import ConfigError
from draftproof.ops.contract.backend import Ops

try:
    import triton  # noqa: F401

    from draftproof.ops.triton import kernel_utils
    from draftproof.ops.triton.draft_rounds import TritonRounds
    from draftproof.ops.triton.draft_search import TritonSearch
    from draftproof.ops.triton.forward import TritonForward
    from draftproof.ops.triton.graphs import TritonRuntime
    from draftproof.ops.triton.sampling.ops import TritonSampling
    from draftproof.ops.triton.step.ops import TritonStep

    MISSING = ""
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "triton":
        raise
    MISSING = str(error)

if TYPE_CHECKING:
    from draftproof.ops.triton.gemm.cublas import Mode


class TritonOps(Ops):
    """CUDA backend.

    `debug` waits after every op, so that a failed launch is reported with the op's name.
    `pdl` launches kernels early where rows are few (programmatic dependent launch, Hopper and newer).
    `cublas`: where cuBLAS may be used, see `gemm/cublas`; by default where its bits are proven equal to
    those of the Triton kernels, or, with numerics="fast", where it was measured to be faster.
    `one_launch`: run all layers in one kernel where one supports them: few rows of a small model, one row of
    a mixture of experts.
    """

    name: ClassVar[str] = "triton"
    default_seqs: ClassVar[int] = 256
    default_rows: ClassVar[int] = 8192

    forward: TritonForward
    runtime: TritonRuntime

    def __init__(
        self,
        device: torch.device,
        debug: bool | None = None,
        pdl: bool = True,
        cublas: Mode | None = None,
        numerics: str = "exact",
        one_launch: bool = True,
    ) -> None:
        if MISSING:
            raise ConfigError(f"cannot load the triton backend: {MISSING}")
        kernel_utils.check_device(device)
        super().__init__(device, numerics)
        self.launch = launch = kernel_utils.LaunchContext(device, pdl)
        mode: Mode = cublas or ("fast" if numerics == "fast" else "proven")
        self.forward = TritonForward(launch, mode if launch.cuda else "never", one_launch)
        self.sampling = TritonSampling(launch)
        self.step = TritonStep(launch)
        self.search = TritonSearch(launch)
        self.rounds = TritonRounds(launch, self.forward, self.sampling)
        self.runtime = TritonRuntime(launch, self.forward.tuner)
        if launch.cuda and (os.environ.get("DRAFTPROOF_DEBUG", "0") == "1" if debug is None else debug):
            for family in (self.forward, self.sampling, self.step, self.search, self.rounds):
                kernel_utils.wait_after_ops(family, device)
