"""Sources of drafts: the table of proposers by speculative method."""

from draftproof.propose.base import DeviceProposer, Proposer, ProposerEnv

PROPOSERS = {
    "ngram": "draftproof.propose.ngram:NgramProposer",
    "suffix": "draftproof.propose.suffix:SuffixProposer",
    "given": "draftproof.propose.prediction:GivenProposer",
    "mtp": "draftproof.propose.head:MtpProposer",
    "eagle": "draftproof.propose.head:EagleProposer",
    "eagle3": "draftproof.propose.head:Eagle3Proposer",
    "draft_model": "draftproof.propose.draft_model:DraftModelProposer",
    "hybrid": "draftproof.propose.hybrid:HybridProposer",
}

__all__ = ["PROPOSERS", "DeviceProposer", "Proposer", "ProposerEnv"]
