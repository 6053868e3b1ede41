"""Verification of drafts: the table of strategies. `base` has the contract of a strategy."""

from __future__ import annotations

STRATEGIES = {
    "target_match": "draftproof.verify.target_match:TargetMatch",
    "greedy": "draftproof.verify.greedy:Greedy",
    "rejection": "draftproof.verify.rejection:Rejection",
    "topp": "draftproof.verify.topp_acceptance:TopP",
}
PLAIN_STRATEGY = "target_match"  # plain sampling when a request has no drafts
