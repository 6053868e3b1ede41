"""Backend record: one object per op family, all on one device."""

from __future__ import annotations

from typing import ClassVar

import torch

from draftproof.ops.contract.communicator import Communicator
from draftproof.ops.contract.draft_rounds import DraftRoundOps
from draftproof.ops.contract.draft_search import DraftSearchOps
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.runtime import Runtime
from draftproof.ops.contract.sampling import SamplingOps
from draftproof.ops.contract.step import StepOps


class Ops:
    """Backend composed of op families; a subclass creates the families in its constructor.

    `reference` is the definition (plain loops); every other backend is tested against it. In exact numerics
    the bits of a row may depend on that row's inputs and on the weights, never on the number of rows in the
    call, on the row's index, or on the other rows.
    """

    name: ClassVar[str]
    default_seqs: ClassVar[int] = 32  # concurrent requests by default
    default_rows: ClassVar[int] = 512  # rows per step by default

    runtime: Runtime
    forward: ForwardOps
    sampling: SamplingOps
    step: StepOps
    search: DraftSearchOps
    rounds: DraftRoundOps

    def __init__(self, device: torch.device, numerics: str = "exact") -> None:
        """Set the device; numerics "fast" permits the fastest kernels where they differ in bits."""
        self.device = device
        self.numerics = numerics
        self.communicator = Communicator()
