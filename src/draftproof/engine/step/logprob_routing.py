"""Routing of logprobs: which are computed by the device within a step, which by the host afterwards.

Free of torch: HTTP processes need the same decision to decode a step's results.
"""

from __future__ import annotations

from draftproof.sampling_params import SamplingParams, top_of
from draftproof.types import LogprobKind

MAX_DEVICE_TOP = 64  # alternatives that the device lists


def logprob_kind_of(params: SamplingParams, vocab: int) -> LogprobKind:
    """Return the kind of logprobs that the device computes for a request."""
    if not params.wants_logprobs or needs_host_token_logprobs(params, vocab):
        return LogprobKind.NONE
    return LogprobKind.RAW if params.logprobs_mode == "raw" else LogprobKind.PROCESSED


def needs_host_token_logprobs(params: SamplingParams, vocab: int) -> bool:
    """Return whether the host computes the logprobs of a request's tokens."""
    exceeds_device = top_of(params.logprobs, vocab) > MAX_DEVICE_TOP
    return params.wants_logprobs and (exceeds_device or bool(params.logprob_token_ids))


def needs_host_logprobs(params: SamplingParams, vocab: int) -> bool:
    """Return whether the host computes logprobs of tokens or drafts in every step of a request."""
    return needs_host_token_logprobs(params, vocab) or params.include_draft_logprobs
