"""Prompts whose last layer computes output rows only: same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

import tiny
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.ops import resolve
from draftproof.ops.cpu.backend import CpuOps
from draftproof.ops.cpu.forward import CpuForward
from exact import Batch, Case, Setup, reference_run
from padded_ops import PaddedRuntime

CPU = torch.device("cpu")


class NarrowForward(CpuForward):
    """Forward ops whose last layer keeps only output rows in passes of 16 rows and more."""

    gather_last_layer_from_rows = 16


class NarrowRuntime(PaddedRuntime):
    """Runtime that records whether a captured step is running."""

    running: ClassVar[bool] = False

    def graph(self, function: Any, pool: int = 0) -> Any:
        def replay() -> Any:
            NarrowRuntime.running = True
            try:
                return function()
            finally:
                NarrowRuntime.running = False

        replay()
        return replay


class NarrowOps(CpuOps):
    """CPU backend with `NarrowForward` and `NarrowRuntime`."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.runtime = NarrowRuntime(device, self.executor)
        self.forward = NarrowForward(self.executor, self.features)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_selected_rows_equal_those_of_a_full_pass(backend, arch):
    made, ops = tiny.checkpoint(arch, "bfloat16"), resolve(backend, CPU)
    model = create_model(made.config, made.weights, ops, 64)
    full, partial = (Runner(model, ops, made.dtype, num_pages=9, page_size=8, max_rows=32) for _ in "ab")
    at = torch.arange(4 if backend == "reference" else 21)
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    rows = full.rows(at * 7 % tiny.VOCAB, at, torch.ones_like(at), table)
    wanted = torch.tensor([len(at) - 1, 0, 2, 0])
    assert torch.equal(partial.forward_selected(rows, wanted), full.forward(rows)[wanted])
    for mine, theirs in zip(full.caches, partial.caches, strict=True):
        assert torch.equal(mine, theirs)


def batch(prompt: bool = False, slots: int = 4, **options: Any) -> Batch:
    cases = [Case(i, temperature=0.7 * (i % 2), length=20, prompt=prompt and i == 1) for i in range(4)]
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    setup, sizes = (
        Setup(backend="test_wanted_rows:NarrowOps"),
        {"max_num_batched_tokens": 48, "max_num_seqs": slots, **options},
    )
    return Batch(cases, Setup(), engine=setup.engine(spec, overlap=True, **sizes), arrivals=(0, 0, 1, 5))


@pytest.mark.parametrize("prompt", [False, True], ids=["last rows", "prompt logprobs"])
def test_steps_with_prompts_are_exact(prompt):
    served = batch(prompt)
    for case in served.cases:  # cached, so that only the batch is observed below
        reference_run(case, served.setup)
    with (
        mock.patch.object(
            Runner, "forward_selected", autospec=True, side_effect=Runner.forward_selected
        ) as selected,
        mock.patch.object(
            Runner, "forward_tapped", autospec=True, side_effect=Runner.forward_tapped
        ) as whole,
    ):
        assert served.differences() == []
    sizes = {len(call.args[1].tokens) for call in (whole if prompt else selected).call_args_list}
    assert max(sizes) >= NarrowForward.gather_last_layer_from_rows


def replayed_passes(served: Batch) -> set[bool]:
    """Return whether passes ran inside a captured step, as a set."""
    found = set()

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(Runner, name)

        def run(self: Runner, *rows: Any) -> Any:
            found.add(NarrowRuntime.running)
            return function(self, *rows)

        return run

    names = ("forward_tapped", "forward_logits")
    with mock.patch.multiple(Runner, **{name: recorded(name) for name in names}):
        assert served.differences() == []
    return found


@pytest.mark.parametrize("slots", [4, 8])  # with 8, more than half of the rows may be output rows
def test_every_pass_is_captured_with_any_number_of_drafts(slots):
    served = batch(slots=slots)
    for case in served.cases:
        reference_run(case, served.setup)
    assert replayed_passes(served) == {True}
    first = batch(prompt=True)
    assert replayed_passes(first) == {True, False}  # the first pass for prompt logprobs of a size
    assert replayed_passes(Batch(first.cases, Setup(), engine=first.engine, arrivals=(0, 0, 1, 5))) == {True}


def test_control_wrong_rows_are_detected():
    right = Runner.forward_selected
    wrong = lambda self, rows, at: right(self, rows, (at - 1).clamp(min=0))  # noqa: E731
    with mock.patch.object(Runner, "forward_selected", wrong):
        assert batch().differences()
