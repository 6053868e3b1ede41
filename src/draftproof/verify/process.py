"""From the model's logits to the ones that are sampled from: penalties, bias, processors, masks.

Everything is per row, with the drafts before that row counted as if they were committed, so that a row
sees exactly the context it would see without speculation. The model's own logits are never changed.

Order: repetition, frequency and presence penalty; logit bias; the user's processors; then what is
forbidden (allowed_token_ids, bad_words, min_tokens), so that nothing can allow it again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.types import SlotOptions, Windows


def process(logits: Tensor, windows: Windows) -> tuple[Tensor, dict[int, str]]:
    """logits [L, V] -> (base [L, V], errors by row). `logits` itself where no option touches it."""
    errors: dict[int, str] = {}
    penalised = [options.request.params.penalises for options in windows.options]
    if not any(penalised) and all(_untouched(options) for options in windows.options):
        return logits, errors
    base = logits.clone()
    if any(penalised):
        rows = torch.tensor(penalised, device=logits.device)[windows.owner].nonzero()[:, 0]
        base[rows] = _penalise(base[rows], windows, rows)
    owners, depths = windows.owner.tolist(), windows.depth.tolist()
    for row, (owner, depth) in enumerate(zip(owners, depths, strict=True)):
        options = windows.options[owner]
        if _untouched(options):
            continue
        if options.bias_ids is not None:
            base[row, options.bias_ids] += options.bias_values
        if options.request.params.logits_processors:
            context = _context(windows, owner, depth)
            try:
                base[row] = _run_processors(options, context, base[row])
            except Exception as error:  # the user's code may raise anything; it fails this row alone
                errors[row] = f"logits processor raised {type(error).__name__}: {error}"
        _forbid(base[row], windows, options, owner, depth)
    return base, errors


def _untouched(options: SlotOptions) -> bool:
    params = options.request.params
    return (
        options.bias_ids is None
        and options.banned is None
        and not options.request.bad_word_ids
        and not params.logits_processors
        and not params.min_tokens
    )


def _context(windows: Windows, owner: int, depth: int) -> list[int]:
    """Tokens so far at a row: prompt, committed output, and the drafts before the row."""
    slot = int(windows.slots[owner])
    length = int(windows.columns.length[slot])
    committed: list[int] = windows.columns.tokens[slot, :length].tolist()
    return committed + windows.draft[owner, :depth].tolist()


def _penalise(logits: Tensor, windows: Windows, rows: Tensor) -> Tensor:
    """Repetition looks at prompt and output (as transformers), the other two at the output alone."""
    columns, owner = windows.columns, windows.owner[rows]
    slots = windows.slots[owner]
    length = columns.length[slots][:, None]
    index = torch.arange(int(length.max()) + windows.draft.shape[1], device=logits.device)[None]
    committed = columns.tokens[slots][:, : index.shape[1]]
    missing = index.shape[1] - committed.shape[1]
    committed = torch.nn.functional.pad(committed, (0, missing))
    drafts = windows.draft[owner].gather(1, (index - length).clamp(0, windows.draft.shape[1] - 1))
    valid = index < length + windows.depth[rows][:, None]
    tokens = torch.where(valid, torch.where(index < length, committed, drafts), 0)
    shape = logits.shape
    seen = torch.zeros(shape, device=logits.device).scatter_add_(1, tokens, valid.float()) > 0
    output = valid & (index >= columns.prompt_len[slots][:, None])
    counts = torch.zeros(shape, device=logits.device).scatter_add_(1, tokens, output.float())
    penalty = columns.repetition[slots][:, None]
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(seen, repeated, logits)
    logits = logits - columns.frequency[slots][:, None] * counts
    return logits - columns.presence[slots][:, None] * (counts > 0)


def _run_processors(options: SlotOptions, context: list[int], row: Tensor) -> Tensor:
    shape = row.shape
    for function in options.request.params.logits_processors:
        row = function(context, row.clone())
        if not isinstance(row, Tensor) or row.shape != shape:
            raise TypeError(f"it must return a tensor of shape {tuple(shape)}")
    return row


def _forbid(row: Tensor, windows: Windows, options: SlotOptions, owner: int, depth: int) -> None:
    """Set what may not be sampled to -inf, in place."""
    if options.banned is not None:
        row.masked_fill_(options.banned, -math.inf)
    if options.request.bad_word_ids:
        context = _context(windows, owner, depth)
        for word in options.request.bad_word_ids:
            before = list(word[:-1])
            if not before or context[-len(before) :] == before:
                row[word[-1]] = -math.inf
    slot = windows.slots[owner]
    if int(windows.columns.length[slot]) + depth < int(windows.columns.min_length[slot]):
        ends = windows.columns.stop_ids[slot]
        row[ends[ends >= 0]] = -math.inf
