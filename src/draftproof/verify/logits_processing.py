"""Logits processing before sampling: penalties, bias, user processors, masks.

Each row counts the drafts before it as if they were committed. It therefore has the context that it would
have without speculation. The model's own logits are never changed in place.

Order: repetition, frequency and presence penalty; logit bias; the user's processors; then forbidden tokens
(allowed_token_ids, bad_words, min_tokens, a grammar), so that no processor can allow them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from draftproof.ops import Ops
from draftproof.sampling_params import MAX_LOGIT
from draftproof.types import Request, StepFeatures, Windows


def apply_request_options(
    ops: Ops, logits: Tensor, windows: Windows, features: StepFeatures, host_processed: Mapping[int, Request]
) -> tuple[Tensor, dict[int, str]]:
    """Return processed logits [L, V] and errors by row; `logits` itself if no option applies.

    `host_processed`: requests, by slot, with options that run on the host, which waits for the device.
    """
    errors: dict[int, str] = {}
    adjusts = features.has_adjustments or bool(host_processed)
    if not adjusts and not features.has_grammar:
        return logits, errors
    base = ops.sampling.apply_penalties(logits, windows) if adjusts else logits.clone()
    slots = windows.slot.tolist() if host_processed else []
    rows = [(row, slot) for row, slot in enumerate(slots) if slot in host_processed]
    contexts = _Contexts(windows)
    for row, slot in rows:
        if host_processed[slot].params.logits_processors:
            try:
                base[row] = _run_processors(host_processed[slot], contexts.before(row, slot), base[row])
            except Exception as error:  # the user's code may raise anything; only this row fails
                errors[row] = f"logits processor raised {type(error).__name__}: {error}"
    if adjusts:
        ops.sampling.apply_bans(base, windows)
    if features.has_grammar:
        ops.sampling.apply_grammar_mask(base, windows)
    for row, slot in rows:
        if host_processed[slot].bad_word_ids:
            _forbid_words(base[row], host_processed[slot], contexts.before(row, slot))
        if host_processed[slot].params.logits_processors:
            _rescale(base[row])
    return base, errors


class _Contexts:
    """Tokens before the rows of a step; those of a slot are read from the device once."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._tokens: dict[int, tuple[list[int], list[int]]] = {}  # slot -> committed tokens, drafts

    def before(self, row: int, slot: int) -> list[int]:
        """Return a new list of the prompt, the committed output, and the drafts before the row."""
        if slot not in self._tokens:
            columns = self._windows.columns
            committed = columns.tokens[slot, : int(columns.length[slot])].tolist()
            self._tokens[slot] = committed, columns.draft[slot].tolist()
        committed, drafts = self._tokens[slot]
        return committed + drafts[: int(self._windows.depth[row])]


def _run_processors(request: Request, context: list[int], row: Tensor) -> Tensor:
    """Apply the request's logits processors to one row; TypeError if one returns another shape."""
    shape = row.shape
    for function in request.params.logits_processors:
        row = function(context, row.clone())
        if not isinstance(row, Tensor) or row.shape != shape:
            raise TypeError(f"it must return a tensor of shape {tuple(shape)}")
    return row


def _forbid_words(row: Tensor, request: Request, context: list[int]) -> None:
    """Set the last token of each bad word to -inf where the tokens before it are the end of the context."""
    for word in request.bad_word_ids:
        before = list(word[:-1])
        if not before or context[-len(before) :] == before:
            row[word[-1]] = -math.inf


def _rescale(row: Tensor) -> None:
    """Shift a row that would overflow fp32 when divided by a temperature: only differences count."""
    peak = float(row.amax())
    if MAX_LOGIT < abs(peak) < math.inf:
        row -= peak
