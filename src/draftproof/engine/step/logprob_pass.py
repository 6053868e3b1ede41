"""Logprob pass of a step: committed tokens, named ids and drafts, raw and processed, into the result buffer.

Every part has as many rows as the step has logits rows. Columns of the slots select which of them are
computed, so the pass is captured with the step and needs no host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftproof.engine.drafting.device_proposer import DraftRunner
from draftproof.engine.step.graph_cache import GraphCache, GraphKey, GraphTask
from draftproof.engine.step.result_buffer import PackedResults
from draftproof.ops import GraphPool, NamedIds, Ops
from draftproof.types import LogprobKind, Outcome, StepFeatures, Windows

if TYPE_CHECKING:  # it imports this module
    from draftproof.engine.step.device_step import StepTensors


def logprob_pass(
    ops: Ops,
    features: StepFeatures,
    logits: Tensor,
    processed: Tensor,
    windows: Windows,
    outcome: Outcome,
    packed: PackedResults,
) -> Callable[[], None]:
    """Reserve the parts of `packed` and return the function that writes them; logits, processed [L, V]."""
    raw, adjusted = LogprobKind.RAW, LogprobKind.PROCESSED
    scores = {raw: logits, adjusted: processed}
    token_parts = [
        (kind, top, named, packed.add_logprobs(kind, logits.shape[0], top, named))
        for kind, top, named in (
            (raw, features.raw_top, features.raw_named),
            (adjusted, features.processed_top, features.processed_named),
        )
        if top >= 0
    ]
    draft_parts = [
        (kind, packed.add_draft_targets(kind, logits.shape[0]))
        for kind, is_wanted in ((raw, features.has_raw_drafts), (adjusted, features.has_processed_drafts))
        if is_wanted
    ]

    def write() -> None:
        for kind, top, num_named, out in token_parts:
            rows, columns = outcome.pick_rows, windows.columns
            if len(token_parts) > 1:
                slot = windows.slot[rows.clamp(min=0)].clamp(min=0)  # [L]
                rows = torch.where(columns.logprob_kind[slot] == kind, rows, -1)
            named = NamedIds(columns.named_ids, windows.slot, num_named) if num_named else None
            ops.sampling.logprobs(scores[kind], rows, outcome.pick_tokens, top, out, named)
        slots, drafts = windows.slot[None], windows.draft[None]
        for kind, out in draft_parts:
            of_kind = windows.columns.draft_kind, int(kind)
            ops.sampling.draft_logprobs(scores[kind], slots, drafts, 0, out, kind=of_kind)

    return write


def do_nothing() -> None:
    """Do nothing: no separate pass was started."""


class SeparateLogprobs:
    """Logprob passes that are captured apart from their steps, to run beside the drafts of a model."""

    def __init__(self, ops: Ops, graphs: GraphCache, drafting: DraftRunner) -> None:
        self._ops, self._graphs, self._drafting = ops, graphs, drafting
        self._tensors: StepTensors | None = None  # of the last step

    def is_missing(self, step: GraphKey) -> bool:
        """Return whether the logprob pass of a step still has to be captured."""
        return self._is_apart(step) and _logprob_key(step) not in self._graphs.captured

    def capture(self, step: GraphKey, tensors: StepTensors) -> None:
        """Capture the logprob pass of a step that has just run."""
        self._tensors = tensors
        self._graphs.get(GraphTask(_logprob_key(step), self._write_last, GraphPool.LOGPROB))

    def captured(self, step: GraphKey) -> Callable[[], object] | None:
        """Return the captured logprob pass of a step; None if the step does it itself."""
        return self._graphs.captured[_logprob_key(step)] if self._is_apart(step) else None

    def start(self, write: Callable[[], object] | None, tensors: StepTensors) -> Callable[[], object]:
        """Run the logprob pass that a step left out, `write` beside the drafts; return how to end it."""
        self._tensors = tensors
        if write is not None:
            return self._ops.runtime.run_beside(write)
        self._write_last()
        return do_nothing

    def _is_apart(self, step: GraphKey) -> bool:
        """Return whether the logprob pass of a step is a graph of its own."""
        if not self._drafting.runs_behind_steps:
            return False
        features = step.variant
        has_logprobs = isinstance(features, StepFeatures) and features.has_logprobs
        return has_logprobs and self._graphs.is_captured(step)

    def _write_last(self) -> None:
        if self._tensors is not None and self._tensors.write_logprobs is not None:
            self._tensors.write_logprobs()


def _logprob_key(step: GraphKey) -> GraphKey:
    """Return the key of the logprob pass of a step."""
    return step._replace(kind="decode logprobs" if step.kind == "decode" else "verify logprobs")
