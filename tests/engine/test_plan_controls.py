"""What is planted in the scheduler, the pages or the device is seen by the lives of tests/lives.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftproof.engine.fast_path import FastPath
from draftproof.engine.page_pool import digests
from draftproof.engine.scheduler import Scheduler
from lives import K, Life, lives, machine


def test_control_steps_under_way_that_are_forgotten(monkeypatch):
    whole = Scheduler._planned

    def broken(self, *arguments):
        planned = whole(self, *arguments)
        self.mirror.in_flight[planned.slots] -= planned.samples
        return planned

    monkeypatch.setattr(Scheduler, "_planned", broken)
    with pytest.raises(AssertionError, match="surely ended"):
        lives()


def test_control_a_plan_that_goes_on_past_the_end(monkeypatch):
    """Of a request whose last token is under way another step is planned."""
    whole = Scheduler.plan

    def broken(self, idle=True):
        lines = self._lines.copy()
        self.mirror.max_length[lines] += 1
        planned = whole(self, idle)
        self.mirror.max_length[lines] -= 1
        return planned

    monkeypatch.setattr(Scheduler, "plan", broken)
    with pytest.raises(AssertionError, match="surely ended"):
        lives()


def test_control_drafts_that_are_not_counted(monkeypatch):
    """The host sets fewer rows aside than the device may have drafts."""
    whole = Life.run

    def broken(self, planned, budget):
        table = whole(self, planned, budget)
        budget[:] = np.maximum(budget - 1, 0)
        return table

    monkeypatch.setattr(Life, "run", broken)
    with pytest.raises(AssertionError, match="more drafts than the host counts on"):
        lives()


def test_control_rows_beyond_the_budget(monkeypatch):
    whole = Scheduler._planned

    def broken(self, takes_part, chunk, drafts, *rest):
        return whole(self, takes_part, chunk, np.where(drafts > 0, drafts + 1, 0), *rest)

    monkeypatch.setattr(Scheduler, "_planned", broken)
    with pytest.raises(AssertionError):
        lives()


def test_control_room_that_is_used_twice(monkeypatch):
    """Plans are taken again without counting what they may commit."""
    whole = FastPath._again

    def broken(self, *arguments):
        room = self._room
        planned = whole(self, *arguments)
        self._room = room
        return planned

    monkeypatch.setattr(FastPath, "_again", broken)
    with pytest.raises((AssertionError, IndexError)):  # a row beyond the last page
        lives()


def test_control_the_last_plan_again_whoever_runs(monkeypatch):
    whole = FastPath.plan

    def broken(self, running, lines, version):
        if self._plan is not None:
            self._plan.version = version
        return whole(self, running, lines, version)

    monkeypatch.setattr(FastPath, "plan", broken)
    with pytest.raises(AssertionError):
        lives()


@pytest.mark.parametrize(
    ("column", "more"), [("num_pages", 1), ("max_length", 1), ("prompt_left", -99), ("num_draft", 1)]
)
def test_control_those_that_are_looked_at_all_at_once(monkeypatch, column, more):
    """A page that is not there, a token past the end, a prompt that is not done, a draft that nobody has."""
    whole = FastPath._among_themselves

    def broken(self, running, lines, version):
        kept = getattr(self.mirror, column).copy()
        getattr(self.mirror, column)[lines] = np.maximum(kept[lines] + more, 0)
        try:
            return whole(self, running, lines, version)
        finally:
            if column != "num_draft":
                getattr(self.mirror, column)[:] = kept

    monkeypatch.setattr(FastPath, "_among_themselves", broken)
    with pytest.raises((AssertionError, IndexError)):
        lives()


def test_control_a_tenant_that_is_not_asked_for(monkeypatch):
    whole = Scheduler.settle

    def broken(self, planned, *columns):
        return whole(self, replace(planned, generations=self.mirror.generation[planned.slots]), *columns)

    monkeypatch.setattr(Scheduler, "settle", broken)
    with pytest.raises(AssertionError):
        lives()


def test_control_pages_found_before_they_are_stored(monkeypatch):
    """A page is made known when its request sits down, so another in the same plan finds it."""
    whole = Scheduler._admit

    def broken(self, sequence):
        seated = whole(self, sequence)
        if seated:
            self.prefix_cache.publish_pages(sequence, len(sequence.ids))
        return seated

    monkeypatch.setattr(Scheduler, "_admit", broken)
    with pytest.raises(AssertionError, match="KV of another text"):
        lives()


@pytest.mark.parametrize("page", ["chain", "salt"])
def test_control_digests_that_say_too_little(monkeypatch, page):
    """Without what comes before a page, or without the salt."""

    def broken(tokens, size, salt="", known=()):
        for at, found in enumerate(digests(tokens, size, "" if page == "salt" else salt, known), len(known)):
            yield repr((salt, tokens[at * size : (at + 1) * size])).encode() if page == "chain" else found

    monkeypatch.setattr("draftproof.engine.prefix_cache.digests", broken)
    with pytest.raises(AssertionError, match="KV of another text"):
        lives()


def test_control_a_victim_whose_pages_are_forgotten(monkeypatch):
    whole = Scheduler._leave

    def broken(self, sequence):
        sequence.pages = sequence.pages[:-1]
        whole(self, sequence)

    monkeypatch.setattr(Scheduler, "_leave", broken)
    with pytest.raises(AssertionError):
        lives()


def test_control_drafts_that_outgrow_their_pages(monkeypatch):
    monkeypatch.setattr(Scheduler, "_room", lambda self: np.full(len(self._lines), K))
    whole = Scheduler._missing_pages
    monkeypatch.setattr(
        Scheduler, "_missing_pages", lambda self, who, drafts, ahead=0: whole(self, who, 0 * drafts)
    )
    with pytest.raises(AssertionError, match="rows without a page"):
        lives()


def test_control_a_page_given_back_twice(monkeypatch):
    """A planted double free: who is put aside gives a shared page back once more."""
    whole = Scheduler._leave

    def broken(self, sequence):
        shared = [page for page in sequence.pages if self.pages._users.get(page, 0) > 1]
        whole(self, sequence)
        self.pages.release(shared[:1])

    monkeypatch.setattr(Scheduler, "_leave", broken)
    with pytest.raises(AssertionError, match="miscounted|released twice|KV of another text"):
        machine()


@pytest.mark.parametrize("name", ["first", "last"])
def test_control_an_order_that_is_not_that_of_rank(monkeypatch, name):
    """The best rank is put aside, or the queue is served from its end."""
    if name == "first":
        whole = Scheduler._preempt
        monkeypatch.setattr(
            Scheduler,
            "_preempt",
            lambda self, _: whole(self, min(self.running, key=lambda s: s.rank)),
        )
    else:
        admit_all = Scheduler._admit_all

        def broken(self, rows):
            self.waiting.reverse()
            newcomers = admit_all(self, rows)
            self.waiting.sort(key=lambda s: s.rank)
            return newcomers

        monkeypatch.setattr(Scheduler, "_admit_all", broken)
    with pytest.raises(AssertionError, match="put aside" if name == "first" else "before its turn"):
        lives()
