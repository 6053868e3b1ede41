"""Reference backend: the definition of every op in plain loops. Slow and simple to verify."""

from __future__ import annotations

from typing import ClassVar

import torch

from draftproof.ops.contract.backend import Ops
from draftproof.ops.contract.runtime import Runtime
from draftproof.ops.reference.draft_rounds import ReferenceRounds
from draftproof.ops.reference.draft_search import ReferenceSearch
from draftproof.ops.reference.forward import ReferenceForward
from draftproof.ops.reference.sampling import ReferenceSampling
from draftproof.ops.reference.step import ReferenceStep


class ReferenceOps(Ops):
    """Backend that loops over rows; no op is fused, and rows share nothing."""

    name: ClassVar[str] = "reference"

    def __init__(self, device: torch.device, numerics: str = "exact") -> None:
        super().__init__(device, numerics)
        self.runtime = Runtime(device)
        self.forward = ReferenceForward()
        self.sampling = ReferenceSampling()
        self.step = ReferenceStep()
        self.search = ReferenceSearch()
        self.rounds = ReferenceRounds(self.forward, self.sampling)
