"""What the running requests use between them; see `types.Traits`."""

from __future__ import annotations

from collections.abc import Sequence as Many

from draftproof.engine.sequence import Sequence
from draftproof.engine.slots import adjustments
from draftproof.sampling_params import top_of
from draftproof.types import Adjust, Traits, Wants
from draftproof.verify import Strategy

TOPS = (0, 8, 32, 64)  # columns of logprobs that are captured; a longer list begins with the shorter one
_NUMBERS: dict[Traits, int] = {}  # those seen so far


def traits_of(sequences: Many[Sequence], strategies: Many[Strategy], vocab: int) -> Traits:
    """Who runs changes with every arrival and ending, so each request keeps the number of its own."""
    numbers = {sequence.traits for sequence in sequences}
    if -1 in numbers:
        for sequence in sequences:
            if sequence.traits < 0:
                sequence.traits = _NUMBERS.setdefault(_one(sequence, strategies, vocab), len(_NUMBERS))
        numbers = {sequence.traits for sequence in sequences}
    return _together([traits for traits, number in _NUMBERS.items() if number in numbers])


def _one(sequence: Sequence, strategies: Many[Strategy], vocab: int) -> Traits:
    params = sequence.request.params
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    looked_at = params.logprobs_mode == "processed" and (
        params.wants_logprobs or params.include_draft_logprobs
    )
    looked_at = looked_at or strategies[sequence.strategy].needs_processed
    top = -1 if sequence.wants is Wants.NONE else rounded(top_of(params.logprobs, vocab), vocab)
    return Traits(
        strategies=(sequence.strategy,),
        adjusts=bool(adjustments(sequence.request) & ~Adjust.MASK) or sequence.processed_by_host,
        masks=sequence.request.grammar is not None,
        scales=not params.greedy and (cut or looked_at),
        raw_top=top if sequence.wants is Wants.RAW else -1,
        processed_top=top if sequence.wants is Wants.PROCESSED else -1,
        drafts=params.include_draft_logprobs,
    )


def _together(several: list[Traits]) -> Traits:
    if not several:
        return Traits(strategies=(0,))
    return Traits(
        strategies=tuple(sorted({number for t in several for number in t.strategies})),
        adjusts=any(t.adjusts for t in several),
        masks=any(t.masks for t in several),
        scales=any(t.scales for t in several),
        raw_top=max(t.raw_top for t in several),
        processed_top=max(t.processed_top for t in several),
        drafts=any(t.drafts for t in several),
    )


def rounded(top: int, vocab: int) -> int:
    """Columns to compute for lists of `top`."""
    return min(vocab, next(width for width in TOPS if width >= top))
