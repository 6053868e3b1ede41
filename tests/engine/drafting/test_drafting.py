"""Which drafts are captured at start: no step that decodes may have to wait for a capture, nor one with a
short prompt run op by op."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import proposers
from draftproof.engine.drafting.device_proposer import FEW, Drafting
from draftproof.ops.triton.graphs import bucket_of
from draftproof.types import DraftSpec, StepFeatures

OPS = SimpleNamespace(asynchronous=True, bucket=bucket_of)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_no_more_rounds_than_a_hybrid_wants(asynchronous: bool) -> None:
    """How many fewer there were is told where steps are queued ahead; elsewhere a model says it itself."""
    ops = SimpleNamespace(asynchronous=asynchronous, bucket=bucket_of)
    columns = SimpleNamespace(draft=torch.zeros((2, 4)))
    proposer = proposers.DevicePerfect.__new__(proposers.DevicePerfect)
    proposer.follows_rows, proposer.weighed, proposer.asked_rounds = True, 0, 1
    slots = SimpleNamespace(requests=[None] * 2, columns=columns, ops=ops)
    drafting = Drafting(proposer, slots, 8, torch.zeros(1, 8))
    planned = SimpleNamespace(slots=np.arange(2), chunk=np.zeros(2), num_rows=2, has_prompts=False)
    budget = np.array([1, 4])
    for most, asks, rounds in ((4, True, 4), (3, True, 3), (2, True, 2), (2, False, 0)):
        drafting.most, drafting.asks = most, asks
        assert drafting.traits(ops, planned, budget, StepFeatures((0,)), False).rounds == rounds
        told = (2 * asks, (4 - rounds) * asynchronous) if asks else (0, 0)
        assert drafting.asked_for(planned, budget) == told
    drafting.asks = True
    assert drafting.asked_for(planned, 0 * budget) == (0, 0)


@pytest.mark.parametrize(
    ("count", "prompts", "scales"), [(2, True, False), (9, False, False), (9, True, True)]
)
def test_kinds_of_drafts_that_are_captured_for_many_and_beside_prompts(
    count: int, prompts: bool, scales: bool
) -> None:
    """Half of the rounds at least; of rare ones, which are captured as they come, all. A head alone: all."""
    for weighed in (0, -1):
        drafting = Drafting.__new__(Drafting)
        drafting.proposer = SimpleNamespace(follows_rows=True, weighed=weighed, minds_prompts=False)
        drafting.waits, drafting.k, drafting.most, drafting.asks = False, 4, 1, True
        drafting.slots = SimpleNamespace(ops=OPS)
        chunk = np.full(count, int(prompts))
        planned = SimpleNamespace(slots=np.arange(count), chunk=chunk, num_rows=9, has_prompts=prompts)
        wanted = drafting.traits(
            OPS, planned, np.full(count, 4), StepFeatures((0,), needs_processed=scales), False
        )
        rounds = 2 if weighed == 0 and not scales else 4
        assert wanted == DraftSpec(rounds, needs_processed=scales)
        assert drafting.asked_for(planned, np.full(count, 4)) == (count, 4 - rounds)
        assert drafting.fewer(count, 1, prompts) == 4 - rounds and drafting.fewer(count, 0, prompts) == 0


@pytest.mark.parametrize(("weighed", "chains"), [(0, False), (-1, False), (0, True)])
def test_a_round_is_timed_where_it_can_be_saved(weighed: int, chains: bool) -> None:
    """Drafts take 30 and 5 a round, keeping up 2: a round fewer saves 5. It is never thought to save more
    than its share of all, and of a model that ends its chains itself one round is timed."""
    asked = []
    for fixed, each, saved in ((30.0, 5.0, 5.0), (-30.0, 25.0, 17.0), (30.0, -5.0, 0.0)):
        drafting = Drafting.__new__(Drafting)
        drafting.proposer = SimpleNamespace(follows_rows=True, ends_chains=chains, weighed=weighed)
        columns = SimpleNamespace(draft=torch.zeros((16, 4)))
        drafting.slots, drafting.k = SimpleNamespace(requests=[None] * 16, columns=columns), 4

        def seconds(
            rows: int, entries: int, wanted: DraftSpec, fixed: float = fixed, each: float = each
        ) -> float:
            asked.append((rows, entries, wanted.rounds))
            return fixed + each * wanted.rounds if wanted.rounds else 2.0

        found = drafting.asking(OPS, [1, 8, 16, 64], seconds)
        most = 1 if chains else 4
        all_of_it = max(0.0, fixed + each * most - 2)
        told = 0.0 if chains or weighed < 0 else min(saved, all_of_it / 4)
        assert found == {count: (all_of_it, told) for count in (1, 8, 16)}
    rounds = {0, 1} if chains else {0, 4} if weighed < 0 else {0, 2, 4}
    assert set(asked) == {(bucket_of(5 * n), n, r) for n in (1, 8, 16) for r in rounds}


def test_kernels_of_drafts_beside_long_prompts_are_compiled_at_start() -> None:
    for weighed, rounds in ((0, {0, 2, 4}), (-1, {0, 4})):
        drafting = Drafting.__new__(Drafting)
        drafting.proposer = SimpleNamespace(follows_rows=True, weighed=weighed)
        columns = SimpleNamespace(draft=torch.zeros((16, 4)))
        drafting.slots, drafting.k = SimpleNamespace(requests=[None] * 16, columns=columns), 4
        found = drafting.rare(OPS, [64, 256, 512, 1024])
        assert {(rows, wanted.rounds) for rows, _, wanted in found} == set(product((256, 512, 1024), rounds))


@pytest.mark.parametrize(("seats", "k"), [(1, 4), (7, 8), (64, 4), (256, 4)])
@pytest.mark.parametrize("weighed", [-1, 0])
def test_every_step_that_decodes_finds_its_drafts(seats: int, k: int, weighed: int) -> None:
    """A hybrid may want fewer rounds of its model for many, a head alone has them all."""
    drafting = Drafting.__new__(Drafting)
    columns = SimpleNamespace(draft=torch.zeros((seats, k)))
    drafting.slots = SimpleNamespace(requests=[None] * seats, columns=columns)
    drafting.proposer = SimpleNamespace(follows_rows=True, weighed=weighed)
    drafting.waits, drafting.k = True, k
    sizes = sorted({bucket_of(rows) for rows in range(1, seats * (1 + k) + 1025)}, reverse=True)
    captured = set(drafting.usual(OPS, sizes))
    assert len(captured) <= (280 if weighed < 0 else 430)
    for count, wanted in product(range(1, seats + 1), range(k + 1)):
        rounds = drafting.captured(count, wanted)
        assert wanted <= rounds <= k and (rounds == 0) == (wanted == 0)
        if wanted:
            few = count <= FEW
            least = wanted if few else max(wanted, k // 2)
            assert rounds == (least if few or weighed == 0 else k) or (k == 8 and rounds - wanted == 1)
        for rows in {bucket_of(rows) for rows in range(count, count * (1 + k) + 1)}:
            entries = drafting.entries(OPS, count, rows)
            assert count <= entries <= min(seats, rows)
            assert (rows, entries, DraftSpec(rounds)) in captured
        rounds = drafting.captured(count, wanted, prompts=True)
        assert rounds == 0 if not wanted else max(wanted, k // 2) <= rounds <= k
        assert weighed == 0 or rounds in (0, k)
        for rows in {bucket_of(rows) for rows in range(count + 1, count * (1 + k) + 65)}:
            assert (rows, drafting.entries(OPS, count, rows), DraftSpec(rounds)) in captured
