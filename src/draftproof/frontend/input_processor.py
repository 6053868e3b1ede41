"""Input processor: prompts and conversations to token ids and engine requests. Free of torch.

`LLM` combines it with an engine in this process, the server with an engine in another one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from draftproof.config import EngineConfig
from draftproof.errors import RequestError, nearest
from draftproof.frontend.beam_search import BeamSearchParams
from draftproof.frontend.engine_client import EngineClient
from draftproof.frontend.pooler import Pooler, PoolingParams
from draftproof.frontend.request_tracker import Job, OnEvents, RequestTracker
from draftproof.frontend.vllm_metrics import Metric, metric_list
from draftproof.metrics import EngineStats, SpecStats
from draftproof.sampling_params import MAX_SEED, SamplingParams
from draftproof.text.prompts import Prompt, prompt_list, token_ids
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Grammar, Request

Messages = Sequence[Mapping[str, Any]]
MAX_N = 16384  # outputs of one prompt; each is a request of its own
# options of `chat` for the template; other names for it go into chat_template_kwargs
TEMPLATE_OPTIONS = (
    *("add_generation_prompt", "continue_final_message", "chat_template", "tools", "documents"),
    "control_tokens_in_messages",
)


class InputProcessor:
    """Conversion of prompts to jobs, shared by the front ends of an engine."""

    config: EngineConfig
    engine: EngineClient
    tokenizer: Tokenizer | None
    tracker: RequestTracker
    default_options: Mapping[str, Any] = MappingProxyType({})  # of requests that give none
    pooler = Pooler()

    def _init_seeds(self) -> None:
        """Set the source of seeds; with a configured seed the n-th request gets the same one in every run."""
        seed = self.config.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    @property
    def stats(self) -> SpecStats:
        """Speculation counters of all finished outputs."""
        return self.tracker.stats

    def engine_stats(self) -> EngineStats:
        """Return counters, gauges and timings of the engine."""
        return self.engine.stats()

    def get_metrics(self) -> list[Metric]:
        """Return counters, gauges and histograms under the names of vLLM."""
        return metric_list(str(self.config.model), self.engine_stats(), self.stats)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the options of requests that give none, from the model's generation_config.json."""
        return self.default_params

    @cached_property
    def default_params(self) -> SamplingParams:
        """Options of requests that give none."""
        return SamplingParams(**self.default_options)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; RequestError if the model has none."""
        return self._need_tokenizer("get_tokenizer()")

    def chat_token_ids(
        self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None, **template: Any
    ) -> list[int]:
        """Return the prompt of a conversation; `template` are options of TEMPLATE_OPTIONS."""
        tokenizer = self._need_tokenizer("chat")
        for name in template:
            if name not in TEMPLATE_OPTIONS:
                hint = "options of sampling go into SamplingParams, other names into chat_template_kwargs"
                text = f"chat has no option {name!r}: {nearest(name, TEMPLATE_OPTIONS)}; {hint}"
                raise RequestError(text, name)
        if isinstance(messages, str) or not messages or not all(isinstance(m, Mapping) for m in messages):
            raise RequestError("messages must be a list of {'role': …, 'content': …}", "messages")
        return tokenizer.encode_conversation(messages, **{**template, **(chat_template_kwargs or {})})

    def new_job(
        self, prompt: Prompt, params: SamplingParams, job_id: str, on_events: OnEvents | None = None
    ) -> Job:
        """Tokenize a prompt and create its n requests; RequestError if that is not possible.

        The engine is not used, so any thread may call this. Compiling a grammar may take seconds.
        """
        if params.n > MAX_N:
            raise RequestError(f"n must be at most {MAX_N}, got {params.n}: send the prompt again", "n")
        text, ids = self.read_prompt(prompt)
        ids, params = self._truncated(ids, params), _with_salt(prompt, params)
        is_prompt_only = params.max_tokens == 0
        if is_prompt_only:  # the engine runs until a token is sampled, which is not returned
            params = params.clone(max_tokens=1)
        if params.stop:
            self._need_tokenizer("stop")
        bad_words, prediction = self._bad_words(params), self._prediction(params)
        eos, grammar = self._eos_token_ids(), self.compile_grammar(params, ids)
        seed = self._seeds.randrange(MAX_SEED - params.n) if params.seed is None else params.seed
        requests = [
            Request(
                id=job_id if params.n == 1 else f"{job_id}-{i}",
                prompt_token_ids=ids,
                params=params,
                seed=(seed + i) % (MAX_SEED + 1),
                bad_word_ids=bad_words,
                prediction_ids=prediction,
                eos_token_ids=eos,
                grammar=grammar,
            )
            for i in range(params.n)
        ]
        tokenizer = self.tokenizer if params.detokenize else None
        return Job(job_id, text, ids, requests, tokenizer, on_events, is_prompt_only)

    def new_embedding_job(self, prompt: Prompt, params: PoolingParams, job_id: str) -> Job:
        """Tokenize a prompt and create the request of its embedding; RequestError if that is not possible."""
        self.pooler.check(params)
        job = self.new_job(prompt, params.sampling_params(), job_id)
        job.requests = [replace(request, pooling=self.pooler.pooling_type) for request in job.requests]
        job.is_prompt_only = True
        return job

    def _truncated(self, ids: list[int], params: SamplingParams) -> list[int]:
        """Return the last tokens of a prompt, as many as `truncate_prompt_tokens` keeps."""
        count = params.truncate_prompt_tokens
        if count == -1:
            count = max(1, self.engine.limits.max_model_len - (params.max_tokens or 1))
        return ids if count is None else ids[-count:]

    def score_pairs(
        self, contexts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt] | None
    ) -> list[tuple[list[int], list[int]]]:
        """Return the token ids of contexts and continuations; RequestError if one has none.

        Without continuations the contexts are whole sequences: all tokens but the first are scored.
        """
        before = [self.read_prompt(context)[1] for context in prompt_list(contexts)]
        if continuations is None:
            if not all(len(ids) > 1 for ids in before):
                raise RequestError("a sequence of one token has nothing to score: the first has no logprob")
            return [(ids[:1], ids[1:]) for ids in before]
        after = []
        for part in prompt_list(continuations):
            if isinstance(part, str):
                after.append(self._need_tokenizer("a text").encode(part, add_special_tokens=False))
            else:
                after.append(self.read_prompt(part)[1])
        if len(before) == 1:
            before *= len(after)
        if len(before) != len(after):
            raise RequestError(
                f"{len(before)} contexts and {len(after)} continuations: give one context or one each"
            )
        if not all(before) or not all(after):
            raise RequestError("a context or continuation has no tokens: begin with the bos token at least")
        return list(zip(before, after, strict=True))

    def check_beams(self, prompt: Sequence[int], params: BeamSearchParams) -> None:
        """Raise RequestError unless the beams of a prompt fit the model."""
        length = self.engine.limits.max_model_len
        if len(prompt) + params.max_tokens > length:
            text = f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}"
            raise RequestError(f"{text}: together at most {length}", "max_tokens")

    def close(self) -> None:
        """Release what is not released by itself."""
        return None

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the text (None for token ids) and the token ids of a prompt."""
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("a text prompt").encode(prompt)
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt)
        return None, token_ids(prompt)

    def _read_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        """Return text and token ids of a `TextPrompt` or a `TokensPrompt`."""
        known = ("prompt", "prompt_token_ids", "cache_salt")
        given = {key for key, value in prompt.items() if value is not None or key in known}
        if given - set(known) or not given & {"prompt", "prompt_token_ids"}:
            message = f"a prompt mapping has the key 'prompt' or 'prompt_token_ids', not {sorted(given)}"
            raise RequestError(message, "prompt")
        if prompt.get("prompt_token_ids") is None and "prompt" in prompt:
            return self.read_prompt(prompt["prompt"])
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"'prompt' beside 'prompt_token_ids' is their text, not {text!r}", "prompt")
        return text, token_ids(prompt["prompt_token_ids"])

    def compile_grammar(self, params: SamplingParams, prompt: Sequence[int]) -> Grammar | None:
        """Return the grammar of the output after a prompt, None without one."""
        raise NotImplementedError

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            hint = "pass tokenizer=FOLDER, or use prompt_token_ids"
            raise RequestError(f"{what} needs a tokenizer and this model has none: {hint}")
        return self.tokenizer

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = set(self.engine.eos_token_ids)
        if self.tokenizer is not None:
            ids |= set(self.tokenizer.eos_token_ids)
        # a tokenizer may have more tokens than the model's vocabulary
        return tuple(sorted(i for i in ids if i < self.engine.limits.vocab_size))

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the token ids of each bad word, at the start of a text and after a space."""
        words = []
        for word in params.bad_words:
            tokenizer = self._need_tokenizer("bad_words")
            for form in (word, " " + word.lstrip()):
                ids = tokenizer.encode(form, add_special_tokens=False)
                in_vocab = ids and max(ids) < self.engine.limits.vocab_size
                if in_vocab and ids not in words:
                    words.append(ids)
        return words

    def _prediction(self, params: SamplingParams) -> Sequence[int]:
        if isinstance(params.prediction, str):
            return self._need_tokenizer("prediction").encode(params.prediction, add_special_tokens=False)
        return params.prediction or ()


def _with_salt(prompt: Prompt, params: SamplingParams) -> SamplingParams:
    """Return params with the `cache_salt` of a prompt mapping."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is None or salt == params.cache_salt:
        return params
    if params.cache_salt is not None:
        raise RequestError("the prompt and sampling_params have different cache_salts", "cache_salt")
    return params.clone(cache_salt=salt)


def params_for(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
) -> list[SamplingParams]:
    """Return one SamplingParams for each prompt, from one for all or a list; `default` for None."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * len(prompts)
    if isinstance(params, Mapping) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams, one or a list, not {params!r}")
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling_params: give one, or one each")
    return list(params)
