"""Operations on a running engine: those of `LLM`, and the replies that `AsyncLLM` waits for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftproof.engine.live.operations import Operation, OperationName, Reply, check_mode
from draftproof.frontend.engine_client import EngineClient
from draftproof.frontend.request_tracker import RequestTracker

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine
    from draftproof.models.weights.update_source import WeightSource


class EngineOperations:
    """Weight updates, sleep and wake-up of an LLM."""

    engine: Engine
    tracker: RequestTracker

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise EngineClosedError if the engine cannot be used from here."""

    def update_weights(
        self,
        weights: WeightSource = (),
        *,
        draft_weights: WeightSource = (),
        version: int | None = None,
        mode: str = "keep",
    ) -> int:
        """Replace weights in place and return their version; some or all of them.

        `weights`: (name, tensor) pairs under the names of the checkpoint, or a folder with safetensors files.
        `draft_weights`: the same for a draft head or model. If anything does not fit, LoadError is raised and
        all weights stay. `version`: by default the next number. `mode`: see docs/rl.md.
        """
        arguments = {"weights": weights, "draft_weights": draft_weights, "version": version}
        return int(self._operate("update_weights", arguments, mode))

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Release the memory of weights and KV until `wake_up`; needs `enable_sleep_mode`.

        Level 1 copies the weights to host memory, level 2 drops them.
        """
        self._operate("sleep", {"level": level}, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `sleep` released; `tags`: "weights" or "kv_cache" alone."""
        self._operate("wake_up", {"tags": tags})

    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self.engine.sleep_level > 0

    @property
    def weights_version(self) -> int:
        """Return the version of the weights: 0 as loaded, larger with every update."""
        return self.engine.weights_version

    def _operate(self, name: OperationName, arguments: Mapping[str, Any], mode: str = "keep") -> Any:
        """Run an operation between two steps; open streams continue afterwards."""
        self._check_usable()
        checked, results = check_mode(mode), list[Any]()
        self.engine.operate(Operation(self.engine.prepare(name, arguments), checked, results.append))
        while not results:
            self.tracker.step()
        return raised(results[0])


class PendingOperations:
    """Replies to the callers of operations that have not run yet."""

    def __init__(self) -> None:
        self._replies: list[Reply] = []

    def begin(
        self, start: Callable[[Reply], None], closed_error: Callable[[], Exception | None], reply: Reply
    ) -> None:
        """Call `start` with a function that replies once; reply with the error of a closed engine."""
        if (error := closed_error()) is not None:
            reply(error)
            return
        self._replies.append(reply)

        def reply_once(result: Any) -> None:
            if reply in self._replies:
                self._replies.remove(reply)
                reply(result)

        start(reply_once)

    def end(self, error: Exception) -> None:
        """Reply with `error` to all that wait."""
        while self._replies:
            self._replies.pop()(error)


def is_idle(engine: EngineClient, open_jobs: Collection[object]) -> bool:
    """Return whether no step has anything to do until a command comes."""
    has_work = engine.has_operations or (open_jobs and not engine.sleep_level)
    return not engine.step_blocks and not has_work


def raised(result: Any) -> Any:
    """Return the result of an operation, or raise it if it is an exception."""
    if isinstance(result, Exception):
        raise result
    return result
