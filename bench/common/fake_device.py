"""Fake device with a queue: steps are captured, sent, fetched and read, and nothing is computed.

The host's part of a step remains, as on a GPU without the driver's calls. The time of the fake device itself
is counted separately (`spent`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch

from draftproof.engine.drafting.step_cost import StepCost
from draftproof.engine.step.device_step import StepTensors
from draftproof.engine.step.result_buffer import PackedResults
from draftproof.ops.triton import graphs as queue
from draftproof.types import (
    FINISH_STATUS,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    FinishStatus,
    LogprobKind,
    StepFeatures,
)

# microseconds of a step by rows, of a model of 135M parameters on an H200
STEP_US = {1: 460, 8: 465, 16: 480, 32: 520, 64: 600, 128: 700, 256: 950, 512: 1500, 1536: 4000}


class CompletedEvent:
    """Event that has always completed."""

    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def _stage(stage: Any, size: int) -> None:
    stage.size, stage.bytes = size, torch.empty(size, dtype=torch.uint8)
    stage.copied, stage._like = CompletedEvent(), None


class FakeDevice:
    """Stand-in for the device of an engine."""

    def __init__(self, engine: Any, acceptance: float) -> None:
        """Replace the device functions of `engine`; `acceptance`: probability that a draft is accepted."""
        self.engine, self.device, self.ops = engine, engine.loop.device, engine.ops
        self.acceptance, self.spent = acceptance, 0.0
        self._draw = np.random.default_rng(3)
        self._run = self.device.run
        self._planned: Any = None
        self._length = np.zeros(len(self.device.slots.requests), np.int64)
        self._packed: dict[Any, PackedResults] = {}
        ops, runtime = self.ops, self.ops.runtime
        queue.Stage.__init__ = _stage  # type: ignore[assignment,method-assign]
        runtime.cuda = runtime.asynchronous = True
        runtime._stages, runtime._stream = queue.StagingBuffers(), None
        runtime.bucket = queue.bucket_of
        for name in ("send", "fetch"):
            setattr(runtime, name, MethodType(getattr(queue.TritonRuntime, name), runtime))
        runtime.graph, ops.step.layout = self._graph, lambda *_: None
        self.device.graphs.enabled = True
        self.device.run = self._run_with_plan
        engine.loop.policy.set_cost(StepCost({n: us / 1e6 for n, us in STEP_US.items()}), adaptive=True)

    def _run_with_plan(self, planned: Any, *rest: Any) -> Any:
        self._planned = planned
        return self._run(planned, *rest)

    def _graph(self, function: Callable[[], Any], pool: int = 0) -> Callable[[], Any]:
        """Return a replay whose result follows from the key under which `DeviceStep` keeps it."""
        device = self.device

        def replay() -> Any:
            begin = time.thread_time()
            key = next(key for key, graph in device.graphs.captured.items() if graph is replay)
            out = self._forward(key.rows) if key.kind == "forward" else self._outcome(key.rows, key.variant)
            self.spent += time.thread_time() - begin
            return out

        return replay

    def _forward(self, rows: int) -> torch.Tensor:
        return torch.zeros(
            (rows, self.device.buffers.picked.shape[1]), dtype=self.device.buffers.picked.dtype
        )

    def _outcome(self, rows: int, features: StepFeatures) -> StepTensors:
        planned, host = self._planned, self.engine.loop.scheduler.mirror
        for sequence in planned.admitted:
            self._length[sequence.slot] = len(sequence.ids)
        slots, n = planned.slots, len(planned.slots)
        table = np.zeros((len(self._length), self.device.buffers.table_width), np.int64)
        left = np.maximum(host.max_length[slots] - self._length[slots], 0)
        drafts, accepted = self._verified(planned)
        out = np.where(planned.is_sampled, np.minimum(accepted + 1, left), 0)
        table[:n, NUM_OUT], table[:n, NUM_DRAFT] = out, drafts
        table[:n, NUM_ACCEPTED] = np.minimum(accepted, out)
        table[:n, TOKENS:] = self._draw.integers(3, 500, (n, self.device.buffers.table_width - TOKENS))
        table[:n, PICK] = np.cumsum(out) - out
        self._length[slots] += out
        table[:n, FINISH_STATUS] = np.where(
            self._length[slots] >= host.max_length[slots], FinishStatus.LENGTH, 0
        )
        packed = self._pack(rows, features)
        packed.data[: table.nbytes].copy_(torch.from_numpy(table).view(-1).view(torch.uint8))
        none: Any = None
        return StepTensors(none, none, none, none, packed)

    def _verified(self, planned: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the drafts [B] and how many of them are accepted [B]."""
        shape = len(planned.slots), self.device.buffers.table_width - TOKENS
        is_rejected = self._draw.random(shape) >= self.acceptance
        accepted = is_rejected.argmax(1) + np.where(is_rejected.any(1), 0, 99)
        return planned.drafts, np.minimum(accepted, planned.drafts)

    def _pack(self, rows: int, features: StepFeatures) -> PackedResults:
        key = rows, features
        if key not in self._packed:
            parts = PackedResults(torch.zeros(1 << 22, dtype=torch.uint8))
            parts.add_table(len(self._length), self.device.buffers.table_width)
            if (top := features.raw_top) >= 0:
                columns = parts.add_logprobs(LogprobKind.RAW, rows, top, features.raw_named)
                columns.ranks.fill_(1)
                columns.values.fill_(-1.0)
            if features.has_raw_drafts:
                parts.add_draft_targets(LogprobKind.RAW, rows).values.fill_(-1.0)
                parts.add_copy("draft_tokens", torch.zeros(rows, dtype=torch.int64))
                parts.add_copy("draft_logprobs", self.device.slots.columns.draft_logprob)
            self._packed[key] = parts.complete()
        return self._packed[key]
