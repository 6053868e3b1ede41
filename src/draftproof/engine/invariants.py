"""Invariants between two steps, checked at every step in debug mode and in tests."""

from __future__ import annotations

from draftproof.engine.scheduler import Scheduler
from draftproof.engine.slots import Slots


def check_step(scheduler: Scheduler, slots: Slots) -> None:
    """Assert that host mirror and device agree. No step may be in flight."""
    scheduler.pages.check()
    columns, host = slots.columns, scheduler.mirror
    owned: set[int] = set()
    for sequence in scheduler.running:
        slot, name = sequence.slot, sequence.request.id
        length, prompt = int(host.length[slot]), len(sequence.request.prompt_token_ids)
        left, num_draft = int(host.prompt_left[slot]), int(columns.num_draft[slot])
        assert slots.requests[slot] is sequence.request, f"{name}: its slot holds another request"
        assert int(columns.finish_status[slot]) == 0, f"{name}: finished on the device only"
        assert int(columns.length[slot]) == length, f"{name}: lengths differ"
        computed = length - left if left else length - 1
        assert int(columns.computed[slot]) == computed, f"{name}: KV of {int(columns.computed[slot])} tokens"
        assert num_draft <= int(host.num_draft[slot]), f"{name}: more drafts than the host mirror has"
        assert int(columns.prompt_len[slot]) == prompt, f"{name}: prompt lengths differ"
        assert host.in_flight[slot] == 0, f"{name}: a step is missing"
        assert length < sequence.max_length, f"{name}: ran past its maximum length"
        assert length + num_draft < sequence.max_length, f"{name}: drafts past its maximum length"
        assert len(sequence.pages) * scheduler.page_size >= computed, f"{name}: pages short"
        assert len(sequence.pages) == host.num_pages[slot], f"{name}: pages miscounted"
        assert host.max_committed[slot] == length, f"{name}: a step is in flight"
        assert all(scheduler.pages.is_used(page) for page in sequence.pages), f"{name}: a page has no user"
        table = columns.page_table[slot, : len(sequence.pages)].tolist()
        assert table == sequence.pages, f"{name}: its page table differs"
        written = sequence.pages[computed // scheduler.page_size :]  # full ones may be shared
        assert not owned & set(written), f"{name}: shares a page that is written to"
        owned |= set(written)
        tokens = columns.tokens[slot, :length]
        assert int(tokens.min()) >= 0 and int(tokens.max()) < slots.vocab, f"{name}: impossible token"
