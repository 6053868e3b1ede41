"""Run-ahead depth and step seconds from the times of reads."""

from __future__ import annotations

from draftproof.engine.drafting.run_ahead_depth import RunAhead, StepTimes


def times(read: float, waited: float, was_ready: bool = False, behind: bool = True) -> StepTimes:
    return StepTimes(read - 1.5, waited, read, behind, was_ready)


def test_three_steps_are_queued_while_the_host_is_often_late() -> None:
    ahead = RunAhead(asynchronous=True)
    for i in range(50):
        ahead.record_step(times(i + 1.0, i + 0.5))
    assert ahead.depth == 2
    for i in range(50, 60):
        ahead.record_step(times(i + 1.0, i + 1.0, was_ready=True))
    assert ahead.depth == 3
    for i in range(60, 300):
        ahead.record_step(times(i + 1.0, i + 0.5))
    assert ahead.depth == 2


def test_a_step_lasts_from_read_to_read_and_a_late_one_is_not_clean() -> None:
    ahead = RunAhead(asynchronous=True)
    first = ahead.record_step(times(10.0, 9.5, behind=False))
    assert (first.device, first.host, first.is_clean) == (1.5, None, True)
    second = ahead.record_step(times(11.0, 10.4))
    assert second.device == 1.0 and second.host is not None and abs(second.host - 0.4) < 1e-9
    assert not ahead.record_step(times(12.0, 12.0, was_ready=True)).is_clean
    assert not ahead.record_step(times(13.0, 12.5)).is_clean  # the device idled before it
    assert ahead.record_step(times(14.0, 13.5)).is_clean
    ahead.record_orphan(times(20.0, 19.0))
    assert not ahead.is_device_busy(20.1) and not ahead.record_step(times(21.0, 20.5)).is_clean


def test_the_device_is_busy_for_most_of_a_step_after_a_read() -> None:
    ahead = RunAhead(asynchronous=True)
    ahead.record_step(times(10.0, 9.5))
    ahead.record_step(times(11.0, 10.5))
    assert ahead.is_device_busy(11.5) and not ahead.is_device_busy(11.9)


def test_without_a_queue_the_host_is_never_late() -> None:
    ahead = RunAhead(asynchronous=False)
    for i in range(50):
        assert ahead.record_step(times(i + 1.0, i + 1.0, was_ready=True)).host is None
    assert ahead.depth == 2
