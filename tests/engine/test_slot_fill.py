"""Sitting down never waits for the device. What a CPU can show of that: nothing is assigned that would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from draftproof.sampling_params import SamplingParams

PARAMS = [
    SamplingParams(max_tokens=4, logit_bias={5: 1.0}, stop_token_ids=[7]),
    SamplingParams(max_tokens=4, allowed_token_ids=[3, 5, 9]),
    SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9),
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was assigned that makes torch wait on a GPU: a number, to places that a tensor names."""
    found: list[Any] = []
    right = torch.Tensor.__setitem__

    def noted(self: torch.Tensor, index: Any, value: Any) -> None:
        places = index if isinstance(index, tuple) else (index,)
        named = any(isinstance(place, torch.Tensor) for place in places)
        if named and (not isinstance(value, torch.Tensor) or (value.dim() == 0 and value.is_cpu)):
            found.append((index, value))
        right(self, index, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", noted)
    return found


def test_nobody_who_sits_down_makes_the_host_wait(waits: list[Any]) -> None:
    engine = tiny.engine(speculative={"method": "ngram", "num_speculative_tokens": 3})
    slots = engine.loop.slots
    requests = [tiny.request(i, params) for i, params in enumerate(PARAMS)]
    for request in requests:
        engine.add(request)
    planned = engine.loop.scheduler.plan()
    assert planned is not None and len(planned.admitted) == len(requests)
    with torch.inference_mode():
        slots.fill([sequence.slot_init for sequence in planned.admitted])
        slots.grow([(0, 1, 2)])
    assert waits == []
    for sequence, request in zip(planned.admitted, requests, strict=True):
        length, line = len(request.prompt_token_ids), sequence.slot
        assert slots.read(line, length) == list(request.prompt_token_ids)
        assert slots.columns.length[line] == length and slots.columns.seed[line] == request.seed
    ends = slots.columns.ends[planned.admitted[0].slot]
    assert ends[7] and slots.columns.bias[planned.admitted[0].slot, 5] == 1.0
    assert (~slots.columns.banned[planned.admitted[1].slot]).nonzero().flatten().tolist() == [3, 5, 9]


def test_a_number_that_is_assigned_is_noticed(waits: list[Any]) -> None:
    line = torch.zeros(4)
    line[torch.tensor([1])] = torch.ones(1)
    line[1:2] = 3
    assert waits == []
    line[torch.tensor([1, 2])] = 5
    assert len(waits) == 1
