"""The engine: requests in, step outputs out. Built once from a configuration."""

from __future__ import annotations

import logging
from typing import Any

import torch

from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.engine.admission import Limits, check_request
from draftproof.engine.budget import DraftBudget
from draftproof.engine.loop import Loop
from draftproof.engine.pages import Pages
from draftproof.engine.scheduler import Scheduler, Sequence
from draftproof.engine.slots import Slots
from draftproof.errors import ConfigError, RequestError, nearest
from draftproof.models.config import ModelConfig
from draftproof.models.llama import Llama
from draftproof.models.load import Checkpoint
from draftproof.models.runner import Runner, kv_bytes_per_token
from draftproof.ops import resolve, resolve_device
from draftproof.propose import PROPOSERS, Proposer, ProposerEnv
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.types import Request, StepOutput
from draftproof.verify import STRATEGIES, Strategy
from draftproof.verify.sampler import Sampler

DEFAULT_MAX_LEN = 8192  # where the model allows more, longer contexts are asked for by max_model_len
DEFAULT_KV_BYTES = 2 << 30


class Engine:
    """Serves token ids. `add` and `abort` at any time between steps; `step` does the work."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        with torch.inference_mode():
            self._build(config, checkpoint)

    def _build(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        model_config = checkpoint.config
        self.config = config
        self.model_config = model_config
        self.dtype = checkpoint.dtype
        device = resolve_device(config.device)
        self.ops = resolve(config.backend, device)
        max_len = _max_len(config, model_config)
        k = config.speculative.num_speculative_tokens if config.speculative else 1
        num_pages = 1 + _num_pages(config, model_config, checkpoint.dtype, max_len)
        max_pages = -(-max_len // config.page_size)
        max_rows = config.max_num_batched_tokens
        if max_rows < config.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({max_rows}) must be at least max_num_seqs "
                f"({config.max_num_seqs}): each running request needs a row a step"
            )
        model = Llama(model_config, checkpoint.tensors, self.ops, max_len)
        self.runner = Runner(
            model,
            self.ops,
            checkpoint.dtype,
            num_pages=num_pages,
            page_size=config.page_size,
            max_rows=max_rows,
        )
        vocab = model_config.vocab_size
        slots = Slots(config.max_num_seqs, max_len, k, max_pages, vocab, device)
        scheduler = Scheduler(slots, Pages(num_pages), config.page_size, max_rows)
        env = ProposerEnv(
            ops=self.ops,
            k=k,
            vocab_size=vocab,
            hidden_size=model_config.hidden_size,
            num_slots=config.max_num_seqs,
            num_pages=num_pages,
            page_size=config.page_size,
            max_len=max_len,
            max_rows=max_rows,
        )
        proposer = self._speculation(config.speculative, env)
        sampler = Sampler(self.ops, config.speculative)
        self.loop = Loop(scheduler, slots, self.runner, sampler, proposer, config.debug)
        self.limits = Limits(
            vocab_size=vocab,
            max_model_len=max_len,
            max_logprobs=config.max_logprobs,
            kv_tokens=(num_pages - 1) * config.page_size,
            speculative_tokens=k if proposer else 0,
            takes_prediction=bool(proposer and proposer.takes_prediction),
        )
        self._sequences: dict[str, Sequence] = {}

    def _speculation(self, config: SpeculativeConfig | None, env: ProposerEnv) -> Proposer | None:
        """The proposer; sets `self.strategies` and `self.strategy`. Options nobody knows are errors."""
        self._strategies: dict[str, Strategy] = {}
        self._strategy_options: dict[str, Any] = {}
        self.strategy_name = config.verify_strategy if config else "target_match"
        if config is None:
            self._strategy(self.strategy_name)
            return None
        kind = lookup(PROPOSERS, config.method, "speculative method")
        judge = lookup(STRATEGIES, config.verify_strategy, "verify_strategy")
        for key in config.options:
            if key not in kind.defaults and key not in judge.defaults:
                own = SpeculativeConfig.__dataclass_fields__.keys() - {"options"}
                known = [*own, *kind.defaults, *judge.defaults]
                raise ConfigError(
                    f"speculative_config has no key {key!r} for method {config.method!r} and "
                    f"verify_strategy {config.verify_strategy!r}: {nearest(key, known)}"
                )
        self._strategy_options = {k: v for k, v in config.options.items() if k in judge.defaults}
        if not self._strategy(self.strategy_name).lossless:
            logging.getLogger("draftproof").warning(
                "verify_strategy %r: %s", self.strategy_name, self.strategy.label
            )
        mine = {k: v for k, v in config.options.items() if k in kind.defaults}
        proposer: Proposer = kind(env, mine)
        return proposer

    def _strategy(self, name: str) -> Strategy:
        if name not in self._strategies:
            options = self._strategy_options if name == self.strategy_name else {}
            self._strategies[name] = lookup(STRATEGIES, name, "verify_strategy")(self.ops, options)
        return self._strategies[name]

    # --- serving ----------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        return self._strategies[self.strategy_name]

    def strategy_of(self, params: SamplingParams) -> Strategy:
        """The strategy that a request with these params gets; RequestError if it names none."""
        name = params.speculation.verify_strategy or self.strategy_name
        if name != self.strategy_name and name not in STRATEGIES:  # a request never names code to import
            raise RequestError(
                f"unknown verify_strategy {name!r}: {nearest(str(name), STRATEGIES)}", "speculative"
            )
        return self._strategy(name)

    def describe(self) -> str:
        """One line for people: what runs, where, who guesses and who judges."""
        spec = self.config.speculative
        how = f"{spec.method} drafts, k={spec.num_speculative_tokens}" if spec else "no drafts"
        return (
            f"{self.config.model}, {str(self.dtype).removeprefix('torch.')} on {self.ops.device} "
            f"({self.ops.name} backend), {how}, {self.strategy_name}: {self.strategy.label}"
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

    def add(self, request: Request) -> None:
        max_length = self.check(request)
        wish, spec = request.params.speculation, self.config.speculative
        limit = 0
        if self.loop.proposer and wish.enabled:
            limit = wish.num_speculative_tokens or self.limits.speculative_tokens
        budget = DraftBudget(limit, spec.adaptive if spec else False)
        sequence = Sequence(request, self.strategy_of(request.params), budget, max_length)
        self._sequences[request.id] = sequence
        self.loop.scheduler.waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request now; False if it is not (or no longer) here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self.loop.end(sequence)
        return True

    def step(self) -> list[StepOutput]:
        with torch.inference_mode(), self.ops.stepping():
            outputs = self.loop.step()
        for output in outputs:
            if output.finish_reason is not None:
                del self._sequences[output.request_id]
        return outputs


def _max_len(config: EngineConfig, model: ModelConfig) -> int:
    asked = config.max_model_len
    if asked is None:
        return min(model.max_position, DEFAULT_MAX_LEN)
    if asked > model.max_position:
        raise ConfigError(f"max_model_len={asked} is beyond the {model.max_position} positions of this model")
    return asked


def _num_pages(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_len: int) -> int:
    """Pages for `kv_cache_tokens`, or as many as every slot can fill within DEFAULT_KV_BYTES."""
    tokens = config.kv_cache_tokens
    if tokens is None:
        each = kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, dtype)
        room = max(DEFAULT_KV_BYTES // each, max_len)
        tokens = min(room, config.max_num_seqs * max_len)
    return -(-tokens // config.page_size)
