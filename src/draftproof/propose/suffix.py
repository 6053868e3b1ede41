"""suffix: repeat what followed the longest matches of the last tokens, here and in earlier responses.

Where several places match they vote, and a draft is made as long as it is likely enough to stand: a long
match, or one on which all agree, gives many drafts, a short one few. The search is one op on the device
(`search_suffix`); the host only says what is in the pool, when requests come and go (`propose/pool`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig
from draftproof.ops.contract.draft_search import SuffixOptions
from draftproof.propose import DeviceProposer, ProposerEnv
from draftproof.propose.suffix_pool import Ints, Pool
from draftproof.types import DeviceBatch, Draft, Request


class SuffixProposer(DeviceProposer):
    sources = ("suffix",)
    cheap = True
    learns = True
    extends = True
    defaults = {
        "min_match": 1,  # tokens, in the request's own text
        "doubt": 1.5,  # a draft behind m matched tokens is thought to stand with m / (m + doubt)
        "min_token_prob": 0.15,  # a draft that is reached and stands with less is not made
        "pool_tokens": 1 << 19,  # of earlier responses; 0: none
        "pool_ttl": 3600.0,  # seconds
    }

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self.rule = SuffixOptions(
            _number(self.options, "min_match", 1, 32, whole=True),
            _number(self.options, "doubt", 0.0, 1000.0),
            _number(self.options, "min_token_prob", 0.0, 1.0),
        )
        ttl = _number(self.options, "pool_ttl", 0.0, 1e9)
        self.pool = Pool(env.ops, env.num_slots, _pool_tokens(self.options), ttl)

    @classmethod
    def storage(cls, options: Mapping[str, Any], target: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
        return 0, Pool.size(_pool_tokens({**cls.defaults, **options}))

    def start(self, slot: int, request: Request) -> None:
        self.pool.seat(slot, request.params.cache_salt)

    def learn(self, request: Request, ids: Ints) -> None:
        self.pool.tell(request.params.cache_salt, ids, len(request.prompt_token_ids))

    def prepare(self) -> None:
        self.pool.send()

    def meanwhile(self) -> None:
        self.pool.learn()

    def draft(self, batch: DeviceBatch) -> Draft:
        tokens, count, _ = self.extend(batch, None)
        return Draft(tokens, count)

    def extend(
        self, batch: DeviceBatch, begun: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = batch.columns, batch.slots, batch.budget
        return self.env.ops.search.search_suffix(*given, self.pool.device, self.rule, begun)


def _pool_tokens(options: Mapping[str, Any]) -> int:
    tokens: int = _number(options, "pool_tokens", 0, 1 << 30, whole=True)
    return tokens


def _number(options: Mapping[str, Any], name: str, low: float, high: float, whole: bool = False) -> Any:
    value = options[name]
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        raise ConfigError(f"{name} must be {kind} in {low:g}..{high:g}, got {value!r}")
    return value
