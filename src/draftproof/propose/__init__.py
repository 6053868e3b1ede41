"""Guessing: the proposer contract and the table of proposers.

A proposer sees committed tokens (and hidden rows, if it asks) and guesses what follows. It never changes
a request, and nothing it says can change an output: a wrong guess costs time alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig
from draftproof.models.draft_head.model import TargetParts
from draftproof.ops import Ops
from draftproof.types import DeviceBatch, Draft, ProposeBatch, Request

PROPOSERS = {
    "ngram": "draftproof.propose.ngram:NgramProposer",
    "suffix": "draftproof.propose.suffix:SuffixProposer",
    "given": "draftproof.propose.prediction:GivenProposer",
    "mtp": "draftproof.propose.head:MtpProposer",
    "eagle": "draftproof.propose.head:EagleProposer",
    "eagle3": "draftproof.propose.head:Eagle3Proposer",
    "draft_model": "draftproof.propose.draft_model:DraftModelProposer",
    "hybrid": "draftproof.propose.hybrid:HybridProposer",
}


@dataclass(frozen=True, slots=True)
class ProposerEnv:
    """What a proposer may build on. One with a model of its own makes a Runner of `num_pages`."""

    ops: Ops
    k: int
    vocab_size: int
    hidden_size: int
    num_slots: int
    num_pages: int
    page_size: int
    max_len: int
    max_rows: int
    target: TargetParts | None = None  # of the model that it drafts for


class Proposer(ABC):
    """One way to guess. Capabilities are class attributes; nobody asks for its name."""

    sources: ClassVar[tuple[str, ...]]  # who may have proposed a token, for provenance
    needs_hidden: bool = False  # wants the target's hidden rows
    reports_probs: ClassVar[bool] = False  # samples its drafts and says from which law
    stores_kv: ClassVar[bool] = False  # keeps KV of its own on the engine's page ids, of drafts too
    graph_safe: ClassVar[bool] = False  # runs without the host between its kernels
    follows_rows: ClassVar[bool] = False  # on the device: is given every step's rows, prompts included
    cheap: ClassVar[bool] = False  # asking it costs next to nothing: only what is verified does
    weighed: int = -1  # of several sources the one that is a model's, asked where that is worth its price
    search: int = -1  # the one that goes on from others' drafts
    ends_chains: bool = (
        False  # told what a round of its model costs, it makes no drafts that are not worth one
    )
    learns: ClassVar[bool] = False  # from what requests have said, once they end
    takes_prediction: ClassVar[bool] = False  # uses Request.prediction_ids
    defaults: ClassVar[Mapping[str, Any]] = {}  # options and their defaults

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        self.env = env
        self.options = {**self.defaults, **options}

    @classmethod
    def storage(cls, options: Mapping[str, Any], target: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes that it needs of the device for each token that can be stored, and besides."""
        return 0, 0

    def start(self, slot: int, request: Request) -> None:
        """A request sits down in `slot`."""
        return None

    @abstractmethod
    def propose(self, batch: ProposeBatch) -> Draft:
        """Guesses for every request of the batch, at most `budget` each."""

    def stop(self, slot: int) -> None:
        """The request in `slot` has ended."""
        return None

    def learn(self, request: Request, ids: NDArray[np.int64]) -> None:
        """With `learns`: all tokens of a request that has ended, its prompt first."""
        return None

    def prepare(self) -> None:
        """A step is about to be queued: what the host has for the device must go now, without waiting."""
        return None

    def meanwhile(self) -> None:
        """Steps are under way and there is time: what can wait, but not for ever, is best done now. It is not
        called in every step, nor where the device is waited for."""
        return None


class DeviceProposer(Proposer):
    """A proposer whose code is tensor code that waits for no device: it runs inside a captured step."""

    graph_safe = True
    extends: ClassVar[bool] = False  # goes on from another's drafts, and says what its own are worth
    taps: tuple[int, ...] = ()  # layers of the target whose residual rows it wants; needs `follows_rows`
    minds_prompts: ClassVar[bool] = False  # it does something else where there are prompts in a step
    asked_rounds: int = 1  # of its model, when it last drafted
    remembers: Sequence[Tensor] = ()  # what it knows of requests, by slot: is put back after a rehearsal
    keeps_to_budget: ClassVar[bool] = False  # what it makes is never more than its budget

    def begin(self, batch: DeviceBatch) -> Any:
        """What its drafts need whoever may have some. Whoever asks for it gives it to `draft`, as `begun`."""
        return None

    @abstractmethod
    def draft(self, batch: DeviceBatch) -> Draft:
        """Guesses for every entry of the batch; what is beyond its budget is cut off.

        With `follows_rows` it is asked after every step, also one in which nobody may have drafts. The
        features are then the last hidden rows (`needs_hidden`, after the norm), and those of its `taps`, side
        by side.
        """

    def extend(
        self, batch: DeviceBatch, begun: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With `extends`: tokens, their number and their worth, as `search_suffix`."""
        raise TypeError(f"{type(self).__name__} begins by itself")

    def propose(self, batch: ProposeBatch) -> Draft:
        raise TypeError(f"{type(self).__name__} drafts on the device")


def ngram_sizes(options: Mapping[str, Any]) -> tuple[int, int]:
    """(smallest, largest) match from prompt_lookup_min and prompt_lookup_max; either may be None."""
    low, high = options["prompt_lookup_min"], options["prompt_lookup_max"]
    for name, value in (("prompt_lookup_min", low), ("prompt_lookup_max", high)):
        wrong = isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64
        if value is not None and wrong:
            raise ConfigError(f"{name} must be an integer in 1..64, got {value!r}")
    high = high if high is not None else max(5, low or 0)
    low = low if low is not None else min(2, high)
    if low > high:
        raise ConfigError(f"prompt_lookup_min ({low}) is above prompt_lookup_max ({high})")
    return low, high
