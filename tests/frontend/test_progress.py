"""Progress bar without a terminal."""

from __future__ import annotations

import logging

import pytest

from draftproof.frontend import progress


def test_progress_without_a_terminal_is_logged_every_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.INFO, "draftproof"), progress.progress_bar() as show:
        for done in range(50):
            clock[0] += 1
            show("compiling", done, 50)
    assert [record.getMessage() for record in caplog.records] == [
        f"compiling: {done} of 50" for done in (10, 21, 32, 43)
    ]
