"""Configuration of speculative decoding, in the keys of vLLM and FastDeploy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from draftproof.errors import ConfigError, nearest

AcceptPolicy = Literal["normal", "accept_all", "reject_all", "synthetic"]
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all", "synthetic")
FIXED_DRAFT_POLICIES = ("reject_all", "synthetic")  # measurements that need every draft to be verified
MAX_SPECULATIVE_TOKENS = 64

# Names of other engines for the same key or method.
KEY_ALIASES = {
    "max_ngram_size": "prompt_lookup_max",
    "min_ngram_size": "prompt_lookup_min",
    "suffix_decoding_min_token_prob": "min_token_prob",
}
METHOD_ALIASES = {
    "ngram_match": "ngram",
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    "deepseek_mtp": "mtp",
    "ernie_mtp": "mtp",
    "mimo_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
DISABLED_METHODS = ("naive", "none")  # methods that mean plain decoding
# Keys of other engines without a counterpart, and what to do instead.
REFUSED_KEYS = {
    "suffix_decoding_max_cached_requests": "the pool is bounded by tokens: set pool_tokens (0: no pool)",
    "suffix_decoding_max_tree_depth": "the suffix search has no tree; leave the key out",
    "suffix_decoding_max_spec_factor": "match_prior and min_token_prob limit the drafts of a match",
    "num_gpu_block_expand_ratio": "a draft head stores its KV on the engine's pages; leave the key out",
    "quantization": "a draft head is read in the format of its own weights; leave the key out",
    "kv_cache_dtype": "a drafter stores K and V as the engine's kv_cache_dtype defines; leave the key out",
    "enf_gen_phase_tag": "use structured_outputs with reasoning_end in the request",
    "num_speculative_tokens_per_batch_size": "adaptive (the default) chooses drafts per request and step",
    "enable_adaptive_verification": "adaptive (the default) chooses drafts per request and step",
    "draft_tensor_parallel_size": "drafts run on the device of the target; leave the key out",
    "use_heterogeneous_vocab": "a draft model needs the vocabulary of its target",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Proposer, number of drafts and verification. `options` belong to the proposer or the strategy."""

    method: str
    num_speculative_tokens: int = 5
    verify_strategy: str = "target_match"
    accept_policy: AcceptPolicy = "normal"
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    # True: choose the number of drafts by acceptance and step cost, up to num_speculative_tokens.
    # False: always num_speculative_tokens. None: True, or False for the policies that measure rejections.
    adaptive: bool = None  # type: ignore[assignment]
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> SpeculativeConfig | None:
        """Read a mapping in the keys of vLLM or FastDeploy; None if its method is plain decoding.

        Unknown keys are left for the proposer and the strategy, which refuse what they do not know.
        """
        merged = translate(value)
        if "method" not in merged:
            raise ConfigError("speculative_config needs a 'method', for example 'ngram'")
        if merged["method"] in DISABLED_METHODS:
            return None
        own = {f.name for f in fields(cls)} - {"options"}
        options = {key: merged.pop(key) for key in list(merged) if key not in own}
        return cls(**merged, options=options)

    def __post_init__(self) -> None:
        """Check every field and resolve `adaptive` and the acceptance rates."""
        check_number("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if not isinstance(self.verify_strategy, str):
            raise ConfigError(f"verify_strategy must be a string, got {self.verify_strategy!r}")
        if self.accept_policy not in ACCEPT_POLICIES:
            raise ConfigError(
                f"unknown accept_policy {self.accept_policy!r}: "
                f"{nearest(str(self.accept_policy), ACCEPT_POLICIES)}"
            )
        if self.adaptive is None:
            object.__setattr__(self, "adaptive", self.accept_policy not in FIXED_DRAFT_POLICIES)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"adaptive must be true or false, got {self.adaptive!r}")
        object.__setattr__(self, "synthetic_acceptance_rates", self._rates())

    def _rates(self) -> tuple[float, ...] | None:
        """Return the acceptance probability of each draft position, given that those before were accepted."""
        length, rates = self.synthetic_acceptance_length, self.synthetic_acceptance_rates
        k = self.num_speculative_tokens
        if self.accept_policy != "synthetic":
            if length is not None or rates is not None:
                raise ConfigError("synthetic_acceptance_* needs accept_policy='synthetic'")
            return None
        if (length is None) == (rates is None):
            raise ConfigError(
                "accept_policy='synthetic' needs either synthetic_acceptance_length or "
                "synthetic_acceptance_rates"
            )
        if rates is not None:
            if not isinstance(rates, Sequence) or len(rates) != k or any(not _within(r, 0, 1) for r in rates):
                raise ConfigError(f"synthetic_acceptance_rates must be {k} numbers in 0..1")
            return tuple(float(r) for r in rates)
        assert length is not None
        if not _within(length, 1, k + 1):
            raise ConfigError(f"synthetic_acceptance_length must lie in 1..{k + 1}, got {length}")
        return (_constant_rate(float(length), k),) * k


def translate(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping in the keys of this project, members of a hybrid included.

    Raise ConfigError for a key of another engine that has no counterpart, with what to do instead.
    """
    for key in value:
        if key in REFUSED_KEYS:
            raise ConfigError(f"speculative_config: {key!r} is not supported: {REFUSED_KEYS[key]}")
    merged = merge_aliases(value, KEY_ALIASES, "speculative_config gives")
    if "method" in merged:
        merged["method"] = METHOD_ALIASES.get(str(merged["method"]), str(merged["method"]))
    _translate_benchmark_mode(merged)
    if not isinstance(merged.pop("enable_draft_logprob", False), bool):
        raise ConfigError("enable_draft_logprob must be true or false")  # draft logprobs are always available
    _translate_model_steps(merged)
    members = merged.get("proposers")
    if isinstance(members, Sequence) and not isinstance(members, str):
        merged["proposers"] = [translate(m) if isinstance(m, Mapping) else m for m in members]
    return merged


def _translate_benchmark_mode(merged: dict[str, Any]) -> None:
    """Replace FastDeploy's benchmark_mode by the accept policy of the same meaning."""
    mode = merged.pop("benchmark_mode", False)
    if not isinstance(mode, bool):
        raise ConfigError(f"benchmark_mode must be true or false, got {mode!r}")
    if mode and merged.setdefault("accept_policy", "reject_all") != "reject_all":
        raise ConfigError("benchmark_mode means accept_policy='reject_all': leave one of the two out")


def _translate_model_steps(merged: dict[str, Any]) -> None:
    """Replace FastDeploy's mtp_strategy and num_model_steps by a hybrid or a number of drafts."""
    strategy, steps = merged.pop("mtp_strategy", "default"), merged.pop("num_model_steps", None)
    if strategy not in ("default", "with_ngram"):
        raise ConfigError(f"mtp_strategy must be 'default' or 'with_ngram', got {strategy!r}")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ConfigError(f"num_model_steps must be a positive integer, got {steps!r}")
    if strategy == "default" and steps is None:
        return
    if merged.get("method") != "mtp":
        raise ConfigError("mtp_strategy and num_model_steps belong to method 'mtp'")
    count = merged.get("num_speculative_tokens", steps or 5)
    if isinstance(count, int) and steps is not None:
        count = max(count, steps)
    merged["num_speculative_tokens"] = count
    if strategy == "default":
        return
    head: dict[str, Any] = {"method": "mtp"}
    search: dict[str, Any] = {"method": "ngram"}
    if steps is not None:
        head["num_speculative_tokens"] = steps
    for member, keys in ((head, ("model", "draft_sampling")), (search, tuple(KEY_ALIASES.values())[:2])):
        member.update({key: merged.pop(key) for key in keys if key in merged})
    merged.update(method="hybrid", proposers=[head, search])


def read_speculation(text: str) -> dict[str, Any] | None:
    """Read `--speculative-config`: a JSON object, or "off"."""
    try:
        found = None if text == "off" else json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from error
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"--speculative-config must be a JSON object or 'off', got {text}")
    return found


def merge_aliases(given: Mapping[str, Any], aliases: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """Return the values under the names used here; ConfigError if two names of one key differ."""
    merged: dict[str, Any] = {}
    for key, item in given.items():
        name = aliases.get(key, key)
        if name in merged and merged[name] != item:
            raise ConfigError(f"{prefix} {name!r} twice: {merged[name]} and {item}")
        merged[name] = item
    return merged


def check_number(name: str, value: Any, low: float, high: float, whole: bool = True) -> Any:
    """Return the value of an option; ConfigError if it is not a number in low..high."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        raise ConfigError(f"{name} must be {kind} in {low:g}..{high:g}, got {value!r}")
    return value


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and low <= value <= high


def _constant_rate(length: float, k: int) -> float:
    """Return the rate r with 1 + r + r^2 + ... + r^k = length, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(k + 1)) < length:
            low = middle
        else:
            high = middle
    return high
