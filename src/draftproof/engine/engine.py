"""Engine: adds and aborts requests, runs steps and returns their results, in token ids."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from draftproof.config import EngineConfig
from draftproof.engine.build import build_engine, is_adaptive, is_forced, warm_up
from draftproof.engine.sequence import Sequence
from draftproof.engine.step.logprob_routing import logprob_kind_of, needs_host_logprobs
from draftproof.engine.step.step_results import StepResults
from draftproof.engine.step.warmup import Progress
from draftproof.engine.validation import check_request
from draftproof.errors import EngineDeadError, QueueFullError, RequestError
from draftproof.metrics import EngineStats, RequestStats
from draftproof.models.load import Checkpoint
from draftproof.sampling_params import SamplingParams
from draftproof.types import Request
from draftproof.verify.base import Strategy
from draftproof.verify.grammar_guide import GrammarGuide


class Engine:
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
        with torch.inference_mode():
            parts = build_engine(config, checkpoint)
            self.ops, self.runner, self.loop = parts.ops, parts.runner, parts.loop
            self.limits, self._strategies = parts.limits, parts.strategies
            if config.warm_up and (self.ops.runtime.asynchronous or self._adaptive):
                with self.ops.runtime.step_context():
                    warm_up(parts, self._adaptive, progress)
        self._sequences: dict[str, Sequence] = {}
        self._failure: Exception | None = None  # a step raised: the engine is dead

    # --- serving ----------------------------------------------------------------------------------

    @property
    def strategy_name(self) -> str:
        """Return the name of the engine's own strategy."""
        return self._strategies.default_name

    @property
    def strategy(self) -> Strategy:
        """Return the engine's own strategy."""
        return self._strategies.default

    def strategy_of(self, params: SamplingParams) -> Strategy:
        """Return the strategy of a request with these params."""
        return self._strategies.for_request(params)

    def strategy_label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the strategy of a request with its label, and whether its output is lossless."""
        return self._strategies.label(params)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the names of the proposer's draft sources."""
        return self.loop.sources

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the end-of-text tokens of the model's configuration."""
        return self.model_config.eos_token_ids

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
        """Return one line: model, device, backend, proposer and strategy."""
        spec = self.config.speculative
        how = f"{spec.method} drafts, k={spec.num_speculative_tokens}" if spec else "no drafts"
        return (
            f"{self.config.model}, {str(self.dtype).removeprefix('torch.')} on {self.ops.device} "
            f"({self.ops.name} backend), {how}, {self.strategy_label(SamplingParams())[0]}"
        )

    @property
    def has_work(self) -> bool:
        """Return whether there are unfinished requests."""
        return bool(self._sequences)

    def check(self, request: Request) -> int:
        """Return the maximum length of a request; RequestError if it cannot be served."""
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id!r} is already running", "request_id")
        self.strategy_of(request.params)
        return check_request(request, self.limits)

    def stats(self) -> EngineStats:
        """Return counters and timings."""
        scheduler = self.loop.scheduler
        pages = scheduler.pages
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=scheduler.num_queried,
            num_cached_tokens=scheduler.num_cached,
            num_pages=pages.capacity,
            num_used_pages=pages.capacity - pages.num_free,
            num_cached_pages=pages.num_idle,
            timings=scheduler.timings.copy(),
        )

    def _check_alive(self) -> None:
        if self._failure is not None:
            failure = f"{type(self._failure).__name__}: {self._failure}"
            raise EngineDeadError(f"this engine broke, build another: {failure}") from self._failure

    def _check_queue(self) -> None:
        """Raise QueueFullError if too many requests wait, not counting those with a free slot."""
        max_waiting, scheduler = self.config.max_num_waiting, self.loop.scheduler
        queue = len(scheduler.waiting) - self.loop.slots.num_free
        if max_waiting is not None and queue >= max_waiting:
            raise QueueFullError(f"{len(scheduler.waiting)} requests are waiting already: try again later")

    def add(self, request: Request, max_length: int | None = None) -> RequestStats:
        """Queue a request; return its counters, which are updated in place.

        `max_length`: the result of `check`, if it was called before. QueueFullError: `max_num_waiting`
        requests are waiting already.
        """
        self._check_alive()
        if max_length is None or request.id in self._sequences:
            max_length = self.check(request)
        self._check_queue()
        params, vocab = request.params, self.limits.vocab_size
        speculation = params.speculation
        limit = 0
        if self.loop.proposer and speculation.enabled:
            limit = speculation.num_speculative_tokens or self.limits.speculative_tokens
        sequence = Sequence(
            request,
            max_length,
            draft_limit=limit,
            adaptive=self._may_adapt(params)
            and (self._adaptive if speculation.adaptive is None else speculation.adaptive),
            strategy=self._strategies.by_index.index(self.strategy_of(params)),
            logprob_kind=logprob_kind_of(params, vocab),
            has_host_processors=bool(params.logits_processors or request.bad_word_ids),
            needs_host_logprobs=needs_host_logprobs(params, vocab),
            guide=None if request.grammar is None else GrammarGuide(request.grammar),
        )
        self._sequences[request.id] = sequence
        self.loop.scheduler.add(sequence)
        return sequence.stats

    def _may_adapt(self, params: SamplingParams) -> bool:
        """Return whether existing drafts of a request may be dropped.

        Under a strategy that uses draft probabilities they may not if drafts are made before the plan: their
        number can depend on sampled tokens, so dropping by number would bias the output distribution.
        """
        proposer = self.loop.proposer
        uses_probs = self.strategy_of(params).needs_draft_probs and proposer and proposer.reports_probs
        return not self._is_forced and not (uses_probs and self.loop.scheduler.drafts_before_plan)

    def abort(self, request_id: str) -> bool:
        """Finish a request now; return False if it is unknown. Its tokens stay in the prefix cache."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if self._failure is None:
            self.loop.release.abort(sequence)
        return True

    def step(self) -> StepResults:
        """Run a step and return its results. After any exception the engine is dead."""
        self._check_alive()
        try:
            with torch.inference_mode(), self.ops.runtime.step_context():
                results = self.loop.step()
        except Exception as error:
            self._failure = error
            raise
        for i in results.finishes:
            del self._sequences[results.requests[i].id]
        return results
