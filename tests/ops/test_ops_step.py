"""Step, sampling and draft ops of every backend against the reference, bit for bit, on `step_cases`.

`test_ops_triton` checks the triton backend. Every check also fails when the op it looks at is wrong.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import step_cases
from draftproof.ops.contract.draft_search import SuffixOptions
from draftproof.ops.reference.draft_search import _latest_match
from draftproof.ops.torch.backend import TorchOps
from draftproof.types import (
    FINISH_STATUS,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    TOKENS,
    DeviceBatch,
    FinishStatus,
    LogprobKind,
    Outcome,
)
from opcheck import CPU, importable
from step_cases import CHECKS, REF, Size, Step

SEEDS = 9
OTHER_SIZES = [
    Size(entries=1, k=1, vocab=5, wide=12, letters=2),
    Size(entries=20, k=5, vocab=61, wide=70, letters=2),
]
BACKENDS = {name: ops for name, ops in importable().items() if name not in ("reference", "triton")}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_op_equals_reference(backend: str, name: str) -> None:
    for seed in range(SEEDS):
        CHECKS[name](BACKENDS[backend], seed, Size())
    for size in OTHER_SIZES:
        for seed in range(4):
            CHECKS[name](BACKENDS[backend], seed, size)


WRONG = {
    "layout": lambda given, result: given[3].windows.position.add_(given[3].windows.depth > 1),
    "apply_penalties": lambda given, result: result.mul_(1 + 1e-7),
    "apply_bans": lambda given, result: given[0][0].clamp_(min=-1e30),
    "apply_grammar_mask": lambda given, result: given[0][0].clamp_(min=-1e30),
    "sample": lambda given, result: result[1].clamp_(max=3),
    "commit": lambda given, result: given[4].pick_rows.clamp_(min=0),
    "logprobs": lambda given, result: result.ranks.clamp_(max=10),
    "draft_logprobs": lambda given, result: given[4].values.nan_to_num_(0.0),
    "search_ngram": lambda given, result: result[1].clamp_(max=3),
    "select_drafts": lambda given, result: given[1].rejected.mul_(2),
    "search_suffix": lambda given, result: result[2].clamp_(max=1 << 15),
    "store_drafts": lambda given, result: given[0].draft_source.clamp_(min=0),
    "store_ranking": lambda given, result: given[0].ranks.clamp_(max=4),
    "shift_rows": lambda given, result: result[1].clamp_(min=0),
    "lm_head_sample": lambda given, result: given[8].clamp_(max=3),
}


@pytest.mark.parametrize("name", CHECKS)
def test_control_defect_in_an_op_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply a defect to the result of one op."""
    ops = TorchOps(CPU)
    family = next(f for f in (ops.sampling, ops.step, ops.search, ops.rounds) if hasattr(f, name))
    right = getattr(family, name)

    def wrong(*given: Any, **options: Any) -> Any:
        result = right(*given, **options)
        WRONG[name](given, result)
        return result

    monkeypatch.setattr(family, name, wrong)
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            CHECKS[name](ops, seed, Size())


def features(seed: int) -> Counter[str]:
    """Count the features of a step of the default size."""
    found: Counter[str] = Counter()
    step = Step(seed)
    columns, plan = step.columns, step.plan
    before = step.windows(step_cases.spare_of(seed), CPU)
    choice, bad = step_cases.choice_of(step, before, seed)
    out = Outcome(
        torch.zeros((len(plan.slots), TOKENS + step.size.k + 1), dtype=torch.int64), bad.clone(), bad.clone()
    )
    REF.step.commit(plan, before, choice, bad, out)
    _, count, _ = REF.search.search_ngram(DeviceBatch(columns, plan.slots, plan.budget), 1, 3)
    for b, slot in enumerate(plan.slots.tolist()):
        if slot < 0:
            found["no entry"] += 1
            continue
        line, window = out.table[b].tolist(), int(before.slots[b]) >= 0
        chunk, ended = int(plan.chunk[b]), int(columns.finish_status[slot])
        found["ended before"] += ended != FinishStatus.RUNNING
        found["prompt continues"] += chunk > 0 and not window and not ended
        found["prompt ends"] += chunk > 0 and window
        found["no budget"] += int(plan.budget[b]) == 0
        if count[b] and not ended:
            found["n-gram"] += 1
            length = int(columns.length[slot])
            text = columns.tokens[slot, :length].tolist()
            at, _ = _latest_match(text, 1, 3)
            found["period shorter than the budget"] += length - at < int(count[b])
        if not window:
            continue
        rows = bad[int(before.first[b]) :][: line[NUM_DRAFT] + 1]
        found["drafts cut by the plan"] += int(columns.num_draft[slot]) > line[NUM_DRAFT]
        found[f"ends: {FinishStatus(line[FINISH_STATUS]).name}"] += 1
        ends_in_drafts = line[NUM_OUT] == line[NUM_ACCEPTED]
        found["stop within its drafts"] += line[FINISH_STATUS] == FinishStatus.STOP and ends_in_drafts
        found["length within its drafts"] += line[FINISH_STATUS] == FinishStatus.LENGTH and ends_in_drafts
        found["a bad row after the last committed token"] += line[
            FINISH_STATUS
        ] < FinishStatus.NO_ALLOWED_TOKEN and bool((rows > 0).any())
        found["nothing committed"] += line[NUM_OUT] == 0
        found["all accepted"] += line[NUM_ACCEPTED] == line[NUM_DRAFT] > 0
        found["one rejected"] += line[NUM_ACCEPTED] < line[NUM_DRAFT]
        found[f"logprobs {LogprobKind(int(columns.logprob_kind[slot])).name}"] += 1
        found["sampled" if columns.temperature[slot] > 0 else "greedy"] += 1
    return found


def test_cases_cover_all_features() -> None:
    found: Counter[str] = Counter()
    for seed in range(SEEDS):
        found.update(features(seed))
    rare = {name: n for name, n in found.items() if n < 2}
    assert not rare, rare
    assert {f"ends: {end.name}" for end in FinishStatus if end != FinishStatus.FAILED} <= set(found)
    assert {f"logprobs {kind.name}" for kind in LogprobKind} | {"sampled", "greedy"} <= set(found)


def test_cases_draft_from_the_pool() -> None:
    drafts = 0
    for seed in range(SEEDS):
        step = Step(seed)
        pool = step_cases.pool_of(step)
        batch = DeviceBatch(step.columns, step.plan.slots, step.plan.budget)
        REF.search.search_suffix(batch, pool, SuffixOptions(1, 1.0, 0.05))
        drafts += int((pool.used == pool.clock).sum())
    assert drafts >= 5
