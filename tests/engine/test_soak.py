"""A short run of bench/exactness/soak.py with few pages, aborts and faults."""

import pytest
from exactness.soak import soak

from draftproof.engine.scheduler import Scheduler


def test_short_soak_is_exact_and_leaves_nothing():
    found = soak(100)
    assert found["num_wrong"] == 0, found["wrong"]
    assert found["preemptions"] > 2 and found["cached_tokens"] > 100 and found["aborted"] > 3
    assert found["lost_steps"] > 3
    assert found["refused_for_now"] > 0 and set(found["ends"]) == {"stop", "length", "error"}
    assert found["objects_end"] < found["objects_first_half"] + 500


@pytest.mark.parametrize("model", ["latent", "experts"])
def test_short_soak_of_other_layers_is_exact_and_leaves_nothing(model):
    found = soak(50, pages=15, model=model)
    assert found["num_wrong"] == 0, found["wrong"]
    assert found["preemptions"] and found["cached_tokens"] and found["aborted"] and found["lost_steps"]
    assert set(found["ends"]) == {"stop", "length", "error"}


def test_control_leaked_page_is_detected(monkeypatch):
    whole = Scheduler._preempt

    def broken(self, sequence):
        self.pages.acquire_prefix(sequence.digests[:1])
        whole(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", broken)
    assert soak(60, wave=20)["num_wrong"]
