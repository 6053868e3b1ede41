"""Proposer contract: draft tokens from committed tokens, and from hidden rows where a proposer needs them.

A proposer never changes a request, and its drafts never change an output: a wrong draft costs time alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.draft_head.model import TargetParts
from draftproof.models.weight_formats import PackedEntry, WeightTensor
from draftproof.models.weights.update_source import WeightSource
from draftproof.ops import Ops
from draftproof.types import DeviceBatch, Draft, ProposeBatch, Request, SlotColumns


@dataclass(frozen=True, slots=True)
class ProposerEnv:
    """Engine facts for a proposer. One with a model of its own makes a Runner of `num_pages`."""

    ops: Ops
    k: int
    vocab_size: int
    hidden_size: int
    num_slots: int
    num_pages: int
    page_size: int
    max_len: int
    max_rows: int
    target: TargetParts | None = None  # parts of the model that it drafts for
    kv_cache_dtype: str = "auto"  # storage of K and V, see `KV_FORMATS`


class Proposer(ABC):
    """Source of drafts. Class attributes state its capabilities; the engine never tests its name."""

    sources: ClassVar[tuple[str, ...]]  # names of the sources of its drafts, for provenance
    needs_hidden: bool = False  # needs the target's hidden rows
    reports_probs: ClassVar[bool] = False  # samples its drafts and reports their distributions
    stores_kv: ClassVar[bool] = False  # stores KV of its own on the engine's page ids, of drafts too
    graph_safe: ClassVar[bool] = False  # runs without the host between its kernels
    runs_behind_steps: ClassVar[bool] = False  # on the device: has a model that runs behind steps
    is_free: ClassVar[bool] = False  # making drafts costs next to nothing; only verifying them does
    model_source: int = -1  # index of the source with a model, if others draft beside it
    extending_source: int = -1  # index of the source that extends drafts of others
    stops_early: bool = False  # with costs given, it makes no draft that is not worth a round of its model
    learns: ClassVar[bool] = False  # from the tokens of finished requests
    takes_prediction: ClassVar[bool] = False  # drafts from Request.prediction_ids itself
    defaults: ClassVar[Mapping[str, Any]] = {}  # options and their defaults
    entries: Sequence[PackedEntry] = ()  # packed weights of its own model

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        self.env = env
        self.options = {**self.defaults, **options}

    @classmethod
    def storage(
        cls,
        options: Mapping[str, Any],
        target: ModelConfig,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> tuple[int, int]:
        """Return device bytes per token that can be stored, and bytes besides."""
        return 0, 0

    @classmethod
    def needs_target(cls, options: Mapping[str, Any]) -> bool:
        """Return whether `ProposerEnv.target` must have the whole embedding and LM head."""
        return False

    def start(self, slot: int, request: Request) -> None:
        """Begin a request in `slot`."""
        return None

    @abstractmethod
    def propose(self, batch: ProposeBatch) -> Draft:
        """Return drafts for every request of the batch, at most `budget` each."""

    def stop(self, slot: int) -> None:
        """End the request in `slot`."""
        return None

    def discard(self, slots: Tensor) -> None:
        """Drop the last drafts of these slots: drafts from predictions replaced them."""
        return None

    def learn(self, request: Request, ids: NDArray[np.int64]) -> None:
        """Record all tokens of a finished request, its prompt first; with `learns`."""
        return None

    def forget(self) -> None:
        """Drop what was learned from earlier outputs: the target's weights have changed."""
        return None

    def check_weights(self, source: WeightSource) -> dict[str, WeightTensor]:
        """Return new weights of its own model, checked against `entries`; LoadError if they do not fit."""
        raise LoadError("this engine drafts without a model of its own: leave draft_weights out")

    def device_memory(self) -> tuple[Any, Sequence[Tensor]]:
        """Return a tree with the weights of its own model, and the caches of their K and V."""
        return (), ()

    def refresh_lm_head(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Take rows of the target's new LM head: ids [n] -> [n, hidden]."""
        return None

    def prepare(self) -> None:
        """Send data to the device, without waiting, before a step is queued."""
        return None

    def do_idle_work(self) -> None:
        """Do deferred work while steps are in flight and the host has time, not in every step."""
        return None


class DeviceProposer(Proposer):
    """Proposer made of tensor code that never waits for the device: it runs inside captured graphs."""

    graph_safe = True
    can_extend: ClassVar[bool] = False  # extends drafts of others, and estimates how many are accepted
    taps: tuple[int, ...] = ()  # layers of the target whose residual rows it needs; with `runs_behind_steps`
    depends_on_prompts: ClassVar[bool] = False  # computes something else where a step has prompts
    num_rounds_run: int = 1  # by its model, when it last drafted
    state_tensors: Sequence[Tensor] = ()  # state by slot, restored after drafts of fake requests
    respects_budget: ClassVar[bool] = False  # never makes more drafts than the budget
    defers_kv: bool = False  # KV behind steps without drafts is stored by `catch_up`, before the next drafts

    def begin(self, batch: DeviceBatch) -> Any:
        """Return what `draft` needs for any drafts; the caller gives it to `draft` as `begun`."""
        return None

    @abstractmethod
    def draft(self, batch: DeviceBatch) -> Draft:
        """Return drafts for every entry of the batch; drafts beyond the budget are cut off.

        With `runs_behind_steps` it is called after every step that the model runs behind. The features are
        then the last hidden rows (`needs_hidden`, after the norm) and those of its `taps`, side by side.
        """

    def set_stored(self, slot: int, count: int | None) -> None:
        """Set how many tokens of the request admitted to `slot` have KV; with `defers_kv`.

        None: all that come from the prefix cache, as in a slot for which this was never called.
        """
        raise TypeError(f"{type(self).__name__} defers no KV")

    def catch_up(self, columns: SlotColumns, slots: Tensor, num_rows: int) -> None:
        """Store the KV of at most `num_rows` tokens that the slots lack, in their order; with `defers_kv`.

        Skip the newest token of each slot, and slots of -1.
        """
        raise TypeError(f"{type(self).__name__} defers no KV")

    def extend(
        self, batch: DeviceBatch, begun: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, their number and the expected accepted ones, as `Ops.search_suffix`."""
        raise TypeError(f"{type(self).__name__} cannot extend drafts")

    def propose(self, batch: ProposeBatch) -> Draft:
        """Refuse: drafts are made on the device."""
        raise TypeError(f"{type(self).__name__} drafts on the device")
