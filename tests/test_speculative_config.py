"""Keys of other engines in speculative_config: mapped, or refused with advice."""

from __future__ import annotations

import pytest

from draftproof.errors import ConfigError
from draftproof.speculative_config import REFUSED_KEYS, SpeculativeConfig


def test_fastdeploy_keys_are_mapped() -> None:
    parse = SpeculativeConfig.parse
    assert parse({"method": "naive"}) is None
    benchmark = parse({"method": "ngram_match", "benchmark_mode": True, "enable_draft_logprob": True})
    assert benchmark is not None and (benchmark.method, benchmark.accept_policy) == ("ngram", "reject_all")
    assert not benchmark.adaptive
    steps = parse({"method": "mtp", "num_model_steps": 3})
    assert steps is not None and (steps.method, steps.num_speculative_tokens) == ("mtp", 3)
    keys = {"num_speculative_tokens": 5, "num_model_steps": 2, "model": "head", "max_ngram_size": 4}
    hybrid = parse({"method": "mtp", "mtp_strategy": "with_ngram", **keys})
    assert hybrid is not None and (hybrid.method, hybrid.num_speculative_tokens) == ("hybrid", 5)
    assert hybrid.options["proposers"] == [
        {"method": "mtp", "num_speculative_tokens": 2, "model": "head"},
        {"method": "ngram", "prompt_lookup_max": 4},
    ]


def test_keys_of_other_engines_work_in_hybrid_members() -> None:
    members = [{"method": "ngram_match", "max_ngram_size": 4, "min_ngram_size": 3}, {"method": "suffix"}]
    config = SpeculativeConfig.parse({"method": "hybrid", "proposers": members})
    assert config is not None
    lengths = {"prompt_lookup_max": 4, "prompt_lookup_min": 3}
    assert config.options["proposers"][0] == {"method": "ngram", **lengths}


@pytest.mark.parametrize("key", sorted(REFUSED_KEYS))
def test_keys_without_counterpart_are_refused_with_advice(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is not supported: .+"):
        SpeculativeConfig.parse({"method": "suffix", key: 1})
    with pytest.raises(ConfigError, match=key):
        SpeculativeConfig.parse({"method": "hybrid", "proposers": [{"method": "suffix", key: 1}]})


@pytest.mark.parametrize(
    "keys",
    [
        {"mtp_strategy": "tree"},
        {"num_model_steps": 0},
        {"method": "ngram", "num_model_steps": 2},
        {"benchmark_mode": 1},
        {"benchmark_mode": True, "accept_policy": "accept_all"},
        {"enable_draft_logprob": "yes"},
    ],
)
def test_wrong_values_of_mapped_keys_are_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SpeculativeConfig.parse({"method": "mtp", **keys})


@pytest.mark.parametrize(
    ("policy", "adaptive"), [("normal", True), ("accept_all", True), ("reject_all", False)]
)
def test_policies_that_measure_rejections_fix_the_drafts(policy: str, adaptive: bool) -> None:
    """Check that adaptive drafts are off by default where every draft must be verified."""
    made = SpeculativeConfig.parse({"method": "ngram", "accept_policy": policy})
    assert made is not None and made.adaptive is adaptive
    synthetic = {"method": "ngram", "accept_policy": "synthetic", "synthetic_acceptance_length": 2}
    made = SpeculativeConfig.parse(synthetic)
    assert made is not None and not made.adaptive
    made = SpeculativeConfig.parse({**synthetic, "adaptive": True})
    assert made is not None and made.adaptive
