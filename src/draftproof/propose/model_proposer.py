"""Base of proposers with a model of their own: heads and draft models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.propose.base import DeviceProposer, ProposerEnv
from draftproof.propose.calibration import Calibration
from draftproof.propose.draft_rounds import DraftRounds
from draftproof.types import DeviceBatch

DRAFT_SAMPLING = ("shared", "argmax")  # with the target's noise; the likeliest token at any temperature


class ModelProposer(DeviceProposer):
    """Proposer whose model runs behind every step and stores KV on the engine's pages."""

    runs_every_step = True
    stores_kv = True
    reports_probs = True
    respects_budget = True
    defaults = {"model": None, "draft_sampling": "shared"}
    lag = 0  # how far behind its own position a draft's row is stored

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        """Check the sampling option."""
        super().__init__(env, options)
        sampling = self.options["draft_sampling"]
        if sampling not in DRAFT_SAMPLING:
            raise ConfigError(f"draft_sampling must be one of {', '.join(DRAFT_SAMPLING)}, got {sampling!r}")
        self.greedy = bool(sampling == "argmax")
        self.stops_early = not env.ops.runtime.asynchronous
        self.calibration = Calibration(env.num_slots)

    def start_rounds(self, batch: DeviceBatch, last: Tensor) -> DraftRounds:
        """Plan the rounds behind a step; `last` as in `DraftRounds`."""
        env = self.env
        return DraftRounds(env.ops, batch, self.greedy, last, self.lag, env.page_size, self.calibration)
