"""What the running requests use between them; see `types.Traits`."""

from __future__ import annotations

from collections.abc import Sequence as Many

from draftproof.engine.extras import top_of
from draftproof.engine.scheduler import Sequence
from draftproof.engine.slots import adjustments
from draftproof.types import Traits, Wants
from draftproof.verify import Strategy

TOPS = (0, 8, 32, 64)  # columns of logprobs that are captured; a longer list begins with the shorter one


def traits_of(sequences: Many[Sequence], strategies: Many[Strategy], vocab: int) -> Traits:
    adjusts = scales = False
    tops = {Wants.NONE: -1, Wants.RAW: -1, Wants.PROCESSED: -1}
    for sequence in sequences:
        params = sequence.request.params
        adjusts = adjusts or bool(adjustments(sequence.request)) or sequence.processed_by_host
        cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        looked_at = params.logprobs_mode == "processed" and (
            params.wants_logprobs or params.include_draft_logprobs
        )
        looked_at = looked_at or strategies[sequence.strategy].needs_processed
        scales = scales or (not params.greedy and (cut or looked_at))
        if sequence.wants is not Wants.NONE:
            tops[sequence.wants] = max(tops[sequence.wants], top_of(params.logprobs, vocab))
    judges = {sequence.strategy for sequence in sequences} or {0}
    return Traits(
        strategies=tuple(sorted(judges)),
        adjusts=adjusts,
        scales=scales,
        raw_top=rounded(tops[Wants.RAW], vocab),
        processed_top=rounded(tops[Wants.PROCESSED], vocab),
    )


def rounded(top: int, vocab: int) -> int:
    """Columns to compute for lists of `top`."""
    return -1 if top < 0 else min(vocab, next(width for width in TOPS if width >= top))
