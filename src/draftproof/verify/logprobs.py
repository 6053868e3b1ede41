"""Logprobs on the host path: chosen, top and named tokens of single logits rows, without a log-softmax.

Most logprobs come from `SamplingOps.logprobs` inside the device step. This module serves prompts, drafts and
`logprob_token_ids`. A top list is ordered by value descending, then id ascending, so the list for k = 5 is
a prefix of the list for k = 20 and one pass with the largest k serves every request of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.ops import Ops
from draftproof.outputs import LogprobRow


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """Logprobs that one request needs at n rows of the logits."""

    rows: list[int]  # [n] into the logits
    tokens: list[int]  # [n] the token at each row
    top: int  # number of best tokens as well; 0: none
    ids: tuple[int, ...]  # other tokens, named by id


def logprob_rows(ops: Ops, logits: Tensor, query: LogprobQuery) -> list[LogprobRow]:
    """Return one LogprobRow per row: the token itself, the best, then the named ids. Waits for the device."""
    if not query.rows:
        return []
    rows = torch.tensor(query.rows, device=logits.device)
    tokens = torch.tensor(query.tokens, device=logits.device)
    found = ops.sampling.logprobs(logits, rows, tokens, query.top)
    columns = found.values.tolist(), found.ids.tolist(), found.ranks.tolist()
    lines = LogprobRow.from_columns(*columns, query.tokens, query.top)
    for token in query.ids:
        named = ops.sampling.logprobs(logits, rows, torch.full_like(tokens, token), 0)
        values, ranks = named.values[:, 0].tolist(), named.ranks.tolist()
        for line, value, rank in zip(lines, values, ranks, strict=True):
            line.token_ids.append(token)
            line.logprobs.append(value)
            line.ranks.append(rank)
    return lines
