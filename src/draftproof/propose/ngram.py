"""n-gram proposer (prompt lookup): the tokens that followed the last n tokens before, longest n first.

Prompt and output are one sequence, so a match may lie across the boundary between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.errors import ConfigError
from draftproof.propose.base import DeviceProposer, ProposerEnv
from draftproof.speculative_config import check_number
from draftproof.types import DeviceBatch, Draft

MATCH_OPTIONS: Mapping[str, Any] = {"prompt_lookup_min": None, "prompt_lookup_max": None}
MAX_MATCH_TOKENS = 64
DEFAULT_MIN_MATCH_TOKENS = 2
DEFAULT_MAX_MATCH_TOKENS = 16  # of an edited copy, fewer often match at another place of the same file


class NgramProposer(DeviceProposer):
    """Prompt lookup on the device."""

    sources = ("ngram",)
    is_free = True
    defaults = MATCH_OPTIONS

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self.min_match, self.max_match = match_lengths(self.options)

    def draft(self, batch: DeviceBatch) -> Draft:
        """Return the continuation of the longest match."""
        tokens, count, matched = self.env.ops.search.search_ngram(batch, self.min_match, self.max_match)
        return Draft(tokens, count, matched=matched)


def match_lengths(options: Mapping[str, Any]) -> tuple[int, int]:
    """Return the shortest and longest match from prompt_lookup_min and prompt_lookup_max."""
    low, high = options["prompt_lookup_min"], options["prompt_lookup_max"]
    for name, value in (("prompt_lookup_min", low), ("prompt_lookup_max", high)):
        if value is not None:
            check_number(name, value, 1, MAX_MATCH_TOKENS)
    high = high if high is not None else max(DEFAULT_MAX_MATCH_TOKENS, low or 0)
    low = low if low is not None else min(DEFAULT_MIN_MATCH_TOKENS, high)
    if low > high:
        raise ConfigError(f"prompt_lookup_min ({low}) is above prompt_lookup_max ({high})")
    return low, high
