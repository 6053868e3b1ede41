"""Guarantee of a verification: which property of the output it keeps. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

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

    def is_lossless(self, greedy: bool) -> bool:
        """Return whether a request with (`greedy`) or without temperature 0 has a lossless output."""
        return self.lossless_greedy if greedy else self.lossless

    def under_policy(self, accept_policy: str) -> Guarantee:
        """Return what is left of the guarantee when `accept_policy` decides which drafts are accepted.

        `reject_all` keeps it: every token is then the strategy's own.
        """
        label = LOSSY_POLICIES.get(accept_policy)
        if label is None:
            return self
        return Guarantee(label, lossless=False, lossless_greedy=False, seed_exact=False)
