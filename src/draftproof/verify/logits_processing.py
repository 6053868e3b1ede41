"""From the model's logits to the ones that are sampled from: penalties, bias, processors, masks.

Everything is per row, with the drafts before that row counted as if they were committed, so that a row
sees exactly the context it would see without speculation. The model's own logits are never changed.

Order: repetition, frequency and presence penalty; logit bias; the user's processors; then what is
forbidden (allowed_token_ids, bad_words, min_tokens, a grammar), so that nothing can allow it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from draftproof.ops import Ops
from draftproof.sampling_params import ROOM
from draftproof.types import Request, StepFeatures, Windows


def process(
    ops: Ops, logits: Tensor, windows: Windows, features: StepFeatures, hosted: Mapping[int, Request]
) -> tuple[Tensor, dict[int, str]]:
    """logits [L, V] -> (base [L, V], errors by row). `logits` itself where no option touches it.

    `hosted`: the requests, by slot, whose options need the host: it waits for the device here.
    """
    errors: dict[int, str] = {}
    adjusts = features.has_adjustments or bool(hosted)
    if not adjusts and not features.has_grammar:
        return logits, errors
    base = ops.apply_penalties(logits, windows) if adjusts else logits.clone()
    rows = [(i, s) for i, s in enumerate(windows.slot.tolist()) if s in hosted] if hosted else []
    for row, slot in rows:
        if hosted[slot].params.logits_processors:
            try:
                base[row] = _run_processors(hosted[slot], _context(windows, row), base[row])
            except Exception as error:  # the user's code may raise anything; it fails this row alone
                errors[row] = f"logits processor raised {type(error).__name__}: {error}"
    if adjusts:
        ops.apply_bans(base, windows)
    if features.has_grammar:
        ops.apply_grammar_mask(base, windows)
    for row, slot in rows:
        if hosted[slot].bad_word_ids:
            _forbid_words(base[row], hosted[slot], _context(windows, row))
        if hosted[slot].params.logits_processors:
            _bring_near(base[row])
    return base, errors


def _context(windows: Windows, row: int) -> list[int]:
    """Tokens so far at a row: prompt, committed output, and the drafts before the row."""
    columns, slot, depth = windows.columns, int(windows.slot[row]), int(windows.depth[row])
    committed: list[int] = columns.tokens[slot, : int(columns.length[slot])].tolist()
    return committed + columns.draft[slot, :depth].tolist()


def _run_processors(request: Request, context: list[int], row: Tensor) -> Tensor:
    shape = row.shape
    for function in request.params.logits_processors:
        row = function(context, row.clone())
        if not isinstance(row, Tensor) or row.shape != shape:
            raise TypeError(f"it must return a tensor of shape {tuple(shape)}")
    return row


def _forbid_words(row: Tensor, request: Request, context: list[int]) -> None:
    for word in request.bad_word_ids:
        before = list(word[:-1])
        if not before or context[-len(before) :] == before:
            row[word[-1]] = -math.inf


def _bring_near(row: Tensor) -> None:
    """A processor may say numbers that do not fit fp32 over a temperature. Their law hangs on differences."""
    peak = float(row.amax())
    if ROOM < abs(peak) < math.inf:
        row -= peak
