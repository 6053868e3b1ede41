"""Option `enforce_eager`: steps run op by op, so that an error names the op that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tiny
from draftproof.ops import Runtime
from draftproof.ops.torch.backend import TorchOps
from draftproof.sampling_params import SamplingParams

BACKEND = "test_enforce_eager:GraphOps"
SPEC = {"method": "ngram", "num_speculative_tokens": 3}


class GraphRuntime(Runtime):
    """Runtime whose graphs report errors as a GPU does: without the op."""

    asynchronous = True
    num_graphs = 0

    def graph(self, function: Callable[[], Any], pool: int = 0) -> Callable[[], Any]:
        self.num_graphs += 1

        def replay() -> Any:
            try:
                return function()
            except RuntimeError as error:
                raise RuntimeError("CUDA error: an illegal memory access was encountered") from error

        return replay


class GraphOps(TorchOps):
    """Torch backend that captures steps."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.runtime = GraphRuntime(device)


def outputs(engine: Any) -> dict[str, tuple[list[int], list[Any]]]:
    params = SamplingParams(max_tokens=12, temperature=0.8, logprobs=2)
    records = tiny.run(engine, [tiny.request(i, params) for i in range(3)])
    return {key: (record.token_ids, record.logprobs) for key, record in records.items()}


def test_enforce_eager_captures_no_graph_and_keeps_the_output() -> None:
    captured = tiny.engine(speculative=SPEC, backend=BACKEND)
    eager = tiny.engine(speculative=SPEC, backend=BACKEND, enforce_eager=True)
    assert outputs(captured) == outputs(eager)
    assert captured.ops.runtime.num_graphs > 0
    assert eager.ops.runtime.num_graphs == 0


def test_debug_variable_implies_enforce_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_DEBUG", "1")
    engine = tiny.engine(speculative=SPEC, backend=BACKEND)
    outputs(engine)
    assert engine.ops.runtime.num_graphs == 0


@pytest.mark.parametrize("is_eager", [False, True])
def test_error_names_the_op_only_without_graphs(is_eager: bool) -> None:
    engine = tiny.engine(backend=BACKEND, enforce_eager=is_eager)
    outputs(engine)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("commit: illegal memory access")

    engine.ops.step.commit = fail
    engine.add(tiny.request(9, SamplingParams(max_tokens=4)))
    errors = [finish.error or "" for _ in range(12) for finish in engine.step().finishes.values()]
    assert len(errors) == 1 and ("commit" in errors[0]) == is_eager
