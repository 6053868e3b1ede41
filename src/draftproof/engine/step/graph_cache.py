"""Cache of captured graphs, keyed by what a step computes.

A backend without a device queue does not capture: `GraphCache.get` then returns the function itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from draftproof.ops import GraphPool, Ops
from draftproof.types import DraftSpec, StepFeatures

T = TypeVar("T")
# decode: a whole step of decoding requests; forward: layout and model of a step with prompts;
# verify: everything after the forward pass; draft: a proposer's drafts; catch up: KV that its model stores
# before; the last two: the logprob pass of a step, where it is apart from the step
GraphKind = Literal["decode", "forward", "verify", "draft", "catch up", "decode logprobs", "verify logprobs"]


class GraphKey(NamedTuple):  # hashed in every step: a dataclass would take ten times as long
    """Identity of a captured graph."""

    kind: GraphKind
    rows: int = 0  # rows of the step; for "verify" its logits rows, for "catch up" tokens
    size: int = 0  # "forward": rows that the last layer keeps; "draft": entries
    variant: StepFeatures | DraftSpec | None = None


class GraphTask(NamedTuple, Generic[T]):
    """A function to capture and the key to keep it under."""

    key: GraphKey
    function: Callable[[], T]
    pool: GraphPool = GraphPool.STEP


class GraphCache:
    """Captured graphs by key, captured on first use."""

    def __init__(self, ops: Ops, load_empty_plan: Callable[[], None], enabled: bool = True) -> None:
        """Start empty; `load_empty_plan` is called before a capture, which runs the function."""
        self.enabled = enabled and ops.runtime.asynchronous
        self._ops = ops
        self._load_empty_plan = load_empty_plan
        self.captured: dict[GraphKey, Callable[[], Any]] = {}
        self._failed: set[GraphKey] = set()
        self._requested: set[GraphKey] = set()  # by `get_repeated`

    def get(self, task: GraphTask[T]) -> Callable[[], T]:
        """Return the captured function of a task, or the function itself if graphs are off."""
        key, function, pool = task
        if not self.enabled:
            return function
        graph = self.captured.get(key)
        if graph is None:
            self._load_empty_plan()
            try:
                graph = self._ops.runtime.graph(function, pool)
            except RuntimeError as error:  # most likely out of memory; without a graph the step is slower
                log = logging.getLogger("draftproof")
                log.warning("graph capture of a %s step failed, it runs op by op: %s", key.kind, error)
                graph = function
                self._failed.add(key)
            self.captured[key] = graph
        return graph

    def get_repeated(self, task: GraphTask[T]) -> Callable[[], T]:
        """Return the captured function of a task, captured now if it was requested before, or the function.

        For tasks of many sizes: one that comes once is not worth a capture.
        """
        if task.key in self.captured or task.key in self._requested:
            return self.get(task)
        self._requested.add(task.key)
        return task.function

    def is_captured(self, key: GraphKey) -> bool:
        """Return whether there is a graph of this key; its results are the same tensors in every run."""
        return key in self.captured and key not in self._failed
