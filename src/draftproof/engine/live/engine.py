"""Engine that can be paused between steps: for weight updates, sleep and wake-up.

An operation needs a quiet engine. Until then `step` reads the steps in flight, whose results belong to the
weights before the operation. Running requests are preempted by it. They continue from their committed tokens,
whose KV is computed again with the weights of that time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from draftproof.engine.live.operations import Operation, OperationName, PauseMode
from draftproof.engine.live.sleep import NO_SLEEP_MODE, SleepMode, check_tags
from draftproof.engine.live.weights import LiveWeights, WeightUpdate
from draftproof.errors import ConfigError, EngineDownError

if TYPE_CHECKING:
    from draftproof.engine.loop import Loop
    from draftproof.engine.parallel.rank_processes import RankProcesses
    from draftproof.models.weights.update_source import WeightSource
    from draftproof.ops import Ops


class PausableEngine:
    """Pause, weight updates and sleep of an engine."""

    ops: Ops
    loop: Loop
    _live: LiveWeights
    _sleep: SleepMode | None
    _ranks: RankProcesses | None
    _failure: Exception | None
    _operations: deque[Operation]  # oldest first

    @property
    def weights_version(self) -> int:
        """Return the version of the weights: of the results of the last step, and of the next one."""
        return self._live.version

    @property
    def sleep_level(self) -> int:
        """Return 0 while the engine is awake, else the level of its sleep."""
        return 0 if self._sleep is None else self._sleep.level

    @property
    def has_operations(self) -> bool:
        """Return whether operations wait for the engine to become quiet, which takes steps."""
        return bool(self._operations)

    def prepare(self, name: OperationName, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """Return an operation that is ready to run; new weights are read and checked now, in any thread."""
        if name == "update_weights":
            return partial(self.update_weights, self.read_weights(**arguments))
        return partial(self.sleep if name == "sleep" else self.wake_up, **arguments)

    def operate(self, operation: Operation) -> None:
        """Queue an operation; it runs in a later `step`."""
        self._operations.append(operation)
        if len(self._operations) == 1:
            self._pause(operation.mode)

    def run_operations(self) -> None:
        """Run the queued operations for which the engine is quiet enough."""
        while self._operations and self.is_quiet:
            operation = self._operations.popleft()
            try:
                result = operation.run()
            except Exception as error:
                result = error
            self._resume()
            if self._operations:
                self._pause(self._operations[0].mode)
            operation.reply(result)

    def _pause(self, mode: PauseMode) -> None:
        if mode == "wait":
            self.loop.scheduler.hold_new()
        else:
            self.loop.is_paused = True

    @property
    def is_quiet(self) -> bool:
        """Return whether no step is in flight and, in mode "wait", no begun request is left."""
        scheduler = self.loop.scheduler
        is_draining = scheduler.holds_new and not self.loop.is_paused
        return not self.loop.pending and not (is_draining and (scheduler.running or scheduler.waiting))

    def _resume(self) -> None:
        """Continue after a pause, unless the engine sleeps."""
        if not self.sleep_level:
            self.loop.is_paused = False
            self.loop.scheduler.release_held()

    def read_weights(
        self, weights: WeightSource = (), draft_weights: WeightSource = (), version: int | None = None
    ) -> WeightUpdate:
        """Read and check an update without changing anything, in any thread."""
        return self._live.read(self.loop.proposer, weights, draft_weights, version)

    def update_weights(self, update: WeightUpdate) -> int:
        """Copy new weights into the storage of the old ones; return their version. The engine is quiet."""
        if self._sleep is not None:
            self._sleep.check_writable(update.is_complete)
        proposer = self.loop.proposer
        self._discard_kv()
        try:
            with torch.inference_mode():
                self._live.apply(update, proposer)
        except Exception as error:  # some weights may be new and some old
            self._failure = error
            raise
        if self._sleep is not None and update.is_complete:
            self._sleep.needs_weights = False
        if proposer is not None:
            with torch.inference_mode():
                self.loop.hooks.call(proposer.forget)
        return self.weights_version

    def _discard_kv(self) -> None:
        assert self.is_quiet, "steps are in flight"
        with torch.inference_mode(), self.ops.runtime.step_context():
            self.loop.release.release_finished()
            for sequence in self.loop.scheduler.discard_kv():
                self.loop.hooks.stop(sequence.last_slot)

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV. The engine is quiet, and stays so until `wake_up`."""
        if self._sleep is None:
            raise ConfigError(NO_SLEEP_MODE)
        if level not in (1, 2):
            raise ConfigError(f"level must be 1 (weights to the host) or 2 (weights dropped), got {level!r}")
        self._discard_kv()
        self._sleep.sleep(level)
        if self._ranks is not None:
            self._ranks.call("sleep", level)
        self.loop.is_paused = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore weights and KV, or those of `tags` alone; steps run when both are there."""
        if self._sleep is None:
            raise ConfigError(NO_SLEEP_MODE)
        known = check_tags(tags)
        with torch.inference_mode():
            self._sleep.wake_up(known, self._live.reload)
        if self._ranks is not None:
            self._ranks.call("wake_up", known)

    def check_awake(self) -> None:
        """Raise EngineDownError while the engine sleeps."""
        if self.sleep_level:
            raise EngineDownError("the engine sleeps: call wake_up, or try again later")
