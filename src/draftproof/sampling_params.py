"""SamplingParams: options of one request, validated once. Names and defaults are those of vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from draftproof.errors import RequestError, nearest
from draftproof.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from torch import Tensor

# tokens so far (prompt, output and the drafts before this row), logits [vocab] -> logits [vocab]
LogitsProcessor = Callable[[Sequence[int], "Tensor"], "Tensor"]
LogprobsMode = Literal["raw", "processed"]

PYTHON_OPTIONS = {"logits_processors", "detokenize", "truncate_prompt_tokens"}  # not sent over HTTP
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)  # a negative seed is taken modulo 2**63
FRESH_SEED = -1  # no seed: a fresh one, as in vLLM and llama.cpp
MIN_TEMPERATURE = 1e-5  # less means greedy, as in vLLM: logits divided by less would overflow
MAX_VALUE = 1e6  # of a temperature, a repetition penalty, a bias: logits still fit fp32 with it
MAX_LOGIT = 1e30  # divided by any temperature it still fits fp32


@dataclass(frozen=True, slots=True)
class SpeculativeParams:
    """Speculation options of one request; None keeps the engine's own."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    verify_strategy: str | None = None
    adaptive: bool | None = None  # False: always `num_speculative_tokens` drafts

    @classmethod
    def parse(cls, value: SpeculativeParams | dict[str, Any] | bool | None) -> SpeculativeParams:
        """Read the value of `speculative`; True or False switch speculation on or off."""
        if value is None or isinstance(value, bool):
            return cls(enabled=value is not False)
        if isinstance(value, SpeculativeParams):
            return value
        if not isinstance(value, dict):
            raise RequestError(f"speculative must be a bool or a dict, not {value!r}", "speculative")
        known = {f.name for f in fields(cls)}
        for key in value:
            if key not in known:
                raise RequestError(
                    f"unknown key {key!r} in speculative: {nearest(key, known)}", "speculative"
                )
        return cls(**value)

    def __post_init__(self) -> None:
        for name in ("enabled", "adaptive"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name == "enabled"):
                raise RequestError(f"speculative: {name} must be true or false, not {value!r}", "speculative")
        given = [name for name in ("num_speculative_tokens", "adaptive") if getattr(self, name) is not None]
        if not self.enabled and given:
            raise RequestError(
                f"speculative: {given[0]} has no effect without drafts; leave it out or set enabled to true",
                "speculative",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request, frozen and valid once built. An unknown name raises TypeError."""

    n: int = field(default=1, kw_only=False)  # vLLM's first field, also by position
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    max_tokens: int | None = 16  # 0 with prompt_logprobs: no output
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: outputs have token ids and no text
    truncate_prompt_tokens: int | None = None  # keep the last k tokens; -1: as many as the model can take
    # None: no logprobs; 0: of the sampled token; k: and of the k best; -1: of the whole vocabulary
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logprobs_mode: LogprobsMode = "raw"
    include_draft_logprobs: bool = False
    speculative: SpeculativeParams | dict[str, Any] | bool | None = None
    prediction: str | Sequence[int] | None = None  # expected output, drafted where it continues the output
    structured_outputs: StructuredOutputs | dict[str, Any] | None = None  # format of the output
    thinking_token_budget: int | None = None  # reasoning tokens, then its end is forced
    priority: int = 0  # smaller ones are scheduled first
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    # options of vLLM that are checked and not stored
    best_of: InitVar[int | None] = None
    spaces_between_special_tokens: InitVar[bool] = True

    def __post_init__(self, best_of: int | None, spaces_between_special_tokens: bool) -> None:
        """Check every option and convert sequences and numbers to plain tuples and numbers."""
        for name in (*_RANGES, *_INTEGERS):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        for name, (low, high) in _RANGES.items():
            _check_number(name, getattr(self, name), low, high)
        for name, minimum in _INTEGERS.items():
            _check_integer(name, getattr(self, name), minimum)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        if self.seed is not None and not MIN_SEED <= self.seed <= MAX_SEED:
            raise RequestError(f"seed must lie in {MIN_SEED}..{MAX_SEED}, got {self.seed}", "seed")
        if self.seed is not None and self.seed < 0:
            object.__setattr__(self, "seed", None if self.seed == FRESH_SEED else self.seed & MAX_SEED)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            text = f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
            raise RequestError(text, "min_tokens")
        self._check_vllm_options(best_of, spaces_between_special_tokens)
        if self.logprobs_mode not in ("raw", "processed"):
            raise RequestError("logprobs_mode must be 'raw' or 'processed'", "logprobs_mode")
        if self.logprob_token_ids is not None and self.logprobs:
            raise RequestError(
                "logprob_token_ids names the tokens itself: leave logprobs unset or 0", "logprob_token_ids"
            )
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise RequestError("cache_salt must be a non-empty string", "cache_salt")
        self._freeze()

    def _check_vllm_options(self, best_of: int | None, spaces_between_special_tokens: bool) -> None:
        """Refuse values that are not honoured, and combinations without an effect."""
        if best_of is not None and best_of != self.n:
            text = "set n, and choose among the outputs by cumulative_logprob (logprobs=0)"
            raise RequestError(f"best_of={best_of!r} is not supported: {text}", "best_of")
        if not isinstance(spaces_between_special_tokens, bool):
            name = "spaces_between_special_tokens"  # has no effect on a tokenizer.json or GGUF tokenizer
            raise RequestError(f"{name} must be true or false", name)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens must be at least 1, unless prompt_logprobs is set", "max_tokens")
        if self.max_tokens == 0 and self.n != 1:
            raise RequestError("max_tokens=0 returns no output: leave n at 1", "n")
        if not self.detokenize and self.stop:
            raise RequestError("stop needs the text of the output: leave detokenize true", "detokenize")
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be positive or -1", "truncate_prompt_tokens")

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy, with `changes` applied: the options of an instance cannot be assigned."""
        return replace(self, **changes)

    def _freeze(self) -> None:
        put = object.__setattr__
        for name in (*_LISTS, *_ID_LISTS):
            value = getattr(self, name)
            is_text = isinstance(value, str) and name != "stop"
            if value is None and name in _LISTS:  # "not given" in vLLM
                put(self, name, ())
            elif value is not None and (is_text or not isinstance(value, Iterable)):
                raise RequestError(f"{name} must be a list, got {value!r}", name)
        put(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in _LISTS[1:]:
            put(self, name, tuple(map(plain_number, getattr(self, name))))
        for name in ("stop", "bad_words"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise RequestError(f"{name} must hold non-empty strings", name)
        for name in _ID_LISTS:
            if getattr(self, name) is not None:
                try:
                    put(self, name, tuple(dict.fromkeys(map(plain_number, getattr(self, name)))))
                except TypeError as error:  # a list in it
                    raise RequestError(f"{name} must hold integers: {error}", name) from error
                if not getattr(self, name):
                    raise RequestError(f"{name} is empty; leave it out instead", name)
        if self.prediction is not None and not isinstance(self.prediction, str):
            if not isinstance(self.prediction, Iterable) or isinstance(self.prediction, (bytes, bytearray)):
                text = f"prediction must be a text or a list of ids, got {self.prediction!r}"
                raise RequestError(text, "prediction")
            put(self, "prediction", tuple(map(plain_number, self.prediction)))
        if any(not callable(f) for f in self.logits_processors):
            raise RequestError("logits_processors must be functions", "logits_processors")
        try:
            given = {} if self.logit_bias is None else self.logit_bias
            bias = {_token_id(k): float(v) for k, v in given.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise RequestError("logit_bias must map token ids to numbers", "logit_bias") from error
        if any(math.isnan(v) or v > MAX_VALUE for v in bias.values()):
            raise RequestError(
                f"logit_bias values must be at most {MAX_VALUE:g} (-inf forbids)", "logit_bias"
            )
        put(self, "logit_bias", {k: max(v, -MAX_LOGIT) if v > -math.inf else v for k, v in bias.items()})
        put(self, "top_k", min(max(self.top_k, 0), MAX_SEED))
        put(self, "speculative", SpeculativeParams.parse(self.speculative))
        put(self, "structured_outputs", StructuredOutputs.parse(self.structured_outputs))

    @property
    def speculation(self) -> SpeculativeParams:
        """Return the parsed options of `speculative`."""
        assert isinstance(self.speculative, SpeculativeParams)
        return self.speculative

    @property
    def structure(self) -> StructuredOutputs | None:
        """`structured_outputs`, parsed."""
        return StructuredOutputs.parse(self.structured_outputs)

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar constrains the output: `structured_outputs` or a thinking budget."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def needs_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    def token_id_options(self) -> dict[str, Sequence[int]]:
        """Return the token ids of every option, for one range check against the vocabulary."""
        end = self.structure.reasoning_end if self.structure else None
        return {
            "structured_outputs": (end,) if isinstance(end, int) else (),
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
            "logprob_token_ids": self.logprob_token_ids or (),
        }


_RANGES = {
    "temperature": (0.0, MAX_VALUE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1 / MAX_VALUE, MAX_VALUE),
}
_SWITCHES = (
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "include_draft_logprobs"),
    "detokenize",
)
_LISTS = ("stop", "bad_words", "stop_token_ids", "logits_processors")
_ID_LISTS = ("allowed_token_ids", "logprob_token_ids")  # None: the option is off
_OPTIONAL_INTEGERS = (
    *("max_tokens", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens"),
    "thinking_token_budget",
)
_INTEGERS: dict[str, int | None] = {"n": 1, "top_k": -1, "min_tokens": 0, "max_tokens": 0}  # smallest values
_INTEGERS |= {
    "logprobs": -1,
    "prompt_logprobs": -1,
    "seed": None,
    "priority": None,
    "truncate_prompt_tokens": -1,
    "thinking_token_budget": 0,
}


def top_of(count: int | None, vocab: int) -> int:
    """Return the number of best tokens that `logprobs` or `prompt_logprobs` requests of a vocabulary."""
    return vocab if count == -1 else min(count or 0, vocab)


def plain_number(value: Any) -> Any:
    """Convert a scalar of NumPy or torch to a Python number; return any other value as it is."""
    if type(value) in (int, float, bool, str, type(None)) or callable(value) or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        return value


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise RequestError(f"{name} must be a finite number, got {value!r}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} must lie in {low:g}..{high:g}, got {value!r}", name)
    if name == "top_p" and value == 0:
        raise RequestError("top_p must be above 0; for greedy decoding use temperature=0", name)


def _check_integer(name: str, value: object, low: int | None) -> None:
    if value is None and name in _OPTIONAL_INTEGERS:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", name)
    if low is not None and value < low:
        raise RequestError(f"{name} must be at least {low}, got {value}", name)


def _token_id(key: Any) -> int:
    """Return a key of `logit_bias` as an integer: JSON has texts for keys."""
    number = int(key)
    if isinstance(key, float) and key != number:
        raise ValueError(f"{key} is not a token id")
    return number
