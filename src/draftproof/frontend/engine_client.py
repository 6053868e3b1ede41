"""Engine interface that the frontend runs requests on: in this process or in another. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from draftproof.engine.step.step_results import StepResults
from draftproof.engine.validation import Limits
from draftproof.metrics import EngineStats, RequestStats
from draftproof.sampling_params import SamplingParams
from draftproof.types import Request


class EngineClient(Protocol):
    """Engine as the frontend uses it: `engine.Engine` or `serve.ipc.RemoteEngine`."""

    @property
    def limits(self) -> Limits:
        """Limits of the requests that the engine can serve."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the proposers that drafts can come from."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """End-of-text tokens of the model."""

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished."""

    @property
    def weights_version(self) -> int:
        """Version of the weights that the results of the last step were made with."""

    @property
    def sleep_level(self) -> int:
        """Level of the engine's sleep; 0: it is awake."""

    @property
    def has_operations(self) -> bool:
        """True while an operation waits for steps to be read."""

    @property
    def step_blocks(self) -> bool:
        """True if `step` waits for events; `wake`, from any thread, ends the wait."""

    def check(self, request: Request) -> int:
        """Return the maximum length of a request; RequestError if it cannot be served."""

    def add(self, request: Request, max_length: int | None = None) -> RequestStats:
        """Queue a request and return its statistics, which the engine updates until it finishes."""

    def abort(self, request_id: str) -> bool:
        """Remove a request; False if the engine does not have it."""

    def step(self) -> StepResults:
        """Run one step and return its results."""

    def wake(self) -> None:
        """End the wait of a `step` in progress."""

    def set_background_work(self, work: Callable[[], object]) -> None:
        """Set a function that the engine calls between two steps, best while the device is busy."""

    def strategy_label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the strategy of a request with its label, and whether its output is lossless."""

    def stats(self) -> EngineStats:
        """Return counters and gauges of the engine."""

    def describe(self) -> str:
        """Return one line about model, device and speculation."""
