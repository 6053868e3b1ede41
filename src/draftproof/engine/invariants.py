"""What must hold between two steps; checked at every step in debug mode and in the tests."""

from __future__ import annotations

from draftproof.engine.scheduler import Scheduler
from draftproof.engine.slots import Slots


def check_step(scheduler: Scheduler, slots: Slots) -> None:
    """The host's copies agree with the columns; a decoding slot lacks KV for its newest token alone."""
    scheduler.pages.check()
    columns = slots.columns
    owned: set[int] = set()
    for sequence in scheduler.running:
        slot, name = sequence.slot, sequence.request.id
        assert slots.options[slot] is not None, f"{name}: its slot is free"
        assert int(columns.length[slot]) == sequence.length, f"{name}: lengths differ"
        assert int(columns.computed[slot]) == sequence.computed, f"{name}: computed differs"
        assert int(columns.num_draft[slot]) == sequence.num_draft, f"{name}: draft counts differ"
        prompt = len(sequence.request.prompt_token_ids)
        assert int(columns.prompt_len[slot]) == prompt, f"{name}: prompt lengths differ"
        assert sequence.computed <= sequence.length - 1, f"{name}: KV of a token not yet computed"
        if sequence.length > prompt:
            assert sequence.waiting_rows == 1, f"{name}: computed != length - 1 while decoding"
        assert sequence.length < sequence.max_length, f"{name}: ran past its end"
        assert sequence.length + sequence.num_draft < sequence.max_length, f"{name}: drafts past its end"
        assert len(sequence.pages) * scheduler.page_size >= sequence.max_length, f"{name}: pages short"
        assert not owned & set(sequence.pages), f"{name}: shares a page"
        owned |= set(sequence.pages)
        tokens = columns.tokens[slot, : sequence.length]
        assert int(tokens.min()) >= 0 and int(tokens.max()) < slots.vocab, f"{name}: impossible token"
