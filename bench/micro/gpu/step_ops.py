"""Compare the Triton step ops with their torch compositions bit for bit, and time both.

`op_times.py` runs these checks beside its own. The cases are those of the tests, at the sizes of real
models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support"))
from draftproof.ops.torch.draft_rounds import TorchRounds
from draftproof.ops.torch.draft_search import TorchSearch
from draftproof.ops.torch.sampling import ComposedSampling
from draftproof.ops.torch.step import TorchStep
from draftproof.ops.triton.backend import TritonOps
from draftproof.types import TOKENS, Choice, DeviceBatch, Draft, Outcome, Windows
from step_cases import CHECKS, Guarded, Size, Step, copied

GPU = torch.device("cuda")
ENTRIES = (1, 8, 64, 256)
DRAFTS = (1, 5, 8)
SHAPES = ((1, 5, 49152), (64, 5, 49152), (256, 5, 49152), (256, 1, 49152), (64, 5, 128256))


class Composed:
    """Backend with the torch compositions of every op, over the primitives of `ops`."""

    def __init__(self, ops: TritonOps) -> None:
        self.device, self.forward = ops.device, ops.forward
        self.sampling = ComposedPrimitives(ops)
        self.step, self.search = TorchStep(), TorchSearch()
        self.rounds = TorchRounds(ops.forward, ops.sampling)


class ComposedPrimitives:
    """Compositions of `ComposedSampling` that call the primitives of `ops`."""

    def __init__(self, ops: TritonOps) -> None:
        self._sampling = ops.sampling

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(ComposedSampling, name)
        return lambda *arguments: method(self._sampling, *arguments)


def compare(ops: TritonOps, name: str, size: Size, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        try:
            CHECKS[name](ops, seed, size, Composed(ops))
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}, {size}: {error}") from error


def step_of(entries: int) -> Callable[[TritonOps], None]:
    """Return a check of the ops with so many entries: each K with one vocabulary, one K with a larger one."""

    def check(ops: TritonOps) -> None:
        for k, vocab in [(k, 49152) for k in DRAFTS] + [(5, 128256)]:
            size = Size(entries=entries, k=k, vocab=vocab, wide=600, letters=30)
            for name in CHECKS:
                if name != "logprobs":
                    compare(ops, name, size, (2,) if vocab > 49152 else (0, 3) if k == 8 else (1, 2))

    check.__name__ = f"step_of_{entries}"
    return check


def logprobs_in(vocab: int) -> Callable[[TritonOps], None]:
    """Return a check of logprobs for a large batch and a small one; sizes of the top list vary by seed."""

    def check(ops: TritonOps) -> None:
        for picks in (7, 300):
            compare(ops, "logprobs", Size(vocab=vocab, picks=picks), (0, 1, 2))

    check.__name__ = f"logprobs_in_{vocab}"
    return check


STEP_CHECKS = [step_of(entries) for entries in ENTRIES] + [logprobs_in(v) for v in (49152, 128256, 50257)]


class DecodingSlots:
    """Slots of B decoding requests with K drafts each, all of them accepted."""

    def __init__(self, ops: TritonOps, entries: int, k: int, vocab: int, length: int = 400) -> None:
        made = Step(0, Size(entries=entries, k=k, vocab=vocab, wide=2048, letters=vocab))
        self.ops, self.k, self.entries = ops, k, entries
        columns = self.columns = copied(made.columns, GPU)
        for name in ("finish_status", "adjust", "logprob_kind", "num_draft", "prompt_len", "seed"):
            getattr(columns, name).fill_(0)
        columns.ends.fill_(False)
        columns.banned.fill_(False)
        columns.temperature.fill_(0.0)
        columns.tokens.copy_(torch.randint(0, vocab, columns.tokens.shape, device=GPU))
        columns.draft.copy_(torch.randint(0, vocab, columns.draft.shape, device=GPU))
        columns.page_table.fill_(1)
        columns.max_length.fill_(2048)
        columns.num_draft.fill_(k)
        columns.length.fill_(length)
        columns.computed.fill_(length - 1)
        each = torch.arange(entries, device=GPU)
        self.plan = copied(made.plan, GPU)
        self.plan.slots.copy_(each)
        self.plan.chunk.fill_(0)
        self.plan.drafts.fill_(k)
        self.plan.budget.fill_(k)
        self.batch = DeviceBatch(columns, self.plan.slots, self.plan.budget)
        rows = entries * (k + 1)
        self.out = made.out(Guarded(GPU), rows, rows, columns)
        ops.step.layout(self.plan, columns, 16, self.out)
        self.windows: Windows = self.out.windows
        self.logits = 3 * torch.randn((rows, vocab), device=GPU)
        self.token = torch.where(self.windows.draft >= 0, self.windows.draft, 7)
        self.bad = torch.zeros_like(self.token)
        table = torch.zeros((entries, TOKENS + k + 1), dtype=torch.int64, device=GPU)
        self.outcome = Outcome(table, torch.zeros_like(self.token), torch.zeros_like(self.token))
        self.every = torch.arange(rows, device=GPU)

    def layout(self) -> None:
        self.ops.step.layout(self.plan, self.columns, 16, self.out)

    def choose(self) -> tuple[Tensor, Tensor]:
        return self.ops.sampling.sample(self.logits, self.windows)

    def commit(self) -> None:
        self.ops.step.commit(self.plan, self.windows, Choice(self.token), self.bad, self.outcome)

    def draft(self) -> None:
        tokens, count, _ = self.ops.search.search_ngram(self.batch, 2, 16)
        self.ops.step.store_drafts(self.columns, self.plan.slots, self.plan.budget, Draft(tokens, count))

    def chain(self) -> None:
        self.layout()
        self.choose()
        self.commit()
        self.draft()


def step_times(micros: Callable[..., float]) -> dict[str, Any]:
    """µs of each op alone, and of a step's chain of them, with and without early launch."""
    found: dict[str, Any] = {}

    def note(label: str, call: Callable[[], Any]) -> None:
        found[label] = micros([call] * 5)
        print(f"{label}: {found[label]} µs", flush=True)

    for entries, k, vocab in SHAPES:
        where = f"B={entries} K={k} V={vocab}"
        for pdl in (False, True):
            one = DecodingSlots(TritonOps(GPU, pdl=pdl), entries, k, vocab)
            note(f"layout, choose, commit, ngram, store_drafts{', early' if pdl else ''} {where}", one.chain)
        one = DecodingSlots(TritonOps(GPU, pdl=False), entries, k, vocab)
        columns, ops, slots, budget = one.columns, one.ops, one.plan.slots, one.plan.budget
        note(f"layout {where}", one.layout)
        note(f"choose {where}", one.choose)
        tokens, count, _ = ops.search.search_ngram(one.batch, 2, 16)
        note(f"ngram {where}", lambda: ops.search.search_ngram(one.batch, 2, 16))  # noqa: B023
        stored = partial(ops.step.store_drafts, columns, slots, budget, Draft(tokens, count))
        note(f"store_drafts {where}", stored)
        none = torch.full_like(one.every, -1)
        for rows, label in ((one.every, "all rows"), (none, "no row")):
            logprobs = partial(ops.sampling.logprobs, one.logits, rows, one.token, 5)
            note(f"logprobs, top 5, {label} {where}", logprobs)
        note(f"commit {where}", one.commit)
        columns.temperature.fill_(0.8)
        note(f"choose, hot {where}", one.choose)
        note(f"penalise, none has any {where}", lambda: ops.sampling.apply_penalties(one.logits, one.windows))  # noqa: B023
        columns.adjust.fill_(15)
        columns.bias.fill_(0.0)
        note(f"penalise, all {where}", lambda: ops.sampling.apply_penalties(one.logits, one.windows))  # noqa: B023
        note(f"forbid, all {where}", lambda: ops.sampling.apply_bans(one.logits, one.windows))  # noqa: B023
    return found
