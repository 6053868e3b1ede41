"""Features that the running requests need between them: the key of a captured step (`types.StepFeatures`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Many

from draftproof.engine.sequence import Sequence
from draftproof.engine.slots import adjustments
from draftproof.sampling_params import SamplingParams, top_of
from draftproof.types import LogitAdjust, LogprobKind, StepFeatures
from draftproof.verify.base import Strategy

LOGPROB_WIDTHS = (0, 8, 32, 64)  # alternatives that are captured; a longer list begins with the shorter one
_FEATURE_IDS: dict[StepFeatures, int] = {}  # numbers of all features seen so far


def features_of(sequences: Many[Sequence], strategies: Many[Strategy], vocab: int) -> StepFeatures:
    """Return the union of the features of `sequences`, each of which caches the number of its own."""
    ids = {sequence.features_id for sequence in sequences}
    if -1 in ids:
        for sequence in sequences:
            if sequence.features_id < 0:
                own = _features_of_one(sequence, strategies, vocab)
                sequence.features_id = _FEATURE_IDS.setdefault(own, len(_FEATURE_IDS))
        ids = {sequence.features_id for sequence in sequences}
    return _union([features for features, number in _FEATURE_IDS.items() if number in ids])


def _features_of_one(sequence: Sequence, strategies: Many[Strategy], vocab: int) -> StepFeatures:
    params, kind = sequence.request.params, sequence.logprob_kind
    truncates = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    has_logprobs = params.needs_logprobs or params.include_draft_logprobs
    reads_processed = params.logprobs_mode == "processed" and has_logprobs
    reads_processed = reads_processed or strategies[sequence.strategy].needs_processed
    top = -1 if kind is LogprobKind.NONE else logprob_width(top_of(params.logprobs, vocab), vocab)
    named = named_width(len(params.logprob_token_ids or ()))
    draft_kind = sequence.draft_kind
    has_flags = adjustments(sequence.request) not in (0, LogitAdjust.MASK)
    return StepFeatures(
        strategies=(sequence.strategy,),
        has_adjustments=has_flags or sequence.has_host_processors,
        has_grammar=sequence.request.grammar is not None,
        needs_processed=not params.greedy and (truncates or reads_processed),
        raw_top=top if kind is LogprobKind.RAW else -1,
        processed_top=top if kind is LogprobKind.PROCESSED else -1,
        raw_named=named if kind is LogprobKind.RAW else 0,
        processed_named=named if kind is LogprobKind.PROCESSED else 0,
        has_raw_drafts=draft_kind is LogprobKind.RAW,
        has_processed_drafts=draft_kind is LogprobKind.PROCESSED,
        draft_top=0 if draft_kind is LogprobKind.NONE else logprob_width(sequence.draft_top, vocab),
    )


def _union(several: list[StepFeatures]) -> StepFeatures:
    if not several:
        return StepFeatures(strategies=(0,))
    strategies, *others = zip(*several, strict=True)
    return StepFeatures(tuple(sorted({number for one in strategies for number in one})), *map(max, others))


def draft_top(params: SamplingParams, vocab: int) -> int:
    """Return the number of the drafter's likeliest tokens that a request reports with its drafts."""
    return min(top_of(params.logprobs, vocab), LOGPROB_WIDTHS[-1])


def named_width(count: int) -> int:
    """Return the number of named ids that a step is captured for: a power of two."""
    return 1 << (count - 1).bit_length() if count else 0


def logprob_width(top: int, vocab: int) -> int:
    """Return the number of alternatives to compute for lists of `top`."""
    return min(vocab, LOGPROB_WIDTHS[bisect_left(LOGPROB_WIDTHS, top)])
