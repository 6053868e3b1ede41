"""What few requests ask for and the device does not keep ready: read from a step's own tensors, by the host.

Logprobs of named tokens or of more than `asked.TOP` of the best, of every draft, and of the prompt. A step
that one of these takes part in is waited for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftproof.engine.asked import top_of
from draftproof.models.runner import Runner
from draftproof.ops import Ops
from draftproof.types import (
    FIRST_ROW,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    TOKENS,
    DraftRecord,
    LogprobRow,
    Request,
)
from draftproof.verify.logprobs import Wanted, logprob_rows

PROMPT_ROWS = 64  # logits rows held at once for prompt logprobs


def token_logprobs(ops: Ops, request: Request, line: Any, logits: Tensor) -> list[LogprobRow]:
    """Of an entry's committed tokens; `line` of the outcome's table."""
    params, count, first = request.params, int(line[NUM_OUT]), int(line[FIRST_ROW])
    tokens = line[TOKENS : TOKENS + count].tolist()
    rows = list(range(first, first + count))
    top = top_of(params.logprobs, logits.shape[1])
    return logprob_rows(ops, logits, Wanted(rows, tokens, top, tuple(params.logprob_token_ids or ())))


def draft_records(
    ops: Ops, line: Any, start: int, drafts: list[int], own: list[float], sources: list[str], logits: Tensor
) -> list[DraftRecord]:
    """Every draft of a window, fallen ones included, with both sides' logprobs.

    `start`: index in the output of the window's first token; `own`: the drafter's logprobs.
    """
    count, first = int(line[NUM_DRAFT]), int(line[FIRST_ROW])
    target = logprob_rows(ops, logits, Wanted(list(range(first, first + count)), drafts, 0, ()))
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
        lines += logprob_rows(runner.ops, logits, Wanted(list(range(size)), ids, top, ()))
    return lines
