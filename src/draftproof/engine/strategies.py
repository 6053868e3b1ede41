"""Verification strategies of an engine: its own, and others that requests name."""

from __future__ import annotations

import logging
from typing import Any

from draftproof.errors import RequestError, nearest
from draftproof.ops import Ops
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.verify import PLAIN_STRATEGY, STRATEGIES
from draftproof.verify.base import Strategy


class StrategyTable:
    """Strategies by name and by index, built when a request first needs them."""

    def __init__(self, ops: Ops, config: SpeculativeConfig | None, options: dict[str, Any]) -> None:
        """`options`: those of the engine's own strategy."""
        self._ops = ops
        self._config = config
        self._options = options
        self._by_name: dict[str, Strategy] = {}
        self.by_index: list[Strategy] = []  # the sampler holds this list
        self.default_name = config.verify_strategy if config else PLAIN_STRATEGY
        self.get(self.default_name)

    @property
    def default(self) -> Strategy:
        """Return the engine's own strategy."""
        return self._by_name[self.default_name]

    def get(self, name: str) -> Strategy:
        """Return the strategy `name`, building it on the first call."""
        if name not in self._by_name:
            options = self._options if name == self.default_name else {}
            self._by_name[name] = lookup(STRATEGIES, name, "verify_strategy")(self._ops, options)
            self.by_index.append(self._by_name[name])
        return self._by_name[name]

    def name_for(self, params: SamplingParams) -> str:
        """Return the name of a request's strategy; RequestError if the request names an unknown one."""
        speculation = params.speculation
        if speculation.verify_strategy is None:
            # Without speculation a request gets the model's own output, also from a lossy engine.
            return self.default_name if speculation.enabled else PLAIN_STRATEGY
        name = speculation.verify_strategy
        is_known = isinstance(name, str) and (name == self.default_name or name in STRATEGIES)
        if not is_known:  # a request never names code to import
            raise RequestError(
                f"unknown verify_strategy {name!r}: {nearest(str(name), STRATEGIES)}", "speculative"
            )
        return name

    def for_request(self, params: SamplingParams) -> Strategy:
        """Return the strategy of a request with these params."""
        return self.get(self.name_for(params))

    def label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the strategy of a request with its label, and whether its output is lossless."""
        guarantee = self.for_request(params).guarantee()
        if self._config is not None and params.speculation.enabled:  # without drafts no policy applies
            guarantee = guarantee.under_policy(self._config.accept_policy)
        return f"{self.name_for(params)}: {guarantee.label}", guarantee.is_lossless(params.greedy)

    def warn_if_lossy(self) -> None:
        """Log a warning if the engine's configuration changes the output distribution."""
        if self._config is None:
            return
        guarantee = self.default.guarantee().under_policy(self._config.accept_policy)
        if not guarantee.lossless:
            logging.getLogger("draftproof").warning(
                "verify_strategy %r, accept_policy %r: %s",
                self.default_name,
                self._config.accept_policy,
                guarantee.label,
            )


def strategy_option_owner(key: str) -> str | None:
    """Return a hint for an option that belongs to another strategy than the configured one."""
    for name in STRATEGIES:
        if key in lookup(STRATEGIES, name, "verify_strategy").defaults:
            return f"it belongs to verify_strategy {name!r}"
    return None
