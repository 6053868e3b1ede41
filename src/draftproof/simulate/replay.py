"""Replay of recorded outputs: a proposer drafts before every step, and drafts are verified by the record.

The proposer, its slots and its start, stop and learn calls are the engine's own. A step commits the drafts
that equal the record and one more token; its cost comes from a table of step times by rows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from draftproof.engine.sequence import Sequence as EngineRequest
from draftproof.engine.slots import Slots
from draftproof.errors import ConfigError, nearest
from draftproof.metrics import SpecStats
from draftproof.ops import resolve
from draftproof.propose import PROPOSERS, DeviceProposer, Proposer, ProposerEnv
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.simulate.records import RecordedRequest
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import DeviceBatch, ProposeBatch, Request


class Costs:
    """Seconds of a step by its rows, interpolated linearly between the measured ones."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds or any(rows < 1 or not 0 < cost < math.inf for rows, cost in seconds.items()):
            raise ConfigError("costs must be seconds by rows, all positive, such as {1: 0.010, 8: 0.012}")
        self.rows = np.array(sorted(seconds), np.float64)
        self.seconds = np.array([seconds[int(rows)] for rows in self.rows])

    def step_seconds(self, rows: int) -> float:
        """Return the seconds of a step; proportional to rows beyond the largest measured number."""
        last = self.rows[-1]
        if rows > last:
            return float(self.seconds[-1] * rows / last)
        return float(np.interp(rows, self.rows, self.seconds))

    def as_json(self) -> dict[str, float]:
        """Return the table for a JSON report."""
        return {f"{int(n)}": round(s, 7) for n, s in zip(self.rows, self.seconds, strict=True)}


@dataclass
class Outcome:
    """Figures of a replay with at most `k` drafts."""

    k: int
    stats: SpecStats = field(default_factory=SpecStats)
    tasks: dict[str, SpecStats] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)  # accepted drafts by proposer
    steps: int = 0  # of the batch
    seconds: float | None = None  # of all steps, by the cost table
    plain_seconds: float | None = None  # of all steps without drafts
    draft_seconds: float = 0.0  # measured time of the proposer, on the CPU

    @property
    def speed_up(self) -> float | None:
        """Return the time without drafts over the time with them; None without costs."""
        if self.seconds is None or self.plain_seconds is None:
            return None
        return self.plain_seconds / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return the figures for a JSON report."""
        stats = self.stats
        position = [round(n / max(1, stats.num_steps), 4) for n in stats.accepted_per_position]
        return {
            "k": self.k,
            "acceptance_length": round(stats.acceptance_length, 4),
            "acceptance_rate": round(stats.acceptance_rate, 4),
            "accepted_per_position": position,
            "tokens": stats.num_emitted_tokens,
            "steps": stats.num_steps,
            "draft_tokens": stats.num_draft_tokens,
            "speed_up": None if self.speed_up is None else round(self.speed_up, 4),
            "proposer_us_a_step": round(1e6 * self.draft_seconds / max(1, self.steps), 2),
            "accepted_by_source": self.sources,
            "tasks": {name: round(s.acceptance_length, 4) for name, s in sorted(self.tasks.items())},
        }


def build_proposer(config: SpeculativeConfig, env: ProposerEnv) -> Proposer:
    """Build the proposer alone; ConfigError if it needs a model."""
    kind = lookup(PROPOSERS, config.method, "speculative method")
    for key in config.options:
        if key not in kind.defaults:
            raise ConfigError(f"method {config.method!r} has no key {key!r}: {nearest(key, kind.defaults)}")
    _check_needs_no_model(config.method, kind)  # before it is built, which may load the model
    for member in config.options.get("proposers") or ():
        if isinstance(member, Mapping) and "method" in member:
            method = str(member["method"])
            _check_needs_no_model(method, lookup(PROPOSERS, method, "speculative method"))
    proposer: Proposer = kind(env, config.options)
    _check_needs_no_model(config.method, proposer)
    return proposer


def _check_needs_no_model(method: str, proposer: Proposer | type[Proposer]) -> None:
    if proposer.needs_hidden or proposer.stores_kv or proposer.runs_behind_steps:
        raise ConfigError(
            f"method {method!r} drafts with a model of its own, from the target's rows, which records do not "
            "hold. Measure it in a run, with `draftproof generate --compare`"
        )


@dataclass(slots=True)
class _Running:
    record: RecordedRequest
    request: Request
    committed: int = 0  # tokens of the output


class Replay:
    """Batch of slots with a proposer; requests start in the order in which they were recorded."""

    def __init__(
        self, records: Sequence[RecordedRequest], config: SpeculativeConfig | None, batch: int
    ) -> None:
        self.k = config.num_speculative_tokens if config else 1
        longest = max(len(r.prompt) + len(r.output) for r in records)
        vocab = 1 + max(max(*r.prompt, *r.output) for r in records)
        ops = resolve("auto", torch.device("cpu"))
        self.slots = Slots(batch, longest + self.k + 1, self.k, 1, vocab, ops)
        env = ProposerEnv(
            ops=ops,
            k=self.k,
            vocab_size=vocab,
            hidden_size=1,
            num_slots=batch,
            num_pages=1,
            page_size=16,
            max_len=longest,
            max_rows=batch * (1 + self.k),
        )
        self.proposer = build_proposer(config, env) if config else None
        self.waiting = deque(records)
        self.running: dict[int, _Running] = {}
        self.out = Outcome(self.k)
        self._number = 0

    def run(self, costs: Costs | None = None) -> Outcome:
        """Replay all records and return the figures."""
        seconds = 0.0
        while self.waiting or self.running:
            self._start_requests()
            drafts, sources = self._draft()
            rows = len(self.running) + sum(map(len, drafts.values()))
            seconds += costs.step_seconds(rows) if costs else 0.0
            for slot in list(self.running):
                self._commit(slot, drafts.get(slot, []), sources.get(slot, []))
            self.out.steps += 1
        self.out.seconds = seconds if costs else None
        return self.out

    def _start_requests(self) -> None:
        while self.waiting and self.slots.num_free:
            record = self.waiting.popleft()
            request = Request(
                id=str(self._number),
                prompt_token_ids=record.prompt,
                params=SamplingParams(cache_salt=record.salt),
                seed=self._number,  # distinguishes requests for a proposer
                prediction_ids=record.prediction,
            )
            self._number += 1
            slot = self.slots.take(request)
            self.slots.fill([EngineRequest(request, len(record.prompt) + len(record.output), slot=slot)])
            self.running[slot] = _Running(record, request)
            if self.proposer:
                self.proposer.start(slot, request)
        if self.proposer:
            self.proposer.prepare()

    def _draft(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return the drafts of decoding requests by slot, and the index of each draft's proposer."""
        ready = {s: r for s, r in self.running.items() if 0 < r.committed < len(r.record.output) - 1}
        if self.proposer is None or not ready:
            return {}, {}
        columns, slots = self.slots.columns, list(ready)
        budget = [min(self.k, len(r.record.output) - r.committed - 1) for r in ready.values()]
        begin = time.perf_counter()
        if isinstance(self.proposer, DeviceProposer):
            draft = self.proposer.draft(DeviceBatch(columns, torch.tensor(slots), torch.tensor(budget)))
        else:
            lengths = columns.length[slots].tolist()
            draft = self.proposer.propose(ProposeBatch(columns, slots, budget, lengths, None, [], []))
        self.out.draft_seconds += time.perf_counter() - begin
        drafts, sources = {}, {}
        indices = None if draft.sources is None else draft.sources.tolist()
        lines = zip(slots, draft.tokens.tolist(), draft.count.tolist(), budget, strict=True)
        for b, (slot, line, count, limit) in enumerate(lines):
            drafts[slot] = line[: min(count, limit)]
            sources[slot] = [0] * len(line) if indices is None else indices[b]
        return drafts, sources

    def _commit(self, slot: int, drafts: list[int], sources: list[int]) -> None:
        running, columns = self.running[slot], self.slots.columns
        left = running.record.output[running.committed :]
        num_accepted = 0
        while num_accepted < min(len(drafts), len(left)) and drafts[num_accepted] == left[num_accepted]:
            num_accepted += 1
        tokens = left[: num_accepted + 1]
        at = int(columns.length[slot])
        columns.tokens[slot, at : at + len(tokens)] = torch.tensor(tokens)
        columns.length[slot] += len(tokens)
        running.committed += len(tokens)
        for stats in (self.out.stats, self.out.tasks.setdefault(running.record.task, SpecStats())):
            stats.record(len(drafts), min(num_accepted, len(tokens)), len(tokens))
        for source in sources[: min(num_accepted, len(tokens))]:
            name = self.proposer.sources[source] if self.proposer else ""
            self.out.sources[name] = self.out.sources.get(name, 0) + 1
        if running.committed == len(running.record.output):
            self._finish(slot)

    def _finish(self, slot: int) -> None:
        finished = self.running.pop(slot)
        if self.proposer:
            if self.proposer.learns:
                ids = np.array([*finished.record.prompt, *finished.record.output], np.int64)
                self.proposer.learn(finished.request, ids)
            self.proposer.stop(slot)
        self.slots.free(slot)


def replay(
    records: Sequence[RecordedRequest],
    config: SpeculativeConfig,
    lengths: Sequence[int],
    batch: int = 1,
    costs: Costs | None = None,
) -> list[Outcome]:
    """Replay the records once for each number of drafts."""
    plain_seconds = Replay(records, None, batch).run(costs).seconds if costs else None
    outcomes = []
    for k in lengths:
        drafting = SpeculativeConfig(method=config.method, options=config.options, num_speculative_tokens=k)
        outcomes.append(Replay(records, drafting, batch).run(costs))
        outcomes[-1].plain_seconds = plain_seconds
    return outcomes
