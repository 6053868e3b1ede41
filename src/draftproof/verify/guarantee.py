"""Guarantees of verification: the strategy of a request, and which property of its output that keeps.

Free of torch: HTTP processes validate and label requests as the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.errors import RequestError, nearest
from draftproof.sampling_params import SamplingParams
from draftproof.verify import PLAIN_STRATEGY

# accept_policy -> label of a policy that commits drafts the strategy would reject
LOSSY_POLICIES = {
    "accept_all": "LOSSY: accept_policy 'accept_all' commits every draft; not lossless, not seed-exact",
    "synthetic": "LOSSY: accept_policy 'synthetic' accepts at fixed rates; not lossless, not seed-exact",
}


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Properties of the outputs of one strategy."""

    label: str
    lossless: bool  # the output distribution is the model's, at any temperature
    lossless_greedy: bool  # the same at temperature 0
    seed_exact: bool  # same seed, same tokens as without drafts, at any temperature

    def under_policy(self, accept_policy: str) -> Guarantee:
        """Return what `accept_policy` leaves of the guarantee; `reject_all` keeps it."""
        label = LOSSY_POLICIES.get(accept_policy)
        if label is None:
            return self
        return Guarantee(label, lossless=False, lossless_greedy=False, seed_exact=False)


@dataclass(frozen=True, slots=True)
class StrategyGuarantees:
    """Strategies that requests of an engine may name, with the guarantee of each."""

    by_name: dict[str, Guarantee]
    default: str  # of a request that names none
    accept_policy: str  # of requests with speculation

    def name_for(self, params: SamplingParams) -> str:
        """Return the name of a request's strategy; RequestError if the request names an unknown one."""
        speculation = params.speculation
        name = speculation.verify_strategy
        if name is None:  # without speculation the model's own output, also from a lossy engine
            return self.default if speculation.enabled else PLAIN_STRATEGY
        if not isinstance(name, str) or name not in self.by_name:  # a request never names code to import
            raise RequestError(
                f"unknown verify_strategy {name!r}: {nearest(str(name), self.by_name)}", "speculative"
            )
        return name

    def label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the strategy of a request with its label, and whether its output is lossless."""
        name = self.name_for(params)
        guarantee = self.by_name[name]
        if params.speculation.enabled:  # without drafts no policy applies
            guarantee = guarantee.under_policy(self.accept_policy)
        lossless = guarantee.lossless_greedy if params.greedy else guarantee.lossless
        return f"{name}: {guarantee.label}", lossless
