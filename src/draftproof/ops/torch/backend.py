"""Torch backend: runs on any device that PyTorch supports, exact by fixed shapes.

Libraries choose their order of summation by shape, so every call that sums (or uses a vectorised exp, whose
tail may take another path) has one fixed shape: a padded block of rows, or one row. A row's bits then do not
depend on the other rows. The cost is more and smaller calls.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from draftproof.ops.contract.backend import Ops
from draftproof.ops.contract.runtime import Runtime
from draftproof.ops.torch.draft_rounds import TorchRounds
from draftproof.ops.torch.draft_search import TorchSearch
from draftproof.ops.torch.forward import TorchForward
from draftproof.ops.torch.sampling import TorchSampling
from draftproof.ops.torch.step import TorchStep


class TorchOps(Ops):
    """Backend that vectorises within a row or a fixed block of rows, never across."""

    name: ClassVar[str] = "torch"

    def __init__(self, device: torch.device, numerics: str = "exact") -> None:
        super().__init__(device, numerics)
        self.runtime = Runtime(device)
        self.forward = TorchForward()
        self.sampling = TorchSampling()
        self.step = TorchStep()
        self.search = TorchSearch()
        self.rounds = TorchRounds(self.forward, self.sampling)
