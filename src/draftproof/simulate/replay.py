"""Says recorded outputs again: a proposer guesses after every step, and the record is the judge.

The proposer, the slots it looks at and what it is told of requests that come and go are the engine's own. The
steps are not: a window commits the drafts that agree with the record and one token more, at no cost; what it
would have cost comes from a table of step times by rows.
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

from draftproof.engine.slots import SlotInit, Slots
from draftproof.errors import ConfigError, nearest
from draftproof.metrics import SpecStats
from draftproof.ops import resolve
from draftproof.propose import PROPOSERS, DeviceProposer, Proposer, ProposerEnv
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.simulate.records import Recorded
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import DeviceBatch, ProposeBatch, Request


class Costs:
    """Seconds of a step by its rows, between those that were measured on a straight line."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds or any(rows < 1 or not 0 < cost < math.inf for rows, cost in seconds.items()):
            raise ConfigError("costs must be seconds by rows, all positive, such as {1: 0.010, 8: 0.012}")
        self.rows = np.array(sorted(seconds), np.float64)
        self.seconds = np.array([seconds[int(rows)] for rows in self.rows])

    def of(self, rows: int) -> float:
        """Beyond the largest that was measured: in proportion."""
        most = self.rows[-1]
        if rows > most:
            return float(self.seconds[-1] * rows / most)
        return float(np.interp(rows, self.rows, self.seconds))

    def as_json(self) -> dict[str, float]:
        """For JSON."""
        return {f"{int(n)}": round(s, 7) for n, s in zip(self.rows, self.seconds, strict=True)}


@dataclass
class Outcome:
    """What `k` drafts at most would have done."""

    k: int
    stats: SpecStats = field(default_factory=SpecStats)
    tasks: dict[str, SpecStats] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)  # accepted drafts by who proposed them
    steps: int = 0  # of the engine, several requests each
    seconds: float | None = None  # of its steps, by the table
    plain: float | None = None  # the same without drafts
    guessing: float = 0.0  # seconds that the proposer took here, on the CPU

    @property
    def speed_up(self) -> float | None:
        return None if self.seconds is None or self.plain is None else self.plain / self.seconds

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
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
            "proposer_us_a_step": round(1e6 * self.guessing / max(1, self.steps), 2),
            "accepted_by_source": self.sources,
            "tasks": {name: round(s.acceptance_length, 4) for name, s in sorted(self.tasks.items())},
        }


def build(config: SpeculativeConfig, env: ProposerEnv) -> Proposer:
    """The proposer alone; ConfigError if it guesses from what only a model knows."""
    kind = lookup(PROPOSERS, config.method, "speculative method")
    for key in config.options:
        if key not in kind.defaults:
            raise ConfigError(f"method {config.method!r} has no key {key!r}: {nearest(key, kind.defaults)}")
    _without_model(config.method, kind)
    for member in config.options.get("proposers") or ():  # of several together
        if isinstance(member, Mapping) and "method" in member:
            method = str(member["method"])
            _without_model(method, lookup(PROPOSERS, method, "speculative method"))
    made: Proposer = kind(env, config.options)
    _without_model(config.method, made)
    return made


def _without_model(method: str, proposer: Proposer | type[Proposer]) -> None:
    """Looked at before it is made, too: making it may take the model that it drafts for."""
    if proposer.needs_hidden or proposer.stores_kv or proposer.runs_every_step:
        raise ConfigError(
            f"method {method!r} guesses with a model of its own, from the target's rows: records do not hold "
            "them. Measure it in a run, with `draftproof generate --compare`"
        )


@dataclass(slots=True)
class _Running:
    record: Recorded
    request: Request
    done: int = 0  # tokens of the output


class Replay:
    """A batch of slots and a proposer; requests sit down in the order in which they were recorded."""

    def __init__(self, records: Sequence[Recorded], config: SpeculativeConfig | None, batch: int) -> None:
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
        self.proposer = build(config, env) if config else None
        self.waiting = deque(records)
        self.running: dict[int, _Running] = {}
        self.out = Outcome(self.k)
        self._number = 0

    def run(self, costs: Costs | None = None) -> Outcome:
        seconds = 0.0
        while self.waiting or self.running:
            self._seat()
            guesses, sources = self._guess()
            rows = len(self.running) + sum(len(guess) for guess in guesses.values())
            seconds += costs.of(rows) if costs else 0.0
            for slot in list(self.running):
                self._commit(slot, guesses.get(slot, []), sources.get(slot, []))
            self.out.steps += 1
        self.out.seconds = seconds if costs else None
        return self.out

    def _seat(self) -> None:
        while self.waiting and self.slots.num_free:
            record = self.waiting.popleft()
            request = Request(
                id=str(self._number),
                prompt_token_ids=record.prompt,
                params=SamplingParams(cache_salt=record.salt),
                seed=self._number,  # by it a proposer knows requests apart
                prediction_ids=record.prediction,
            )
            self._number += 1
            slot = self.slots.take(request)
            self.slots.fill([SlotInit(slot, request, [], len(record.prompt) + len(record.output))])
            self.running[slot] = _Running(record, request)
            if self.proposer:
                self.proposer.start(slot, request)
        if self.proposer:
            self.proposer.prepare()

    def _guess(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Drafts of those that decode, and who proposed them."""
        if self.proposer is None:
            return {}, {}
        ready = {s: r for s, r in self.running.items() if 0 < r.done < len(r.record.output) - 1}
        if not ready:
            return {}, {}
        columns, slots = self.slots.columns, list(ready)
        budget = [min(self.k, len(r.record.output) - r.done - 1) for r in ready.values()]
        begin = time.perf_counter()
        if isinstance(self.proposer, DeviceProposer):
            draft = self.proposer.draft(DeviceBatch(columns, torch.tensor(slots), torch.tensor(budget)))
        else:
            lengths = columns.length[slots].tolist()
            draft = self.proposer.propose(ProposeBatch(columns, slots, budget, lengths, None, [], []))
        self.out.guessing += time.perf_counter() - begin
        guesses, sources = {}, {}
        names = None if draft.sources is None else draft.sources.tolist()
        lines = zip(slots, draft.tokens.tolist(), draft.count.tolist(), budget, strict=True)
        for b, (slot, line, count, most) in enumerate(lines):
            guesses[slot] = line[: min(count, most)]
            sources[slot] = [0] * len(line) if names is None else names[b]
        return guesses, sources

    def _commit(self, slot: int, guess: list[int], sources: list[int]) -> None:
        mine, columns = self.running[slot], self.slots.columns
        left = mine.record.output[mine.done :]
        stood = 0
        while stood < min(len(guess), len(left)) and guess[stood] == left[stood]:
            stood += 1
        said = left[: stood + 1]
        at = int(columns.length[slot])
        columns.tokens[slot, at : at + len(said)] = torch.tensor(said)
        columns.length[slot] += len(said)
        mine.done += len(said)
        for stats in (self.out.stats, self.out.tasks.setdefault(mine.record.task, SpecStats())):
            stats.record(len(guess), min(stood, len(said)), len(said))
        for source in sources[: min(stood, len(said))]:
            name = self.proposer.sources[source] if self.proposer else ""
            self.out.sources[name] = self.out.sources.get(name, 0) + 1
        if mine.done == len(mine.record.output):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        mine = self.running.pop(slot)
        if self.proposer:
            if self.proposer.learns:
                ids = np.array([*mine.record.prompt, *mine.record.output], np.int64)
                self.proposer.learn(mine.request, ids)
            self.proposer.stop(slot)
        self.slots.free(slot)


def replay(
    records: Sequence[Recorded],
    config: SpeculativeConfig,
    lengths: Sequence[int],
    batch: int = 1,
    costs: Costs | None = None,
) -> list[Outcome]:
    """One outcome for each draft length."""
    plain = Replay(records, None, batch).run(costs).seconds if costs else None
    found = []
    for k in lengths:
        options = {f: getattr(config, f) for f in ("method", "options")}
        out = Replay(records, SpeculativeConfig(**options, num_speculative_tokens=k), batch).run(costs)
        out.plain = plain
        found.append(out)
    return found
