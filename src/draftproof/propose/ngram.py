"""ngram: repeat what followed the last n tokens, the longest n first.

Prompt and output are one sequence, so a match may straddle the boundary between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.propose import DeviceProposer, ProposerEnv, ngram_sizes
from draftproof.types import DeviceBatch, Draft


class NgramProposer(DeviceProposer):
    sources = ("ngram",)
    cheap = True
    defaults = {"prompt_lookup_min": None, "prompt_lookup_max": None}

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self.smallest, self.largest = ngram_sizes(self.options)

    def draft(self, batch: DeviceBatch) -> Draft:
        sizes = self.smallest, self.largest
        return Draft(*self.env.ops.search.search_ngram(batch.columns, batch.slots, batch.budget, *sizes))
