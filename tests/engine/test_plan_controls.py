"""Negative controls: defects planted in scheduler, pages or device, which the fuzz must detect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftproof.engine.scheduler import FastPath, Scheduler
from scheduler_fuzz import FuzzRun, K, run_fuzz, run_state_machine

pytestmark = pytest.mark.control


def forget_steps_in_flight(whole, self, *arguments):
    planned = whole(self, *arguments)
    self.mirror.in_flight[planned.slots] -= planned.is_sampled
    return planned


def plan_past_the_end(whole, self, is_idle=True):
    slots = self._running_slots.copy()
    self.mirror.max_length[slots] += 1
    planned = whole(self, is_idle)
    self.mirror.max_length[slots] -= 1
    return planned


def reserve_fewer_rows_than_drafts(whole, self, planned, budget):
    table = whole(self, planned, budget)
    budget[:] = np.maximum(budget - 1, 0)
    return table


def exceed_the_row_budget(whole, self, takes_part, chunk, drafts, *rest):
    return whole(self, takes_part, chunk, np.where(drafts > 0, drafts + 1, 0), *rest)


def repeat_plans_without_counting_room(whole, self, *arguments):
    room = self._room
    planned = whole(self, *arguments)
    self._room = room
    return planned


def repeat_plans_of_other_requests(whole, self, running, slots, version):
    if self._plan is not None:
        self._plan.version = version
    return whole(self, running, slots, version)


def publish_pages_at_admission(whole, self, sequence):
    """Publish a page before it is stored, so that another request in the same plan finds it."""
    admitted = whole(self, sequence)
    if admitted:
        self.prefix_cache.publish_pages(sequence, len(sequence.ids))
    return admitted


def lose_a_page_of_a_preempted_request(whole, self, sequences):
    for sequence in sequences:
        sequence.pages = sequence.pages[:-1]
    whole(self, sequences)


def preempt_the_best_rank(whole, self, _):
    return whole(self, min(self.running, key=lambda s: s.rank))


def admit_from_the_end_of_the_queue(whole, self, rows):
    self.waiting.reverse()
    admitted = whole(self, rows)
    self.waiting.sort(key=lambda s: s.rank)
    return admitted


@pytest.mark.parametrize(
    ("owner", "name", "defect", "match"),
    [
        (Scheduler, "_planned", forget_steps_in_flight, "surely ended"),
        (Scheduler, "plan", plan_past_the_end, "surely ended"),
        (FuzzRun, "run", reserve_fewer_rows_than_drafts, "more drafts than the host counts on"),
        (Scheduler, "_planned", exceed_the_row_budget, None),
        (FastPath, "_repeat", repeat_plans_without_counting_room, None),
        (FastPath, "plan", repeat_plans_of_other_requests, None),
        (Scheduler, "_admit", publish_pages_at_admission, "KV of another text"),
        (Scheduler, "_remove_from_running", lose_a_page_of_a_preempted_request, None),
        (Scheduler, "_preempt", preempt_the_best_rank, "preempted"),
        (Scheduler, "_admit_all", admit_from_the_end_of_the_queue, "before its turn"),
    ],
)
def test_planted_defect_is_detected(
    monkeypatch, owner: Any, name: str, defect: Callable[..., Any], match: str | None
):
    whole = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *given, **more: defect(whole, self, *given, **more))
    past_the_last_page = (IndexError,) if defect is repeat_plans_without_counting_room else ()
    with pytest.raises((AssertionError, *past_the_last_page), match=match):
        run_fuzz()


@pytest.mark.parametrize(
    ("column", "more"), [("num_pages", 1), ("max_length", 1), ("prompt_left", -99), ("num_draft", 1)]
)
def test_wrong_column_of_the_fast_path_is_detected(monkeypatch, column, more):
    """A page that is missing, a token past the end, an unfinished prompt, a draft that does not exist."""
    whole = FastPath._plan_decoding

    def broken(self, running, slots, version):
        kept = getattr(self.mirror, column).copy()
        getattr(self.mirror, column)[slots] = np.maximum(kept[slots] + more, 0)
        try:
            return whole(self, running, slots, version)
        finally:
            if column != "num_draft":
                getattr(self.mirror, column)[:] = kept

    monkeypatch.setattr(FastPath, "_plan_decoding", broken)
    with pytest.raises((AssertionError, IndexError)):
        run_fuzz()


def test_drafts_that_outgrow_their_pages_are_detected(monkeypatch):
    whole = Scheduler._missing_pages
    monkeypatch.setattr(Scheduler, "_room", lambda self: np.full(len(self._running_slots), K))
    monkeypatch.setattr(
        Scheduler, "_missing_pages", lambda self, who, drafts, ahead=0: whole(self, who, 0 * drafts)
    )
    with pytest.raises(AssertionError, match="rows without a page"):
        run_fuzz()


def test_page_released_twice_is_detected_by_the_state_machine(monkeypatch):
    whole = Scheduler._remove_from_running

    def broken(self, sequences):
        pages = [page for sequence in sequences for page in sequence.pages]
        shared = [page for page in pages if self.pages._ref_counts.get(page, 0) > 1]
        whole(self, sequences)
        self.pages.release(shared[:1])

    monkeypatch.setattr(Scheduler, "_remove_from_running", broken)
    with pytest.raises(AssertionError, match="miscounted|released twice|KV of another text"):
        # Hypothesis generates other examples when other modules are loaded
        run_state_machine(max_examples=2000)
