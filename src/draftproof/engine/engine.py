"""Engine: adds and aborts requests, runs steps and returns their results, in token ids."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from draftproof.compat.kv_events_config import KVEventsConfig
from draftproof.config import EngineConfig
from draftproof.engine.build import build_engine, is_adaptive, is_forced, warm_up
from draftproof.engine.live.engine import PausableEngine
from draftproof.engine.live.sleep import SleepMode
from draftproof.engine.live.weights import LiveWeights
from draftproof.engine.parallel.rank_processes import start_ranks
from draftproof.engine.sequence import Sequence
from draftproof.engine.step.step_features import draft_top
from draftproof.engine.step.step_results import (
    StepResults,
    column_logprob_kind,
    has_long_logprobs,
    requested_logprob_kind,
)
from draftproof.engine.step.warmup import Progress
from draftproof.engine.validation import check_request
from draftproof.errors import EngineDeadError, QueueFullError, RequestError
from draftproof.metrics import EngineStats, RequestStats
from draftproof.models.load import Checkpoint
from draftproof.sampling_params import SamplingParams
from draftproof.types import LogprobKind, Request
from draftproof.verify.base import Strategy
from draftproof.verify.grammar_guide import GrammarGuide

if TYPE_CHECKING:
    from draftproof.engine.kv_events.publisher import EventPublisher


class Engine(PausableEngine):
    """Inference engine over token ids. `add` and `abort` may be called between steps."""

    step_blocks = False

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress = lambda *_: None
    ) -> None:
        """Build the engine; `progress` is called while steps are captured."""
        self.config = config
        self.model_config = checkpoint.config
        self.dtype = checkpoint.dtype
        self._is_forced = is_forced(config.speculative)
        self._adaptive = is_adaptive(config.speculative)
        self._operations = deque()
        self._publisher: EventPublisher | None = None
        self._ranks = None
        if config.tensor_parallel_size > 1:
            self._ranks = start_ranks(config, checkpoint.config)
        try:
            self._build(checkpoint, progress)
            if config.publishes_kv_events:
                from draftproof.engine.kv_events.publisher import EventPublisher  # needs ZeroMQ

                self._publisher = EventPublisher(KVEventsConfig.parse(config.kv_events_config or {}))
        except BaseException:
            self.close()
            raise
        self._sequences: dict[str, Sequence] = {}
        self._failure: Exception | None = None  # a step raised: the engine is dead

    def _build(self, checkpoint: Checkpoint, progress: Progress) -> None:
        config = self.config
        with torch.inference_mode():
            parts = build_engine(config, checkpoint, self._ranks)
            self.ops, self.runner, self.loop = parts.ops, parts.runner, parts.loop
            self.limits, self._strategies = parts.limits, parts.strategies
            self._weight_formats = parts.weight_formats
            self._live = LiveWeights(config, checkpoint, parts.runner, parts.split)
            self._sleep = None
            if config.enable_sleep_mode:
                self._sleep = SleepMode(self.ops, parts.runner, parts.loop.proposer)
            self.guarantees = parts.strategies.guarantees
            self.sources, self.eos_token_ids = parts.loop.sources, checkpoint.config.eos_token_ids
            if config.warm_up and (self.ops.runtime.asynchronous or self._adaptive):
                with self.ops.runtime.step_context():
                    warm_up(parts, self._adaptive, progress)

    def close(self) -> None:
        """End the publisher of KV events and the processes of the other ranks, where there are any."""
        if self._publisher is not None:
            self._publish_events()
            self._publisher.close()
            self._publisher = None
        if self._ranks is not None:
            self._ranks.close()

    def strategy_label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the strategy of a request with its label, and whether its output is lossless."""
        return self.guarantees.label(params)

    def wake(self) -> None:
        """Do nothing: `step` never blocks on other processes."""

    @property
    def intake_rows(self) -> float:
        """Return the prompt rows to prepare before a step: those of one step if steps overlap, else all."""
        return self.loop.scheduler.max_rows if self.loop.overlap else math.inf

    def set_background_work(self, work: Callable[[], object]) -> None:
        """Call `work` while the device is busy and further steps are queued."""
        self.loop.set_background_work(work)

    def describe(self) -> str:
        """Return one line: model, weights, device, backend, proposer and strategy."""
        spec = self.config.speculative
        how = f"{spec.method} drafts, k={spec.num_speculative_tokens}" if spec else "no drafts"
        weights = str(self.dtype).removeprefix("torch.")
        if self._weight_formats:
            weights = f"{self._weight_formats} weights with {weights} activations"
        return (
            f"{self.config.model}, {weights} on {self.ops.device} "
            f"({self.ops.name} backend), {how}, {self.strategy_label(SamplingParams())[0]}"
        )

    @property
    def has_work(self) -> bool:
        """Return whether there are unfinished requests."""
        return bool(self._sequences)

    def check(self, request: Request) -> int:
        """Return the maximum length of a request; RequestError if it cannot be served."""
        self.check_awake()
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id!r} is already running", "request_id")
        self.guarantees.name_for(request.params)
        return check_request(request, self.limits)

    def stats(self) -> EngineStats:
        """Return counters and timings."""
        scheduler = self.loop.scheduler
        pages = scheduler.pages
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.held),
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=scheduler.num_queried,
            num_cached_tokens=scheduler.num_cached,
            num_pages=pages.capacity,
            num_used_pages=pages.capacity - pages.num_free,
            num_cached_pages=pages.num_idle,
            weights_version=self.weights_version,
            sleep_level=self.sleep_level,
            timings=scheduler.timings.copy(),
        )

    def _check_alive(self) -> None:
        if self._failure is not None:
            failure = f"{type(self._failure).__name__}: {self._failure}"
            raise EngineDeadError(f"this engine has failed, create a new one: {failure}") from self._failure

    def add(self, request: Request, max_length: int | None = None) -> RequestStats:
        """Queue a request; return its counters, which are updated in place.

        max_length: the result of `check`, if it was called. QueueFullError: too many requests are waiting.
        """
        self._check_alive()
        if max_length is None or request.id in self._sequences:
            max_length = self.check(request)
        scheduler = self.loop.scheduler
        max_waiting, num_waiting = self.config.max_num_waiting, len(scheduler.waiting) + len(scheduler.held)
        if max_waiting is not None and num_waiting - self.loop.slots.num_free >= max_waiting:
            raise QueueFullError(f"{num_waiting} requests are waiting already: try again later")
        params, vocab, speculation = request.params, self.limits.vocab_size, request.params.speculation
        limit = speculation.num_speculative_tokens or self.limits.speculative_tokens
        adaptive = self._adaptive if speculation.adaptive is None else speculation.adaptive
        is_long, strategy = has_long_logprobs(params, vocab), self._strategies.for_request(params)
        sequence = Sequence(
            request,
            max_length,
            draft_limit=limit if self.loop.proposer and speculation.enabled and not request.pooling else 0,
            adaptive=adaptive and self._may_adapt(strategy),
            strategy=self._strategies.by_index.index(strategy),
            logprob_kind=column_logprob_kind(params, vocab),
            draft_kind=requested_logprob_kind(params) if params.include_draft_logprobs else LogprobKind.NONE,
            draft_top=draft_top(params, self.limits.vocab_size) if params.include_draft_logprobs else 0,
            has_long_logprobs=is_long,
            has_host_processors=bool(params.logits_processors or request.bad_word_ids),
            guide=self._guide(request),
        )
        self._sequences[request.id] = sequence
        self.loop.scheduler.add(sequence)
        return sequence.stats

    def _guide(self, request: Request) -> GrammarGuide | None:
        seconds = self.config.max_grammar_seconds
        return None if request.grammar is None else GrammarGuide(request.grammar, seconds)

    def _may_adapt(self, strategy: Strategy) -> bool:
        """Return whether drafts of a request with this strategy may be dropped by their number.

        Drafts that exist before the plan may not under a strategy that uses their probabilities: their
        number can depend on sampled tokens, so the output distribution would be biased.
        """
        proposer, drafts_before_plan = self.loop.proposer, self.loop.scheduler.drafts_before_plan
        has_probs = proposer is not None and proposer.reports_probs
        needs_probs = has_probs and strategy.needs_draft_probs
        return not self._is_forced and not (needs_probs and drafts_before_plan)

    def _publish_events(self) -> None:
        events = self.loop.scheduler.pages.events
        if self._publisher is not None and events is not None:
            self._publisher.publish(events)

    def abort(self, request_id: str) -> bool:
        """Finish a request now; return False if it is unknown. Its tokens stay in the prefix cache."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if self._failure is None:
            self.loop.release.abort(sequence)
            self._publish_events()  # a step may not follow
        return True

    def step(self) -> StepResults:
        """Run a step and return its results. After any exception the engine is dead."""
        self._check_alive()
        try:
            if self._operations:
                self.run_operations()
                self._check_alive()
            with torch.inference_mode(), self.ops.runtime.step_context():
                results = self.loop.step()
            self.runner.check_ranks()
        except Exception as error:
            self._failure = error
            raise
        self._publish_events()
        for i in results.finishes:
            del self._sequences[results.requests[i].id]
        return results
