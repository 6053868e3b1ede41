"""What the running requests use between them; see `types.StepFeatures`."""

from __future__ import annotations

from collections.abc import Sequence as Many

from draftproof.engine.sequence import Sequence
from draftproof.engine.slots import adjustments
from draftproof.sampling_params import top_of
from draftproof.types import LogitAdjust, LogprobKind, StepFeatures
from draftproof.verify.base import Strategy

TOPS = (0, 8, 32, 64)  # columns of logprobs that are captured; a longer list begins with the shorter one
_NUMBERS: dict[StepFeatures, int] = {}  # those seen so far


def features_of(sequences: Many[Sequence], strategies: Many[Strategy], vocab: int) -> StepFeatures:
    """Who runs changes with every arrival and ending, so each request keeps the number of its own."""
    numbers = {sequence.features_id for sequence in sequences}
    if -1 in numbers:
        for sequence in sequences:
            if sequence.features_id < 0:
                sequence.features_id = _NUMBERS.setdefault(_one(sequence, strategies, vocab), len(_NUMBERS))
        numbers = {sequence.features_id for sequence in sequences}
    return _together([traits for traits, number in _NUMBERS.items() if number in numbers])


def _one(sequence: Sequence, strategies: Many[Strategy], vocab: int) -> StepFeatures:
    params = sequence.request.params
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    looked_at = params.logprobs_mode == "processed" and (
        params.wants_logprobs or params.include_draft_logprobs
    )
    looked_at = looked_at or strategies[sequence.strategy].needs_processed
    top = -1 if sequence.logprob_kind is LogprobKind.NONE else rounded(top_of(params.logprobs, vocab), vocab)
    return StepFeatures(
        strategies=(sequence.strategy,),
        has_adjustments=bool(adjustments(sequence.request) & ~LogitAdjust.MASK)
        or sequence.has_host_processors,
        has_grammar=sequence.request.grammar is not None,
        needs_processed=not params.greedy and (cut or looked_at),
        raw_top=top if sequence.logprob_kind is LogprobKind.RAW else -1,
        processed_top=top if sequence.logprob_kind is LogprobKind.PROCESSED else -1,
        needs_draft_logprobs=params.include_draft_logprobs,
    )


def _together(several: list[StepFeatures]) -> StepFeatures:
    if not several:
        return StepFeatures(strategies=(0,))
    return StepFeatures(
        strategies=tuple(sorted({number for t in several for number in t.strategies})),
        has_adjustments=any(t.has_adjustments for t in several),
        has_grammar=any(t.has_grammar for t in several),
        needs_processed=any(t.needs_processed for t in several),
        raw_top=max(t.raw_top for t in several),
        processed_top=max(t.processed_top for t in several),
        needs_draft_logprobs=any(t.needs_draft_logprobs for t in several),
    )


def rounded(top: int, vocab: int) -> int:
    """Columns to compute for lists of `top`."""
    return min(vocab, next(width for width in TOPS if width >= top))
