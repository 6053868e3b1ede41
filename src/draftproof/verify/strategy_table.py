"""Verification strategies of an engine: its own, and others that requests name."""

from __future__ import annotations

import logging
from typing import Any

from draftproof.ops import Ops
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.verify import PLAIN_STRATEGY, STRATEGIES
from draftproof.verify.base import Strategy
from draftproof.verify.guarantee import StrategyGuarantees


class StrategyTable:
    """Strategies by name and by index, built when a request first needs them."""

    def __init__(self, ops: Ops, config: SpeculativeConfig | None, options: dict[str, Any]) -> None:
        """`options`: those of the engine's own strategy."""
        self._ops = ops
        self._options = options
        self._by_name: dict[str, Strategy] = {}
        self.by_index: list[Strategy] = []  # the sampler holds this list
        default = config.verify_strategy if config else PLAIN_STRATEGY
        kinds = {name: lookup(STRATEGIES, name, "verify_strategy") for name in (*STRATEGIES, default)}
        self.guarantees = StrategyGuarantees(
            {name: kind.guarantee() for name, kind in kinds.items()},
            default,
            config.accept_policy if config else "normal",
        )
        self.default = self._get(default)

    def _get(self, name: str) -> Strategy:
        if name not in self._by_name:
            options = self._options if name == self.guarantees.default else {}
            self._by_name[name] = lookup(STRATEGIES, name, "verify_strategy")(self._ops, options)
            self.by_index.append(self._by_name[name])
        return self._by_name[name]

    def for_request(self, params: SamplingParams) -> Strategy:
        """Return the strategy of a request; RequestError if the request names an unknown one."""
        return self._get(self.guarantees.name_for(params))

    def warn_if_lossy(self) -> None:
        """Log a warning if the engine's configuration changes the output distribution."""
        name, policy = self.guarantees.default, self.guarantees.accept_policy
        guarantee = self.guarantees.by_name[name].under_policy(policy)
        if not guarantee.lossless:
            text = "verify_strategy %r, accept_policy %r: %s"
            logging.getLogger("draftproof").warning(text, name, policy, guarantee.label)


def strategy_option_owner(key: str) -> str | None:
    """Return a hint for an option that belongs to another strategy than the configured one."""
    for name in STRATEGIES:
        if key in lookup(STRATEGIES, name, "verify_strategy").defaults:
            return f"it belongs to verify_strategy {name!r}"
    return None
