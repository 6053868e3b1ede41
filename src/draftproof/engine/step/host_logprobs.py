"""What few requests ask for and the device does not keep ready: read from a step's own tensors, by the host.

Logprobs of named tokens or of more than `asked.TOP` of the best, of every draft, and of the prompt. A step
that one of these takes part in is waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftproof.arrays import Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.engine.step.device_step import DeviceStep, QueuedStep
from draftproof.engine.step.logprob_routing import needs_host_token_logprobs
from draftproof.engine.step.step_results import HostLogprobs
from draftproof.models.runner import Runner
from draftproof.ops import Ops
from draftproof.outputs import DraftRecord, LogprobRow
from draftproof.sampling_params import top_of
from draftproof.types import FIRST_ROW, NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, TOKENS, Request
from draftproof.verify.logprobs import LogprobQuery, logprob_rows

PROMPT_ROWS = 64  # logits rows held at once for prompt logprobs


class Extras:
    """Reads them, for the entries of a step that asked."""

    def __init__(self, device: DeviceStep, slots: Slots, sources: tuple[str, ...]) -> None:
        self.device = device
        self.slots = slots
        self.sources = sources

    def of(
        self,
        planned: StepPlan,
        computed: Ints,
        lengths: Ints,
        ran: QueuedStep,
        table: Ints,
        own: NDArray[Any] | None,
        source: NDArray[Any] | None,
    ) -> dict[int, HostLogprobs]:
        """By entry. `computed`, `lengths`: [B] before the step.

        own, source [B, K]: what the drafter thought of its drafts, and who it was, if anybody wants to know.
        """
        found = {}
        for b, sequence in enumerate(planned.sequences):
            prompts = sequence.request.params.prompt_logprobs is not None and planned.chunk[b] > 0
            if not prompts and not sequence.needs_host_logprobs:
                continue
            extra = HostLogprobs()
            if prompts:
                extra.prompt_logprobs = self._prompt(planned, int(computed[b]), ran, b) or None
            if planned.samples[b] and sequence.needs_host_logprobs:
                names = [0] * table.shape[1] if source is None else source[b].tolist()
                told = [] if own is None else own[b].tolist()
                self._tokens(planned, int(lengths[b]), ran, b, table[b], told, names, extra)
            if extra != HostLogprobs():
                found[b] = extra
        return found

    def _prompt(self, planned: StepPlan, computed: int, ran: QueuedStep, b: int) -> list[LogprobRow]:
        assert ran.hidden is not None
        rows = np.maximum(planned.chunk, 1) + planned.drafts
        first = int(rows[:b].sum())
        mine = ran.hidden[first : first + int(planned.chunk[b])]
        sequence = planned.sequences[b]
        told = max(0, sequence.num_prompt_logprobs - computed)  # before it was put aside
        return prompt_logprobs(self.device.runner, sequence.request, computed + told, mine[told:])

    def _tokens(
        self,
        planned: StepPlan,
        length: int,
        ran: QueuedStep,
        b: int,
        line: Ints,
        own: list[float],
        source: list[int],
        extra: HostLogprobs,
    ) -> None:
        request, tensors, ops = planned.sequences[b].request, ran.tensors, self.device.ops
        assert tensors.logits is not None and tensors.sampled is not None
        logits = tensors.logits if request.params.logprobs_mode == "raw" else tensors.sampled.processed
        if needs_host_token_logprobs(request.params, self.slots.vocab):
            extra.logprobs = token_logprobs(ops, request, line, logits)
        if request.params.include_draft_logprobs:
            count, first = int(line[NUM_DRAFT]), int(line[FIRST_ROW])
            drafts = tensors.windows.draft[first : first + count].tolist()
            sources = [self.sources[n] for n in source[:count]]
            start = length - len(request.prompt_token_ids)
            extra.drafts = draft_records(ops, line, start, drafts, own, sources, logits)


def token_logprobs(ops: Ops, request: Request, line: Any, logits: Tensor) -> list[LogprobRow]:
    """Of an entry's committed tokens; `line` of the outcome's table."""
    params, count, first = request.params, int(line[NUM_OUT]), int(line[FIRST_ROW])
    tokens = line[TOKENS : TOKENS + count].tolist()
    rows = list(range(first, first + count))
    top = top_of(params.logprobs, logits.shape[1])
    return logprob_rows(ops, logits, LogprobQuery(rows, tokens, top, tuple(params.logprob_token_ids or ())))


def draft_records(
    ops: Ops, line: Any, start: int, drafts: list[int], own: list[float], sources: list[str], logits: Tensor
) -> list[DraftRecord]:
    """Every draft of a window, fallen ones included, with both sides' logprobs.

    `start`: index in the output of the window's first token; `own`: the drafter's logprobs.
    """
    count, first = int(line[NUM_DRAFT]), int(line[FIRST_ROW])
    target = logprob_rows(ops, logits, LogprobQuery(list(range(first, first + count)), drafts, 0, ()))
    return [
        DraftRecord(
            token_id=drafts[i],
            position=start + i,
            source=sources[i],
            accepted=i < int(line[NUM_ACCEPTED]),
            draft_logprob=None if own[i] != own[i] else own[i],
            target_logprob=target[i].logprobs[0],
        )
        for i in range(count)
    ]


def prompt_logprobs(runner: Runner, request: Request, computed: int, hidden: Tensor) -> list[LogprobRow]:
    """Of the prompt tokens that hidden [n, hidden], rows computed .. computed + n, decide.

    The row at position i decides prompt token i + 1; the last prompt row decides the first output.
    """
    prompt = request.prompt_token_ids
    count = min(len(hidden), len(prompt) - 1 - computed)
    lines: list[LogprobRow] = []
    for start in range(0, count, PROMPT_ROWS):
        size = min(PROMPT_ROWS, count - start)
        logits = runner.logits(hidden[start : start + size])
        at = computed + start + 1
        ids = [int(token) for token in prompt[at : at + size]]
        top = top_of(request.params.prompt_logprobs, logits.shape[1])
        lines += logprob_rows(runner.ops, logits, LogprobQuery(list(range(size)), ids, top, ()))
    return lines
