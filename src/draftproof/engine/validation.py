"""Validation of requests: one that cannot be served is rejected with the reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.types import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine on its requests."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int  # -1: no limit
    kv_tokens: int  # that the page pool can hold
    speculative_tokens: int  # 0: speculation is off
    max_open_requests: int | None = None  # running and waiting requests together; None: no limit


def check_request(request: Request, limits: Limits) -> int:
    """Return the maximum length of the request; RequestError if it cannot be served."""
    params, prompt = request.params, request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    if len(prompt) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and max_model_len is {limits.max_model_len}: "
            "no room is left for an output: shorten the prompt or raise max_model_len",
            "prompt",
        )
    _check_ids("prompt", prompt, limits.vocab_size)
    for name, ids in params.token_id_options().items():
        _check_ids(name, ids, limits.vocab_size)
    if len(request.prediction_ids) > limits.max_model_len:  # a longer search would slow the whole batch
        raise RequestError(
            f"the prediction has {len(request.prediction_ids)} tokens and max_model_len is "
            f"{limits.max_model_len}: an output never gets that long",
            "prediction",
        )
    _check_ids("prediction", request.prediction_ids, limits.vocab_size)
    _check_ids("eos_token_ids", request.eos_token_ids, limits.vocab_size)
    for word in request.bad_word_ids:
        if not word:
            raise RequestError("bad_words holds a word without tokens", "bad_words")
        _check_ids("bad_words", word, limits.vocab_size)
    if params.needs_grammar and request.grammar is None:
        name = "thinking_token_budget" if params.structure is None else "structured_outputs"
        text = f"{name} must be compiled, as LLM does it, and given as the request's grammar"
        raise RequestError(text, name)
    if params.max_tokens == 0:
        raise RequestError("max_tokens=0 is an option of LLM and AsyncLLM: give at least 1", "max_tokens")
    _check_logprobs(params, limits)
    _check_speculation(request, limits)
    max_length, limit = limits.max_model_len, f"max_model_len={limits.max_model_len}"
    if params.max_tokens is not None:
        max_length = min(max_length, len(prompt) + params.max_tokens)
    elif limits.kv_tokens < max_length:  # as far as the KV cache reaches
        max_length, limit = limits.kv_tokens, f"the {limits.kv_tokens} tokens that the KV cache holds"
        if len(prompt) >= max_length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the KV cache holds {max_length}: no room is left "
                "for an output; raise kv_cache_tokens",
                "prompt",
            )
    if len(prompt) + params.min_tokens > max_length:
        raise RequestError(
            f"min_tokens={params.min_tokens} after {len(prompt)} prompt tokens is beyond {limit}: "
            "lower min_tokens",
            "min_tokens",
        )
    if max_length > limits.kv_tokens:
        raise RequestError(
            f"the request may grow to {max_length} tokens and the KV cache holds {limits.kv_tokens}: "
            "lower max_tokens or raise kv_cache_tokens",
            "max_tokens",
        )
    return max_length


def _check_ids(name: str, ids: Collection[Any], vocab_size: int) -> None:
    # Prompts are long and mostly valid: three passes in C are much faster than a Python loop.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"{name} must hold integers, got {token!r}", name)
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} holds token id {token}, outside the vocabulary 0..{vocab_size - 1}", name
            )


def _check_logprobs(params: SamplingParams, limits: Limits) -> None:
    if limits.max_logprobs < 0:
        return
    requested = {
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "logprob_token_ids": len(params.logprob_token_ids or ()),
    }
    for name, count in requested.items():
        if count is not None and (count > limits.max_logprobs or count == -1):
            raise RequestError(
                f"{name} requests {'all' if count == -1 else count} tokens and max_logprobs is "
                f"{limits.max_logprobs}: start the engine with a larger one",
                name,
            )


def _check_speculation(request: Request, limits: Limits) -> None:
    speculation = request.params.speculation
    k = speculation.num_speculative_tokens
    if limits.speculative_tokens == 0 and (k is not None or speculation.adaptive is not None):
        text = "this engine was started without speculative_config: leave the option out"
        raise RequestError(text, "speculative")
    if k is not None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise RequestError(
                f"num_speculative_tokens must be a positive integer, got {k!r}; "
                "to switch speculation off for a request use speculative=False",
                "speculative",
            )
        if k > limits.speculative_tokens:
            raise RequestError(
                f"num_speculative_tokens={k} is above the engine's {limits.speculative_tokens}: "
                "use at most that",
                "speculative",
            )
    if request.params.prediction is not None and not limits.speculative_tokens:
        raise RequestError("prediction needs an engine with a speculative_config", "prediction")
