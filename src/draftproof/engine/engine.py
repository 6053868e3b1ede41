"""The engine: requests in, step outputs out. Built once from a configuration."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any

import torch

from draftproof.config import EngineConfig
from draftproof.engine.drafting import budget_kernels
from draftproof.engine.drafting.policy import DraftModel, DraftPolicy
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.engine.loop import Loop
from draftproof.engine.page_pool import Pages
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import Sequence
from draftproof.engine.sizing import resolve_sizes
from draftproof.engine.slots import Slots
from draftproof.engine.step.device_step import DeviceStep
from draftproof.engine.step.logprob_routing import logprob_kind_of, needs_host_logprobs
from draftproof.engine.step.step_features import logprob_width
from draftproof.engine.step.step_results import StepResults
from draftproof.engine.step.warmup import Progress, WarmUp
from draftproof.engine.validation import Limits, check_request
from draftproof.errors import ConfigError, EngineDeadError, QueueFullError, RequestError, nearest
from draftproof.metrics import EngineStats, RequestStats
from draftproof.models.draft_head.config import TargetIdentity
from draftproof.models.draft_head.model import TargetParts
from draftproof.models.load import Checkpoint
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.ops import resolve, resolve_device
from draftproof.propose import PROPOSERS
from draftproof.propose.base import DeviceProposer, Proposer, ProposerEnv
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import Request, StepFeatures
from draftproof.verify import PLAIN_STRATEGY, STRATEGIES
from draftproof.verify.base import Strategy
from draftproof.verify.grammar_guide import GrammarGuide
from draftproof.verify.sampler import Sampler

FORCED_POLICIES = ("reject_all", "synthetic")  # accept_policy values that imply fixed drafts


class Engine:
    """Serves token ids. `add` and `abort` at any time between steps; `step` does the work."""

    step_blocks = False

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress = lambda *_: None
    ) -> None:
        with torch.inference_mode():
            spec = config.speculative
            # acceptance that is forced says nothing about the drafts
            self._is_forced = spec is not None and spec.accept_policy in FORCED_POLICIES
            self._adaptive = spec is not None and spec.adaptive and not self._is_forced
            self._build(config, checkpoint)
            if config.warm_up and (self.ops.runtime.asynchronous or self._adaptive):
                with self.ops.runtime.step_context():
                    self._warm_up(progress)

    def _build(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        model_config = checkpoint.config
        self.config = config
        self.model_config = model_config
        self.dtype = checkpoint.dtype
        device = resolve_device(config.device)
        self.ops = resolve(config.backend, device, config.numerics)
        sizes = resolve_sizes(config, checkpoint, self.ops, _drafter(config.speculative, checkpoint))
        weights = checkpoint.weights
        lm_head = [weights.get("lm_head.weight", weights["model.embed_tokens.weight"])]
        identity = TargetIdentity.from_weights(model_config, checkpoint.tensors)
        model = create_model(model_config, weights, self.ops, sizes.max_len)
        vocab = model_config.vocab_size
        slots = Slots(sizes.num_seqs, sizes.max_len, sizes.k, sizes.max_pages, vocab, self.ops)
        env = ProposerEnv(
            ops=self.ops,
            k=sizes.k,
            vocab_size=vocab,
            hidden_size=model_config.hidden_size,
            num_slots=sizes.num_seqs,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            max_len=sizes.max_len,
            max_rows=sizes.max_rows,
            target=TargetParts(
                config=model_config,
                identity=identity,
                dtype=checkpoint.dtype,
                embedding=model.embedding,
                lm_head=model.lm_head,
                lm_head_rows=lambda ids: lm_head[0].rows(ids).dequantize(checkpoint.dtype).to(ids.device),
            ),
        )
        proposer = self._speculation(config.speculative, env)
        if proposer is not None:
            budget_kernels.compile_kernels()
        lm_head.clear()  # from here on only the packed form is used
        self.runner = Runner(
            model,
            self.ops,
            checkpoint.dtype,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            max_rows=sizes.max_rows,
            taps=proposer.taps if isinstance(proposer, DeviceProposer) else (),
        )
        ahead = self.ops.runtime.asynchronous if config.overlap is None else config.overlap
        ahead = ahead and (proposer is None or proposer.graph_safe)
        drafts_before_plan = proposer is not None and not ahead and self._drafts_before_plan(proposer)
        policy = DraftPolicy(
            sizes.num_seqs,
            StepCost.unmeasured(sizes.max_rows),
            DraftModel.of_proposer(proposer, sizes.k, self.ops.runtime.asynchronous),
            asynchronous=self.ops.runtime.asynchronous,
            drafts_before_plan=drafts_before_plan,
            sources=proposer.sources if proposer else (),
        )
        scheduler = Scheduler(
            slots,
            Pages(sizes.num_pages),
            sizes.page_size,
            sizes.max_rows,
            policy,
            config.enable_prefix_caching,
            lookahead=sizes.k if proposer and proposer.stores_kv else 0,
            drafts_before_plan=drafts_before_plan,
        )
        sampler = Sampler(self.ops, self._judges, config.speculative)
        # An error inside a replayed graph does not name its op: debugging ops one by one needs eager steps.
        enforce_eager = config.enforce_eager or os.environ.get("DRAFTPROOF_DEBUG", "0") == "1"
        step = DeviceStep(
            self.runner, slots, sampler, proposer, max_rows=sizes.max_rows, enforce_eager=enforce_eager
        )
        self.loop = Loop(scheduler, slots, step, proposer, ahead, config.debug)
        self.limits = Limits(
            vocab_size=vocab,
            max_model_len=sizes.max_len,
            max_logprobs=config.max_logprobs,
            kv_tokens=sizes.kv_tokens,
            speculative_tokens=sizes.k if proposer else 0,
            takes_prediction=bool(proposer and proposer.takes_prediction),
            at_once=None if config.max_num_waiting is None else sizes.num_seqs + config.max_num_waiting,
        )
        self._sequences: dict[str, Sequence] = {}
        self._broken: Exception | None = None

    def _warm_up(self, progress: Progress) -> None:
        """Capture the steps that most requests need (others are when they are first met); time them."""
        step, limits = self.loop.device, self.limits
        usual = self._judges.index(self.strategy)
        wide = len(self.loop.slots.requests) * (1 + limits.speculative_tokens)
        traits = StepFeatures((usual,)), StepFeatures((usual,), raw_top=logprob_width(5, limits.vocab_size))
        warm_up = WarmUp(step)
        seconds = warm_up.prepare(traits, min(wide, step.max_rows), progress)
        draft_seconds = warm_up.draft_seconds(seconds)
        if self.loop.scheduler.drafts_before_plan:  # drafts exist already when they are chosen
            draft_seconds = {}
        is_padded = self.ops.runtime.asynchronous
        cost = StepCost(seconds, interpolate=not is_padded, draft_seconds=draft_seconds)
        self.loop.policy.set_cost(cost, self._adaptive)

    def _drafts_before_plan(self, proposer: Proposer) -> bool:
        """Return whether drafts cost next to nothing, or the proposer weighs their cost itself."""
        return proposer.is_free or (
            proposer.model_source >= 0 and self._adaptive and not self.ops.runtime.asynchronous
        )

    def _speculation(self, config: SpeculativeConfig | None, env: ProposerEnv) -> Proposer | None:
        """The proposer; sets `strategy_name` and builds that strategy. Options nobody knows are errors."""
        self._strategies: dict[str, Strategy] = {}
        self._judges: list[Strategy] = []  # the same, by number
        self._strategy_options: dict[str, Any] = {}
        self.strategy_name = config.verify_strategy if config else PLAIN_STRATEGY
        if config is None:
            self._strategy(self.strategy_name)
            return None
        kind = lookup(PROPOSERS, config.method, "speculative method")
        judge = lookup(STRATEGIES, config.verify_strategy, "verify_strategy")
        for key in config.options:
            if key not in kind.defaults and key not in judge.defaults:
                own = SpeculativeConfig.__dataclass_fields__.keys() - {"options"}
                hint = _owner(key) or nearest(key, [*own, *kind.defaults, *judge.defaults])
                raise ConfigError(
                    f"speculative_config has no key {key!r} for method {config.method!r} and "
                    f"verify_strategy {config.verify_strategy!r}: {hint}"
                )
        self._strategy_options = {k: v for k, v in config.options.items() if k in judge.defaults}
        guarantee = self._strategy(self.strategy_name).guarantee().under_policy(config.accept_policy)
        if not guarantee.lossless:
            logging.getLogger("draftproof").warning(
                "verify_strategy %r, accept_policy %r: %s",
                self.strategy_name,
                config.accept_policy,
                guarantee.label,
            )
        mine = {k: v for k, v in config.options.items() if k in kind.defaults}
        proposer: Proposer = kind(env, mine)
        return proposer

    def _strategy(self, name: str) -> Strategy:
        if name not in self._strategies:
            options = self._strategy_options if name == self.strategy_name else {}
            self._strategies[name] = lookup(STRATEGIES, name, "verify_strategy")(self.ops, options)
            self._judges.append(self._strategies[name])
        return self._strategies[name]

    # --- serving ----------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        return self._strategies[self.strategy_name]

    def strategy_name_of(self, params: SamplingParams) -> str:
        """The strategy that a request with these params gets; RequestError if it names none."""
        wish = params.speculation
        if wish.verify_strategy is None:
            # without speculation the model's own output is due, also from an engine that is lossy with it
            return self.strategy_name if wish.enabled else PLAIN_STRATEGY
        name = wish.verify_strategy
        known = isinstance(name, str) and (name == self.strategy_name or name in STRATEGIES)
        if not known:  # a request never names code to import
            raise RequestError(
                f"unknown verify_strategy {name!r}: {nearest(str(name), STRATEGIES)}", "speculative"
            )
        return name

    def strategy_of(self, params: SamplingParams) -> Strategy:
        return self._strategy(self.strategy_name_of(params))

    def strategy_label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the strategy of a request with its label, and whether its output is lossless."""
        guarantee = self.strategy_of(params).guarantee()
        config = self.config.speculative
        if config is not None and params.speculation.enabled:  # without drafts no policy applies
            guarantee = guarantee.under_policy(config.accept_policy)
        return f"{self.strategy_name_of(params)}: {guarantee.label}", guarantee.is_lossless(params.greedy)

    @property
    def sources(self) -> tuple[str, ...]:
        """Who may have proposed a draft."""
        return self.loop.sources

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """As the model's configuration names them."""
        return self.model_config.eos_token_ids

    def wake(self) -> None:
        """A step never waits for anything that somebody could end."""

    @property
    def intake_rows(self) -> float:
        """Prompt rows to prepare before a step: one step's worth if steps overlap, else no limit."""
        return self.loop.scheduler.max_rows if self.loop.overlap else math.inf

    def set_background_work(self, work: Callable[[], object]) -> None:
        """`work` is done while the device has a step to run and the next one queued: nobody waits for it."""
        self.loop.meanwhile = work

    def describe(self) -> str:
        """One line for people: what runs, where, who guesses and who judges."""
        spec = self.config.speculative
        how = f"{spec.method} drafts, k={spec.num_speculative_tokens}" if spec else "no drafts"
        return (
            f"{self.config.model}, {str(self.dtype).removeprefix('torch.')} on {self.ops.device} "
            f"({self.ops.name} backend), {how}, {self.strategy_label(SamplingParams())[0]}"
        )

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def check(self, request: Request) -> int:
        """Refuse what cannot be served (RequestError); the length it may grow to."""
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id!r} is already running", "request_id")
        self.strategy_of(request.params)
        return check_request(request, self.limits)

    def stats(self) -> EngineStats:
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
        if self._broken is not None:
            broken = f"{type(self._broken).__name__}: {self._broken}"
            raise EngineDeadError(f"this engine broke, build another: {broken}") from self._broken

    def _check_queue(self) -> None:
        """Those for whom a slot is free do not queue up: they are seated in the next step."""
        most, scheduler = self.config.max_num_waiting, self.loop.scheduler
        queue = len(scheduler.waiting) - self.loop.slots.num_free
        if most is not None and queue >= most:
            raise QueueFullError(f"{len(scheduler.waiting)} requests are waiting already: try again later")

    def add(self, request: Request, max_length: int | None = None) -> RequestStats:
        """What is counted for it, kept up to date. `max_length`: what `check` gave, if it was called before.

        QueueFullError: `max_num_waiting` are waiting.
        """
        self._check_alive()
        if max_length is None or request.id in self._sequences:
            max_length = self.check(request)
        self._check_queue()
        params, vocab = request.params, self.limits.vocab_size
        wish = params.speculation
        limit = 0
        if self.loop.proposer and wish.enabled:
            limit = wish.num_speculative_tokens or self.limits.speculative_tokens
        sequence = Sequence(
            request,
            max_length,
            draft_limit=limit,
            adaptive=self._may_adapt(params) and (self._adaptive if wish.adaptive is None else wish.adaptive),
            strategy=self._judges.index(self.strategy_of(params)),
            logprob_kind=logprob_kind_of(params, vocab),
            has_host_processors=bool(params.logits_processors or request.bad_word_ids),
            needs_host_logprobs=needs_host_logprobs(params, vocab),
            guide=None if request.grammar is None else GrammarGuide(request.grammar),
        )
        self._sequences[request.id] = sequence
        self.loop.scheduler.add(sequence)
        return sequence.stats

    def _may_adapt(self, params: SamplingParams) -> bool:
        """May drafts be left out when they are there? How many there are can depend on what was drawn, and
        who leaves a draft out because of that spoils the law that is counted on."""
        proposer = self.loop.proposer
        counts_on_law = self.strategy_of(params).needs_draft_probs and proposer and proposer.reports_probs
        return not self._is_forced and not (counts_on_law and self.loop.scheduler.drafts_before_plan)

    def abort(self, request_id: str) -> bool:
        """End a request now; False if it is not (or no longer) here. What it said may be found again."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if self._broken is None:
            self.loop.leave(sequence)
        return True

    def step(self) -> StepResults:
        """EngineDeadError: the device is gone. Whatever it raises, the engine is not to be used again."""
        self._check_alive()
        try:
            with torch.inference_mode(), self.ops.runtime.step_context():
                results = self.loop.step()
        except Exception as error:
            self._broken = error
            raise
        for i in results.finishes:
            del self._sequences[results.requests[i].id]
        return results


def _drafter(config: SpeculativeConfig | None, checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes that the proposer needs for each token, and besides."""
    if config is None:
        return 0, 0
    kind: type[Proposer] = lookup(PROPOSERS, config.method, "speculative method")
    return kind.storage(config.options, checkpoint.config, checkpoint.dtype)


def _owner(key: str) -> str | None:
    """A hint for an option of another strategy than the one named."""
    for name in STRATEGIES:
        if key in lookup(STRATEGIES, name, "verify_strategy").defaults:
            return f"it belongs to verify_strategy {name!r}"
    return None
