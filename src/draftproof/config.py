"""Configuration: frozen, validated once; an unknown key is an error that names the nearest one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, Literal

from draftproof.errors import ConfigError, nearest

AcceptPolicy = Literal["normal", "accept_all", "reject_all", "synthetic"]
DEFAULT_MODEL = "smollm2-135m"
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all", "synthetic")
MAX_SPECULATIVE_TOKENS = 64
_SIZES = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens", "max_num_waiting")

# Other engines' names for the same thing.
_KEY_ALIASES = {
    "max_ngram_size": "prompt_lookup_max",
    "min_ngram_size": "prompt_lookup_min",
    "suffix_decoding_min_token_prob": "min_token_prob",
}
_OPTION_ALIASES = {"gpu_memory_utilization": "memory_utilization"}
_METHOD_ALIASES = {"ngram_match": "ngram", "[ngram]": "ngram"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Who guesses, how far, and who judges. `options` belong to the proposer or the strategy named."""

    method: str
    num_speculative_tokens: int = 5
    verify_strategy: str = "target_match"
    accept_policy: AcceptPolicy = "normal"
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    adaptive: bool = True  # as many drafts as pay, at most so many; False: always so many
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> SpeculativeConfig:
        """From vLLM's or FastDeploy's keys. Keys not known here are left for proposer and strategy."""
        merged = _renamed(value, _KEY_ALIASES, "speculative_config gives")
        if "method" not in merged:
            raise ConfigError("speculative_config needs a 'method', for example 'ngram'")
        merged["method"] = _METHOD_ALIASES.get(str(merged["method"]), str(merged["method"]))
        own = {f.name for f in fields(cls)} - {"options"}
        options = {key: merged.pop(key) for key in list(merged) if key not in own}
        return cls(**merged, options=options)

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be an integer in 1..{MAX_SPECULATIVE_TOKENS}, got {k!r}"
            )
        if not isinstance(self.verify_strategy, str):
            raise ConfigError(f"verify_strategy must be a text, got {self.verify_strategy!r}")
        if self.accept_policy not in ACCEPT_POLICIES:
            raise ConfigError(
                f"unknown accept_policy {self.accept_policy!r}: "
                f"{nearest(str(self.accept_policy), ACCEPT_POLICIES)}"
            )
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"adaptive must be true or false, got {self.adaptive!r}")
        object.__setattr__(self, "synthetic_acceptance_rates", self._rates())

    def _rates(self) -> tuple[float, ...] | None:
        """Acceptance probability of each draft position, given that those before it stood."""
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


def read_speculation(text: str) -> dict[str, Any] | None:
    """`speculative_config` as the command line takes it: a JSON object, or "off"."""
    try:
        found = None if text == "off" else json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from error
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"--speculative-config must be a JSON object or 'off', got {text}")
    return found


def _renamed(given: Mapping[str, Any], aliases: Mapping[str, str], who: str) -> dict[str, Any]:
    """Each under its own name here; ConfigError if two names of one thing say different things."""
    merged: dict[str, Any] = {}
    for key, item in given.items():
        name = aliases.get(key, key)
        if name in merged and merged[name] != item:
            raise ConfigError(f"{who} {name!r} twice: {merged[name]} and {item}")
        merged[name] = item
    return merged


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and low <= value <= high


def _constant_rate(length: float, k: int) -> float:
    """The rate r with 1 + r + r^2 + ... + r^k = length, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(k + 1)) < length:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine is built. Sizes that depend on model or machine are None until resolved."""

    model: str
    tokenizer: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    backend: str = "auto"
    # "fast": whatever is quickest, so a row's bits may hang on its neighbours, and drafts on the result. A
    # backend that has nothing quicker does the same as "exact".
    numerics: Literal["exact", "fast"] = "exact"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    revision: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int = 16
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool = True
    max_num_waiting: int | None = None  # that may queue up for a slot; None: any number
    memory_utilization: float = 0.9  # of a device whose free memory is known, for weights and KV
    max_logprobs: int = 20  # -1: no limit
    seed: int | None = None  # of dummy weights, and of the seeds that requests without one are given
    speculative: SpeculativeConfig | None = None
    warm_up: bool = True  # capture the usual steps at start, where steps are captured at all
    overlap: bool | None = None  # plan a step before the last is read; None: where the device has a queue
    debug: bool = False  # assert the invariants at every step

    @classmethod
    def parse(cls, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """From keyword options as `LLM(...)` takes them."""
        known = {f.name for f in fields(cls)} - {"speculative"} | {"speculative_config"}
        values = _renamed(options, _OPTION_ALIASES, "the options give")
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown option {key!r}: {nearest(key, known)}")
        spec = values.pop("speculative_config", None)
        if isinstance(spec, Mapping):
            spec = SpeculativeConfig.parse(spec)
        elif spec is not None and not isinstance(spec, SpeculativeConfig):
            raise ConfigError(f"speculative_config must be a mapping, got {spec!r}")
        return cls(model=model, speculative=spec, **values)

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        seed = self.seed
        if seed is not None and (
            isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63
        ):
            raise ConfigError(f"seed must be an integer in 0..{2**63 - 1}, got {seed!r}")
        share = self.memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"memory_utilization must lie in 0..1, got {share!r}")
        if self.page_size not in (8, 16, 32, 64):
            raise ConfigError(f"page_size must be 8, 16, 32 or 64, got {self.page_size!r}")
        for name in ("enable_prefix_caching", "warm_up", "overlap", "debug"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "overlap" and value is None):
                raise ConfigError(f"{name} must be true or false, got {value!r}")
        for name in ("device", "backend", "tokenizer", "revision"):
            value = getattr(self, name)
            optional = name in ("tokenizer", "revision")
            if not isinstance(value, (str, PathLike)) and not (optional and value is None):
                raise ConfigError(f"{name} must be a text, got {value!r}")
        for name, allowed in (
            ("dtype", ("auto", "bfloat16", "float32")),
            ("numerics", ("exact", "fast")),
            ("load_format", ("auto", "safetensors", "gguf", "dummy")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if (
            isinstance(self.max_logprobs, bool)
            or not isinstance(self.max_logprobs, int)
            or self.max_logprobs < -1
        ):
            raise ConfigError("max_logprobs must be an integer, -1 for no limit")
