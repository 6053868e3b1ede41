"""Cache of captured graphs, keyed by what a step computes.

A backend without a device queue does not capture: `GraphCache.get` then returns the function itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from draftproof.ops import Ops
from draftproof.types import DraftSpec, StepFeatures

T = TypeVar("T")
# decode: a whole step of decoding requests; forward: layout and model of a step with prompts;
# verify: everything after the forward pass; draft: a proposer's drafts
GraphKind = Literal["decode", "forward", "verify", "draft"]


class GraphKey(NamedTuple):  # hashed in every step: a dataclass would take ten times as long
    """Identity of a captured graph."""

    kind: GraphKind
    rows: int = 0  # rows of the step; for "verify" its logits rows
    size: int = 0  # "forward": rows that the last layer keeps; "draft": entries
    variant: StepFeatures | DraftSpec | None = None


@dataclass(frozen=True, slots=True)
class GraphTask:
    """A function to capture and the key to keep it under."""

    key: GraphKey
    function: Callable[[], Any]
    own_pool: bool = False  # in a memory pool apart from that of the steps


class GraphCache:
    """Captured graphs by key, captured on first use."""

    def __init__(self, ops: Ops, load_empty_plan: Callable[[], None], enabled: bool = True) -> None:
        """`load_empty_plan`: called before a capture, which runs the function; it then has no effect.

        `enabled`: False runs every function op by op (`enforce_eager`).
        """
        self.enabled = enabled and ops.runtime.asynchronous
        self._ops = ops
        self._load_empty_plan = load_empty_plan
        self._graphs: dict[GraphKey, Callable[[], Any]] = {}

    def __contains__(self, key: GraphKey) -> bool:
        """Return whether a graph is kept under `key`."""
        return key in self._graphs

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    def __getitem__(self, key: GraphKey) -> Callable[[], Any]:
        """Return the graph kept under `key`."""
        return self._graphs[key]

    def items(self) -> list[tuple[GraphKey, Callable[[], Any]]]:
        """Return all keys with their graphs."""
        return list(self._graphs.items())

    def replace(self, key: GraphKey, graph: Callable[[], Any]) -> None:
        """Keep `graph` under `key`, in place of what was captured."""
        self._graphs[key] = graph

    def clear(self) -> None:
        """Drop all graphs: a backend's options have changed."""
        self._graphs.clear()

    def get(self, key: GraphKey, function: Callable[[], T], own_pool: bool = False) -> Callable[[], T]:
        """Return `function` captured under `key`, or `function` itself if graphs are off."""
        if not self.enabled:
            return function
        graph = self._graphs.get(key)
        if graph is None:
            self._load_empty_plan()
            try:
                graph = self._ops.runtime.graph(function, own_pool)
            except RuntimeError as error:  # most likely out of memory; without a graph the step is slower
                log = logging.getLogger("draftproof")
                log.warning("graph capture of a %s step failed, it runs op by op: %s", key.kind, error)
                graph = function
            self._graphs[key] = graph
        return graph
