"""Which drafts are captured at start: no step that decodes may have to wait for a capture, nor one with a
short prompt run op by op."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import proposers
from draftproof.engine.drafting import FEW, LATER, Drafting
from draftproof.ops.triton_cuda.graph import bucket_of
from draftproof.types import DraftTraits, Traits

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
        assert drafting.traits(ops, planned, budget, Traits((0,)), False).rounds == rounds
        told = (2 * asks, (4 - rounds) * asynchronous) if asks else (0, 0)
        assert drafting.asked_for(planned, budget) == told
    drafting.asks = True
    assert drafting.asked_for(planned, 0 * budget) == (0, 0)


@pytest.mark.parametrize(("seats", "k"), [(1, 4), (7, 8), (64, 4), (256, 4)])
@pytest.mark.parametrize("weighed", [-1, 0])
def test_every_step_that_decodes_finds_its_drafts(seats: int, k: int, weighed: int) -> None:
    """A hybrid may want fewer rounds of its model for many, a head alone has them all."""
    drafting = Drafting.__new__(Drafting)
    columns = SimpleNamespace(draft=torch.zeros((seats, k)))
    drafting.slots = SimpleNamespace(requests=[None] * seats, columns=columns)
    drafting.proposer = SimpleNamespace(follows_rows=True, puts_off=128, weighed=weighed)
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
            assert (rows, entries, DraftTraits(rounds)) in captured
            assert count > FEW or rows > 128 or (rows, entries, LATER) in captured
        rounds = drafting.captured(count, wanted, prompts=True)
        assert rounds == 0 if not wanted else max(wanted, k // 2) <= rounds <= k
        assert weighed == 0 or rounds in (0, k)
        for rows in {bucket_of(rows) for rows in range(count + 1, count * (1 + k) + 65)}:
            assert (rows, drafting.entries(OPS, count, rows), DraftTraits(rounds)) in captured
