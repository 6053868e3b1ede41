"""Construction of an engine from a configuration and a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from draftproof.config import EngineConfig
from draftproof.engine.drafting import budget_kernels
from draftproof.engine.drafting.expert_cost import with_expert_cost
from draftproof.engine.drafting.policy import DraftModel, DraftPolicy
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.engine.loop import Loop
from draftproof.engine.page_pool import Pages
from draftproof.engine.parallel.leader import LeaderRunner, LeaderSlots, mirror_graphs
from draftproof.engine.parallel.rank_checkpoint import (
    WholeVocabulary,
    check_invariant,
    cut_checkpoint,
    is_cut,
    plan_cuts,
    rank_ops,
    whole_vocabulary,
)
from draftproof.engine.parallel.rank_processes import RankProcesses
from draftproof.engine.parallel.sharded_weights import SplitWeights
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sizing import Sizes, resolve_sizes
from draftproof.engine.slots import Slots
from draftproof.engine.step.device_step import DeviceStep
from draftproof.engine.step.step_features import logprob_width
from draftproof.engine.step.warmup import Progress, WarmUp
from draftproof.engine.validation import Limits
from draftproof.errors import ConfigError, nearest
from draftproof.models.draft_head.config import TargetIdentity
from draftproof.models.draft_head.model import TargetParts
from draftproof.models.gguf.packed_store import packed_store
from draftproof.models.load import Checkpoint
from draftproof.models.registry import Model, create_model
from draftproof.models.runner import Runner
from draftproof.models.weight_formats import FloatWeight, WeightTensor, quantize_linears, used_formats
from draftproof.ops import Communicator, Ops
from draftproof.ops.contract.kv_layout import resolve_kv_dtype
from draftproof.ops.parallel.communicator import ProcessCommunicator
from draftproof.ops.parallel.forward import use_communicator
from draftproof.propose import PROPOSERS
from draftproof.propose.base import DeviceProposer, Proposer, ProposerEnv
from draftproof.registry import lookup
from draftproof.speculative_config import FIXED_DRAFT_POLICIES, SpeculativeConfig
from draftproof.types import StepFeatures
from draftproof.verify import STRATEGIES
from draftproof.verify.sampler import Sampler
from draftproof.verify.strategy_table import StrategyTable, strategy_option_owner

if TYPE_CHECKING:
    from draftproof.engine.kv_events.events import EventLog


WARM_UP_LOGPROBS = 5  # alternatives of the steps with logprobs that are captured at start


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Parts of an engine."""

    ops: Ops
    runner: Runner
    loop: Loop
    limits: Limits
    strategies: StrategyTable
    weight_formats: str  # quantised ones that the backend multiplies; "": none
    split: SplitWeights | None  # of weights that are cut


def is_forced(config: SpeculativeConfig | None) -> bool:
    """Return whether acceptance is forced, so that it says nothing about the drafts."""
    return config is not None and config.accept_policy in FIXED_DRAFT_POLICIES


def is_adaptive(config: SpeculativeConfig | None) -> bool:
    """Return whether the number of drafts adapts to their acceptance."""
    return config is not None and config.adaptive and not is_forced(config)


def build_engine(
    config: EngineConfig, checkpoint: Checkpoint, ranks: RankProcesses | None = None
) -> EngineParts:
    """Load the model and build all parts of an engine; `ranks`: the processes of its other ranks."""
    model_config, weights = checkpoint.config, checkpoint.weights
    ops = rank_ops(config, rank=0)
    check_invariant(config, ops)
    if ranks is not None:
        ranks.wait_reports()
        use_communicator(ops, ProcessCommunicator(ranks.path, 0, config.tensor_parallel_size, ops.device))
    elif is_cut(config):
        use_communicator(ops, Communicator())
    identity = _target_identity(checkpoint)
    lm_head = [weights.get("lm_head.weight", weights["model.embed_tokens.weight"])]
    drafter_bytes, vocabulary, split = _drafter_bytes(config, checkpoint), None, None
    if is_cut(config):
        checkpoint, vocabulary, split = _cut(config, checkpoint, ops, ranks)
        weights = checkpoint.weights
    else:
        quantize_linears(weights, config.quantization, ops)
    check_formats(weights, ops)
    formats = used_formats(weights, ops)
    ops.forward.check_kv_dtype(resolve_kv_dtype(config.kv_cache_dtype, checkpoint.dtype))
    sizes = resolve_sizes(config, checkpoint, ops, drafter_bytes)
    if ranks is not None:
        sizes = replace(sizes, num_pages=min([sizes.num_pages, *ranks.wait_reports()]))
        ranks.send(sizes)
    cached = () if is_cut(config) else list(weights.values())  # the cache holds whole weights
    with packed_store(ops, cached) as store:
        model = create_model(checkpoint.config, weights, ops, sizes.max_len, store)
    vocab = model_config.vocab_size
    slot_sizes = sizes.num_seqs, sizes.max_len, sizes.k, sizes.max_pages, vocab, ops
    slots = Slots(*slot_sizes) if ranks is None else LeaderSlots(ranks, *slot_sizes)
    shared = vocabulary or model
    env = ProposerEnv(
        ops=ops,
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
            embedding=shared.embedding,
            lm_head=shared.lm_head,
            lm_head_rows=lambda ids: lm_head[0].rows(ids).dequantize(checkpoint.dtype).to(ids.device),
        ),
        kv_cache_dtype=config.kv_cache_dtype,
    )
    proposer, strategies = _build_speculation(config.speculative, env)
    if proposer is not None:
        budget_kernels.compile_kernels()
    lm_head.clear()  # from here on only the packed form is used
    runner = _build_runner(config, sizes, model, ops, checkpoint.dtype, proposer, ranks)
    loop = _build_loop(config, sizes, slots, runner, proposer, strategies)
    limits = Limits(
        vocab_size=vocab,
        max_model_len=sizes.max_len,
        max_logprobs=config.max_logprobs,
        kv_tokens=sizes.kv_tokens,
        speculative_tokens=sizes.k if proposer else 0,
        max_open_requests=None if config.max_num_waiting is None else sizes.num_seqs + config.max_num_waiting,
    )
    return EngineParts(ops, runner, loop, limits, strategies, formats, split)


def _cut(
    config: EngineConfig, checkpoint: Checkpoint, ops: Ops, ranks: RankProcesses | None
) -> tuple[Checkpoint, WholeVocabulary | None, SplitWeights]:
    """Return the part of rank 0, the vocabulary of a draft head, and what an update needs."""
    vocabulary, weights = None, checkpoint.weights
    if needs_target(config.speculative):
        vocabulary = whole_vocabulary(weights, ops, checkpoint.dtype)
    cuts = plan_cuts(config, checkpoint, ops, rank=0)
    entries = () if vocabulary is None else vocabulary.entries
    split = SplitWeights.of_weights(cuts, weights, config.quantization, ops, ranks, entries)
    return cut_checkpoint(config, checkpoint, ops, cuts), vocabulary, split


def _build_runner(
    config: EngineConfig,
    sizes: Sizes,
    model: Model,
    ops: Ops,
    dtype: torch.dtype,
    proposer: Proposer | None,
    ranks: RankProcesses | None,
) -> Runner:
    options: dict[str, Any] = {
        "num_pages": sizes.num_pages,
        "page_size": sizes.page_size,
        "max_rows": sizes.max_rows,
        "taps": proposer.taps if isinstance(proposer, DeviceProposer) else (),
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    if ranks is None:
        return Runner(model, ops, dtype, **options, captures=not is_cut(config))
    runner = LeaderRunner(ranks, model, ops, dtype, **options)
    ranks.wait_reports()
    ranks.watch(on_failure=ops.communicator.abort)
    if ops.runtime.asynchronous:
        mirror_graphs(ops.runtime, ranks)
    return runner


def _target_identity(checkpoint: Checkpoint) -> TargetIdentity:
    """Return the identity of the target from its norms and the first rows of its embedding."""
    table = "model.embed_tokens.weight"
    weights = {name: w for name, w in checkpoint.weights.items() if name.endswith("norm.weight")}
    first = torch.arange(min(64, checkpoint.weights[table].shape[0]))
    weights[table] = checkpoint.weights[table].rows(first)
    dtypes = {n: checkpoint.dtype if isinstance(w, FloatWeight) else None for n, w in weights.items()}
    tensors = {name: weight.dequantize(dtypes[name]) for name, weight in weights.items()}
    return TargetIdentity.from_weights(checkpoint.config, tensors)


def check_formats(weights: Mapping[str, WeightTensor], ops: Ops) -> None:
    """Refuse quantised weights that the backend does not multiply."""
    formats = {weight.format for weight in weights.values() if not isinstance(weight, FloatWeight)}
    if missing := formats - ops.forward.weight_formats:
        raise ConfigError(
            f"the {ops.name} backend does not multiply weights in the format {', '.join(sorted(missing))}: "
            "use another backend (torch computes every format), or weights in another format"
        )


def _build_loop(
    config: EngineConfig,
    sizes: Sizes,
    slots: Slots,
    runner: Runner,
    proposer: Proposer | None,
    strategies: StrategyTable,
) -> Loop:
    ops = runner.ops
    overlap = ops.runtime.asynchronous if config.overlap is None else config.overlap
    overlap = overlap and (proposer is None or proposer.graph_safe)
    drafts_before_plan = False  # drafts cost next to nothing, or the proposer weighs their cost itself
    if proposer is not None and not overlap:
        weighs_cost = proposer.model_source >= 0 and is_adaptive(config.speculative)
        drafts_before_plan = proposer.is_free or (weighs_cost and not ops.runtime.asynchronous)
    policy = DraftPolicy(
        sizes.num_seqs,
        StepCost.unmeasured(sizes.max_rows),
        DraftModel.of_proposer(proposer, sizes.k, ops.runtime.asynchronous),
        asynchronous=ops.runtime.asynchronous,
        drafts_before_plan=drafts_before_plan,
        sources=proposer.sources if proposer else (),
    )
    scheduler = Scheduler(
        slots,
        Pages(sizes.num_pages, _event_log(config)),
        sizes.page_size,
        sizes.max_rows,
        policy,
        config.enable_prefix_caching,
        lookahead=sizes.k if proposer and proposer.stores_kv else 0,
    )
    sampler = Sampler(ops, strategies.by_index, config.speculative)
    # An error inside a replayed graph does not name its op: debugging ops one by one needs eager steps.
    enforce_eager = config.enforce_eager or os.environ.get("DRAFTPROOF_DEBUG", "0") == "1"
    step = DeviceStep(runner, slots, sampler, proposer, max_rows=sizes.max_rows, enforce_eager=enforce_eager)
    return Loop(
        scheduler,
        slots,
        step,
        proposer,
        overlap=overlap,
        grammar_seconds=config.max_grammar_seconds,
        debug=config.debug,
    )


def _event_log(config: EngineConfig) -> EventLog | None:
    """Return the record of KV events if they are published; an engine without them needs no msgspec."""
    if not config.publishes_kv_events:
        return None
    from draftproof.engine.kv_events.events import EventLog

    return EventLog(config.page_size)


def warm_up(parts: EngineParts, adaptive: bool, progress: Progress) -> None:
    """Capture the steps that most requests need and time them; others are captured on first use."""
    loop, limits = parts.loop, parts.limits
    default = parts.strategies.by_index.index(parts.strategies.default)
    max_rows = min(len(loop.slots.requests) * (1 + limits.speculative_tokens), loop.device.max_rows)
    top = logprob_width(WARM_UP_LOGPROBS, limits.vocab_size)
    features = StepFeatures((default,)), StepFeatures((default,), raw_top=top)
    warmer = WarmUp(loop.device)
    seconds = warmer.prepare(features, max_rows, progress)
    draft_seconds = warmer.draft_seconds(seconds)
    if loop.scheduler.drafts_before_plan:  # drafts exist already when they are chosen
        draft_seconds = {}
    is_padded = parts.ops.runtime.asynchronous
    if is_padded:  # captured steps were timed on padding, whose rows are equal
        seconds = with_expert_cost(seconds, loop.device.runner.model.config)
    cost = StepCost(seconds, not is_padded, True, draft_seconds, loop.device.drafting.timed_rounds)
    loop.policy.set_cost(cost, adaptive)


def _build_speculation(
    config: SpeculativeConfig | None, env: ProposerEnv
) -> tuple[Proposer | None, StrategyTable]:
    """Build the proposer and the strategies. An unknown option is a ConfigError."""
    if config is None:
        return None, StrategyTable(env.ops, None, {})
    kind = lookup(PROPOSERS, config.method, "speculative method")
    strategy = lookup(STRATEGIES, config.verify_strategy, "verify_strategy")
    for key in config.options:
        if key not in kind.defaults and key not in strategy.defaults:
            own = SpeculativeConfig.__dataclass_fields__.keys() - {"options"}
            hint = strategy_option_owner(key) or nearest(key, [*own, *kind.defaults, *strategy.defaults])
            raise ConfigError(
                f"speculative_config has no key {key!r} for method {config.method!r} and "
                f"verify_strategy {config.verify_strategy!r}: {hint}"
            )
    options = {k: v for k, v in config.options.items() if k in strategy.defaults}
    strategies = StrategyTable(env.ops, config, options)
    strategies.warn_if_lossy()
    proposer: Proposer = kind(env, {k: v for k, v in config.options.items() if k in kind.defaults})
    return proposer, strategies


def needs_target(config: SpeculativeConfig | None) -> bool:
    """Return whether the proposer uses the target's embedding and LM head."""
    if config is None:
        return False
    kind: type[Proposer] = lookup(PROPOSERS, config.method, "speculative method")
    return kind.needs_target(config.options)


def _drafter_bytes(config: EngineConfig, checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the bytes of the proposer per token, and fixed."""
    if config.speculative is None:
        return 0, 0
    kind: type[Proposer] = lookup(PROPOSERS, config.speculative.method, "speculative method")
    options = config.speculative.options
    return kind.storage(options, checkpoint.config, checkpoint.dtype, config.kv_cache_dtype)
