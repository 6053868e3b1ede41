"""Which logprobs a request asked for, and whose business they are: the device's, or the host's."""

from __future__ import annotations

from draftproof.sampling_params import SamplingParams, top_of
from draftproof.types import LogprobKind

TOP = 64  # of the best that the device lists


def logprob_kind_of(params: SamplingParams, vocab: int) -> LogprobKind:
    """What the device computes for a request by itself."""
    if not params.wants_logprobs or by_host(params, vocab):
        return LogprobKind.NONE
    return LogprobKind.RAW if params.logprobs_mode == "raw" else LogprobKind.PROCESSED


def by_host(params: SamplingParams, vocab: int) -> bool:
    """Are the logprobs of its tokens the host's business?"""
    many = top_of(params.logprobs, vocab) > TOP
    return params.wants_logprobs and (many or bool(params.logprob_token_ids))


def needs_host_logprobs(params: SamplingParams, vocab: int) -> bool:
    """Must the host look at every step of it?"""
    return by_host(params, vocab) or params.include_draft_logprobs
