"""Suffix proposer: what followed the longest matches of the last tokens, here and in earlier outputs.

Several matches vote for the next token, and drafts are made while they are likely enough to be accepted: a
long match, or one on which all agree, gives many drafts, a short one few. The search is one op on the device
(`Ops.search_suffix`); the host decides what is in the pool of earlier outputs (`suffix_pool`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftproof.array_types import Ints
from draftproof.models.config import ModelConfig
from draftproof.ops.contract.draft_search import SuffixOptions
from draftproof.propose.base import DeviceProposer, ProposerEnv
from draftproof.propose.suffix_pool import Pool
from draftproof.speculative_config import check_number
from draftproof.types import DeviceBatch, Draft, Request


class SuffixProposer(DeviceProposer):
    """Suffix decoding on the device."""

    sources = ("suffix",)
    is_free = True
    learns = True
    can_extend = True
    defaults = {
        "min_match": 1,  # tokens, in the request's own text
        "match_prior": 1.5,  # a draft behind m matched tokens has the probability m / (m + match_prior)
        "min_token_prob": 0.15,  # probability to be reached and accepted; a less likely draft is not made
        "pool_tokens": 1 << 19,  # tokens of earlier outputs; 0: none
        "pool_ttl": 3600.0,  # seconds
    }

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self.rule = SuffixOptions(
            check_number("min_match", self.options["min_match"], 1, 32),
            check_number("match_prior", self.options["match_prior"], 0.0, 1000.0, whole=False),
            check_number("min_token_prob", self.options["min_token_prob"], 0.0, 1.0, whole=False),
        )
        ttl = check_number("pool_ttl", self.options["pool_ttl"], 0.0, 1e9, whole=False)
        self.pool = Pool(env.ops, env.num_slots, _pool_tokens(self.options), ttl)

    @classmethod
    def storage(
        cls,
        options: Mapping[str, Any],
        target: ModelConfig,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> tuple[int, int]:
        """Return the bytes of the pool."""
        return 0, Pool.size(_pool_tokens({**cls.defaults, **options}))

    def start(self, slot: int, request: Request) -> None:
        """Set the owner of the slot."""
        self.pool.set_owner(slot, request.params.cache_salt)

    def learn(self, request: Request, ids: Ints) -> None:
        """Add the output of a finished request to the pool."""
        self.pool.add(request.params.cache_salt, ids, len(request.prompt_token_ids))

    def forget(self) -> None:
        """Empty the pool."""
        self.pool.clear()

    def prepare(self) -> None:
        """Send changes of the pool to the device."""
        self.pool.send()

    def do_idle_work(self) -> None:
        """Store outputs that were added to the pool."""
        self.pool.store()

    def draft(self, batch: DeviceBatch) -> Draft:
        """Return the drafts of a search from the committed tokens."""
        tokens, count, _ = self.extend(batch, None)
        return Draft(tokens, count)

    def extend(
        self, batch: DeviceBatch, begun: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the drafts of a search from the committed tokens and the drafts in `begun`."""
        return self.env.ops.search.search_suffix(batch, self.pool.device, self.rule, begun)


def _pool_tokens(options: Mapping[str, Any]) -> int:
    return int(check_number("pool_tokens", options["pool_tokens"], 0, 1 << 30))
