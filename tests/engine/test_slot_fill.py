"""Filling slots never assigns in a way that makes torch wait for a GPU."""

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
    """Record assignments that wait on a GPU: a number to places named by a tensor."""
    found: list[Any] = []
    assign = torch.Tensor.__setitem__

    def record(self: torch.Tensor, index: Any, value: Any) -> None:
        places = index if isinstance(index, tuple) else (index,)
        named = any(isinstance(place, torch.Tensor) for place in places)
        if named and (not isinstance(value, torch.Tensor) or (value.dim() == 0 and value.is_cpu)):
            found.append((index, value))
        assign(self, index, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", record)
    return found


def test_filling_slots_never_waits_for_the_device(waits: list[Any]) -> None:
    engine = tiny.engine(speculative={"method": "ngram", "num_speculative_tokens": 3})
    slots = engine.loop.slots
    requests = [tiny.request(i, params) for i, params in enumerate(PARAMS)]
    for request in requests:
        engine.add(request)
    planned = engine.loop.scheduler.plan()
    assert planned is not None and len(planned.admitted) == len(requests)
    with torch.inference_mode():
        slots.fill(planned.admitted)
        slots.grow([(0, 1, 2)])
    assert waits == []
    for sequence, request in zip(planned.admitted, requests, strict=True):
        length, line = len(request.prompt_token_ids), sequence.slot
        assert slots.read(line, length) == list(request.prompt_token_ids)
        assert slots.columns.length[line] == length and slots.columns.seed[line] == request.seed
    ends = slots.columns.ends[planned.admitted[0].slot]
    assert ends[7] and slots.columns.bias[planned.admitted[0].slot, 5] == 1.0
    assert (~slots.columns.banned[planned.admitted[1].slot]).nonzero().flatten().tolist() == [3, 5, 9]


def test_control_assigned_number_is_detected(waits: list[Any]) -> None:
    line = torch.zeros(4)
    line[torch.tensor([1])] = torch.ones(1)
    line[1:2] = 3
    assert waits == []
    line[torch.tensor([1, 2])] = 5
    assert len(waits) == 1
