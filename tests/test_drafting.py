"""Which drafts are captured at start: no step that decodes may have to wait for a capture, nor one with a
short prompt run op by op."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from draftproof.engine.drafting import FEW, LATER, Drafting
from draftproof.ops.triton_cuda.graph import bucket_of
from draftproof.types import DraftTraits

OPS = SimpleNamespace(asynchronous=True, bucket=bucket_of)


@pytest.mark.parametrize(("seats", "k"), [(1, 4), (7, 8), (64, 4), (256, 4)])
def test_every_step_that_decodes_finds_its_drafts(seats: int, k: int) -> None:
    drafting = Drafting.__new__(Drafting)
    columns = SimpleNamespace(draft=torch.zeros((seats, k)))
    drafting.slots = SimpleNamespace(requests=[None] * seats, columns=columns)
    drafting.proposer, drafting.waits = SimpleNamespace(follows_rows=True, puts_off=128), True
    sizes = sorted({bucket_of(rows) for rows in range(1, seats * (1 + k) + 1025)}, reverse=True)
    captured = set(drafting.usual(OPS, sizes))
    assert len(captured) <= 280
    for count, wanted in product(range(1, seats + 1), range(k + 1)):
        rounds = drafting._rounds(count, wanted)
        assert wanted <= rounds <= k and (rounds == 0) == (wanted == 0)
        for rows in {bucket_of(rows) for rows in range(count, count * (1 + k) + 1)}:
            entries = drafting.entries(OPS, count, rows)
            assert count <= entries <= min(seats, rows)
            assert (rows, entries, DraftTraits(rounds)) in captured
            assert count > FEW or rows > 128 or (rows, entries, LATER) in captured
        rounds = drafting._rounds(count, wanted, prompts=True)
        assert rounds == (k if wanted else 0)
        for rows in {bucket_of(rows) for rows in range(count + 1, count * (1 + k) + 65)}:
            assert (rows, drafting.entries(OPS, count, rows), DraftTraits(rounds)) in captured
