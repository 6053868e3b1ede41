"""Bitwise comparison of requests served in a batch with drafts against each request alone without drafts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch

import grammars
import heads
import proposers
import tiny
from draftproof.engine.engine import Engine
from draftproof.metrics import RequestStats
from draftproof.ops import resolve
from draftproof.outputs import LogprobRow
from draftproof.sampling_params import SamplingParams
from draftproof.types import Request

V = tiny.VOCAB
EOS = 2
MANY_ENDS = tuple(range(5, V, 3))
# Every token has a few that must not follow it, so that bans apply in most steps.
BAD_WORDS = [(40,), *((a, (a * 3 + s) % V) for a in range(3, V) for s in range(0, 40, 2))]


def bias_by_last_tokens(tokens: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    """Change logits by each of the last three tokens."""
    key = tokens[-1] + 3 * tokens[-2 % len(tokens)] + 5 * tokens[-3 % len(tokens)] + len(tokens)
    return row + 3.0 * ((torch.arange(len(row), device=row.device) * 7 + key) % 11 == 0)


# A forgotten penalty seldom changes the tokens of a tiny model; it always changes processed logprobs.
PROCESSED: dict[str, Any] = {"logprobs_mode": "processed"}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6, **PROCESSED},
    "min_p": {"min_p": 0.3, **PROCESSED},
    "repetition": {"repetition_penalty": 1.5, **PROCESSED},
    "presence": {"presence_penalty": 1.7, **PROCESSED},
    "frequency": {"frequency_penalty": 1.3, **PROCESSED},
    "logit_bias": {"logit_bias": {5: 4.0, 9: float("-inf"), 11: 3.0, 60: 3.5}, **PROCESSED},
    "bad_words": {"bad_word_ids": BAD_WORDS, **PROCESSED},
    "allowed": {"allowed_token_ids": range(10, 40), **PROCESSED},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": MANY_ENDS},
    "max_tokens": {"max_tokens": 5},
    "eos": {"logit_bias": {EOS: 4.0}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {EOS: 4.0}},
    "stop_ids": {"stop_token_ids": MANY_ENDS},
    "processor": {"logits_processors": [bias_by_last_tokens], **PROCESSED},
    "no_logprobs": {"logprobs": None, "prompt_logprobs": None},
    "sampled_logprob": {"logprobs": 0, "prompt_logprobs": 0},
    "named_logprobs": {"logprobs": None, "logprob_token_ids": [3, 50, 7]},
    "all_logprobs": {"logprobs": -1, "prompt_logprobs": -1},
    "processed": {"logprobs_mode": "processed", "top_k": 9, "presence_penalty": 0.5},
    "draft_logprobs": {"include_draft_logprobs": True},
    "mix": {
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "logit_bias": {5: 2.0, EOS: 1.5},
        "bad_word_ids": BAD_WORDS,
        "allowed_token_ids": [EOS, *range(4, V)],
        "min_tokens": 5,
        "max_tokens": 13,
        "stop_token_ids": MANY_ENDS[::3],
        "logits_processors": [bias_by_last_tokens],
        "logprobs_mode": "processed",
    },
}


@dataclass(frozen=True)
class Case:
    """Hashable description of a request, so that its reference run can be cached."""

    index: int
    option: str = "none"
    temperature: float = 0.7
    strategy: str = "target_match"
    length: int = 12
    enabled: bool = True  # speculation for this request
    k: int | None = None
    prompt: bool = True  # prompt logprobs
    grammar: str = "none"  # a key of `grammars.STRUCTURES`
    priority: int = 0
    salt: str | None = None
    max_tokens: int = 14  # unless the option names another number

    def request(self, plain: bool = False) -> Request:
        options = dict(OPTIONS[self.option])
        bad = options.pop("bad_word_ids", ())
        base = {"max_tokens": self.max_tokens, "logprobs": 5, "prompt_logprobs": 3 if self.prompt else None}
        speculative: dict[str, Any] = {"verify_strategy": self.strategy}
        if not plain:
            speculative |= {"enabled": self.enabled, "num_speculative_tokens": self.k}
        bias = grammars.BIAS.get(self.grammar, {})
        options["logit_bias"] = {**options.get("logit_bias", {}), **bias}
        params = SamplingParams(
            **{"temperature": self.temperature, **base, **options},
            speculative=speculative,
            priority=self.priority,
            cache_salt=self.salt,
        )
        made = grammars.grammar(self.grammar)
        return tiny.request(self.index, params, self.length, bad_word_ids=bad, grammar=made)


# Requests that differ in options, temperature, strategy, draft length and prompt length.
NEIGHBOURS = (
    Case(1, "top_k", 0.7, length=5),
    Case(2, "frequency", 0.0, length=33),
    Case(3, "none", 1.3, length=100, enabled=False),
    Case(4, "mix", 0.7, "greedy", length=70, grammar="json"),
    Case(5, "stop_ids", 1.3, length=1, k=1),
    Case(6, "processed", 1.3, length=100),
)


def warm(target: Engine, cases: Sequence[Case]) -> None:
    """Fill the prefix cache with prefixes of different lengths of these prompts."""
    params = [SamplingParams(max_tokens=3, ignore_eos=True, cache_salt=case.salt) for case in cases]
    others = []
    for i, case in enumerate(cases):
        ids = tiny.prompt(case.index, case.length)
        cut = ids if i % 3 == 0 else [*ids[: len(ids) * (i % 3) // 3], 5, 6, 7]
        others.append(tiny.request(500 + i, params[i], prompt_token_ids=cut))
    tiny.run(target, others)


def force_preemptions(target: Engine, growth: int, interval: int = 2) -> None:
    """Preempt every running request after each `interval` plans, which grows by `growth` each time.

    The growth lets a long prompt without a cached prefix finish.
    """
    scheduler, plans = target.loop.scheduler, 0
    plan, short_of, fast_plan = scheduler.plan, scheduler._missing_pages, scheduler._fast_path.plan

    def counts(*given: Any, **named: Any) -> Any:
        nonlocal plans
        plans += bool(scheduler.running)
        return plan(*given, **named)

    def short(*arguments: Any) -> Any:
        nonlocal plans, interval
        found = short_of(*arguments)
        if plans > interval and len(found):
            return found + 10**9
        if plans > interval:
            plans, interval = 0, interval + growth
        return found

    def closer(*arguments: Any) -> Any:
        return None if plans > interval else fast_plan(*arguments)  # the fast path does not check pages

    scheduler.plan, scheduler._missing_pages = counts, short  # type: ignore[method-assign]
    scheduler._fast_path.plan = closer  # type: ignore[method-assign]


NUM_THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # for a real model


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Set the number of threads of torch, which the CPU backend reads when it is built."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


def plant(monkeypatch: Any, name: str, broken: Callable[..., Any]) -> None:
    """Replace an op of the backend that tests run on by `broken(whole, family, *arguments)`."""
    ops = resolve("auto", torch.device("cpu"))
    families = ops.forward, ops.sampling, ops.step, ops.search, ops.rounds, ops.runtime
    kind = type(next(family for family in families if hasattr(family, name)))
    whole = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *arguments, **named: broken(whole, *arguments, **named))


@dataclass(frozen=True)
class Setup:
    arch: str = "llama"
    dtype: str = "float32"
    backend: str = "auto"
    threads: int = 1
    device: str = "cpu"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"

    def engine(self, speculative: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        spec = dict(speculative) if speculative else None
        if spec and spec["method"] == "proposers:SelfModel":
            spec.setdefault("weights", f"{self.arch}/{self.dtype}/{self.quantization}")
        for key, value in heads.options(spec["method"], self.arch, self.dtype).items() if spec else ():
            spec.setdefault(key, value)
        sizes = {"max_logprobs": -1, "max_num_batched_tokens": 512, "overlap": False, **options}
        sizes |= {"quantization": self.quantization, "kv_cache_dtype": self.kv_cache_dtype}
        with num_threads(self.threads):
            return tiny.engine(self.arch, self.dtype, spec, backend=self.backend, device=self.device, **sizes)


def reference_run(case: Case, setup: Setup, fresh: bool = False) -> tiny.Record:
    """Serve one request alone, without speculation, its prompt in one chunk.

    Results are cached. Options that have no effect on a single request (priority, salt) are removed first.
    Engines are reused, without a prefix cache. `fresh`: build a new engine and cache nothing.
    """
    case = replace(case, priority=0, salt=None, enabled=True, k=None)
    return _run_alone(case, setup.engine()) if fresh else _reference_run(case, setup)


@cache
def _reference_run(case: Case, setup: Setup) -> tiny.Record:
    return _run_alone(case, _reference_engine(setup))


@lru_cache(maxsize=8)
def _reference_engine(setup: Setup) -> Engine:
    return setup.engine(enable_prefix_caching=False)


def _run_alone(case: Case, engine: Engine) -> tiny.Record:
    request = case.request(plain=True)
    return tiny.run(engine, [request])[request.id]


def edited(answer: list[int]) -> list[int]:
    """Return a prediction: the output with one token dropped, one changed, and a tail."""
    return [*answer[:3], *answer[4:7], 96, *answer[8:], 11, 12]


@dataclass
class Batch:
    """Requests served together: engine options, arrivals, aborts, and their records."""

    cases: Sequence[Case]
    setup: Setup = field(default_factory=Setup)
    speculative: Mapping[str, Any] | None = None
    chunk: int = 64
    arrivals: Sequence[int] = ()
    aborts: Mapping[int, int] = field(default_factory=dict)  # request index -> after which step
    overlap: bool = False
    engine: Engine | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    warm: bool = False  # the prefix cache holds prefixes of the prompts
    preempts_all: bool = False  # see `force_preemptions`
    interval_growth: int = 1
    has_predictions: bool = False  # every other request has one
    stats: dict[str, RequestStats] = field(default_factory=dict)
    records: dict[str, tiny.Record] = field(default_factory=dict)  # of the last call of `serve`

    def serve(self, answers: Mapping[str, list[int]]) -> dict[str, tiny.Record]:
        proposers.set_outputs(answers)
        sizes = {"max_num_batched_tokens": self.chunk, "overlap": self.overlap, **self.sizes}
        target = self.engine or self.setup.engine(self.speculative, **sizes)
        self.engine = target
        if self.warm:
            warm(target, self.cases)
        if self.preempts_all:
            force_preemptions(target, self.interval_growth)
        proposer = target.loop.proposer
        every = 2 if self.has_predictions else int(proposer is not None and proposer.takes_prediction)
        requests = [case.request() for case in self.cases]
        for i in range(0, len(requests), every) if every else ():
            requests[i] = replace(requests[i], prediction_ids=edited(answers[requests[i].id]))

        def leave(step: int) -> None:
            for index, when in self.aborts.items():
                if when == step:
                    target.abort(str(index))

        self.records = tiny.run(target, requests, self.arrivals, leave, self.stats)
        check_empty(target)
        return self.records

    def differences(self, fresh: bool = False) -> list[str]:
        """Return differences from the reference runs; `fresh` computes these again, for a broken engine."""
        alone = {str(a.index): reference_run(a, self.setup, fresh) for a in self.cases}
        records = self.serve({name: record.token_ids for name, record in alone.items()})
        found = []
        for case in self.cases:
            name = str(case.index)
            found += compare(name, alone[name], records[name], cut=case.index in self.aborts)
            if OPTIONS[case.option].get("include_draft_logprobs"):
                missing = [step.drafts is None for step in records[name].steps if step.token_ids]
                found += [f"request {name}: draft records are missing"] if any(missing) else []
        return found


def bits(rows: list[LogprobRow]) -> list[tuple[object, ...]]:
    """Return rows with floats as hexadecimal, so that -0.0 differs from 0.0; reject NaN."""
    assert all(x == x for row in rows for x in row.logprobs), "a logprob is NaN"
    return [(*row.token_ids, *(x.hex() for x in row.logprobs), *row.ranks) for row in rows]


def compare(name: str, alone: tiny.Record, got: tiny.Record, cut: bool = False) -> list[str]:
    """Return differences of two records; `cut`: the request was aborted, so its record is a prefix."""
    found = []
    pairs = {
        "tokens": (alone.token_ids, got.token_ids),
        "logprobs": (bits(alone.logprobs), bits(got.logprobs)),
        "prompt logprobs": (bits(alone.prompt_logprobs), bits(got.prompt_logprobs)),
        "ending": ([alone.finish], [got.finish]),
    }
    for what, (want, have) in pairs.items():
        if cut and what == "ending":
            continue
        if have != (want[: len(have)] if cut else want):
            found.append(f"request {name}: {what}: {want} became {have}")
    return found + count_errors(name, got)


def count_errors(name: str, got: tiny.Record) -> list[str]:
    """Return inconsistencies between numbers of tokens, logprobs and drafts of each step."""
    found = []
    for step in got.steps:
        if step.logprobs is not None and len(step.logprobs) != len(step.token_ids):
            found.append(f"request {name}: {len(step.token_ids)} tokens, {len(step.logprobs)} logprobs")
        if not 0 <= step.num_accepted <= min(step.num_draft, len(step.token_ids)):
            found.append(f"request {name}: accepted {step.num_accepted} of {step.num_draft}")
        if len(step.sources) != step.num_accepted:
            found.append(f"request {name}: {len(step.sources)} sources, {step.num_accepted} accepted")
        if len(step.token_ids) > step.num_draft + 1:
            found.append(f"request {name}: {len(step.token_ids)} tokens from {step.num_draft} drafts")
        if step.drafts is not None and len(step.drafts) != step.num_draft:
            found.append(f"request {name}: {step.num_draft} drafts, {len(step.drafts)} records")
    return found


def check_empty(target: Engine) -> None:
    """Check that every slot and page is free."""
    scheduler = target.loop.scheduler
    assert not scheduler.running and not scheduler.waiting and not target.has_work
    assert scheduler.pages.num_free == scheduler.pages.capacity, "pages were lost"
    assert target.loop.slots.num_free == target.config.max_num_seqs, "a slot was lost"
    scheduler.pages.check()
