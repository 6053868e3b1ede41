"""Input processor: prompts and conversations to token ids and engine requests. Free of torch.

`LLM` combines it with an engine in this process, the server with an engine in another one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.config import EngineConfig
from draftproof.errors import RequestError, nearest
from draftproof.frontend.engine_client import EngineClient
from draftproof.frontend.request_tracker import Job, OnEvents, RequestTracker
from draftproof.metrics import EngineStats, SpecStats
from draftproof.sampling_params import MAX_SEED, SamplingParams
from draftproof.text.prompts import Prompt, token_ids
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Grammar, Request

Messages = Sequence[Mapping[str, Any]]
MAX_N = 16384  # outputs of one prompt; each is a request of its own
# options of `chat` for the template; other names for it go into chat_template_kwargs
TEMPLATE_OPTIONS = "add_generation_prompt", "continue_final_message", "chat_template", "tools", "documents"


class InputProcessor:
    """Conversion of prompts to jobs, shared by the front ends of an engine."""

    config: EngineConfig
    engine: EngineClient
    tokenizer: Tokenizer | None
    tracker: RequestTracker

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
        text = tokenizer.apply_chat_template(messages, **{**template, **(chat_template_kwargs or {})})
        return tokenizer.encode(text, add_special_tokens=False)

    def new_job(
        self, prompt: Prompt, params: SamplingParams, job_id: str, on_events: OnEvents | None = None
    ) -> Job:
        """Tokenize a prompt and create its n requests; RequestError if that is not possible.

        The engine is not used, so any thread may call this. Compiling a grammar may take seconds.
        """
        if params.n > MAX_N:
            raise RequestError(f"n must be at most {MAX_N}, got {params.n}: send the prompt again", "n")
        text, ids = self.read_prompt(prompt)
        if params.stop:
            self._need_tokenizer("stop")
        bad_words, prediction = self._bad_words(params), self._prediction(params)
        eos, grammar = self._eos_token_ids(), self.compile_grammar(params)
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
        return Job(job_id, text, ids, requests, self.tokenizer, on_events)

    def close(self) -> None:
        """Release what is not released by itself."""
        return None

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the text (None for token ids) and the token ids of a prompt."""
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("a text prompt").encode(prompt)
        if isinstance(prompt, Mapping):
            if set(prompt) == {"prompt_token_ids"}:
                return None, token_ids(prompt["prompt_token_ids"])
            if set(prompt) == {"prompt"}:
                return self.read_prompt(prompt["prompt"])
            text = f"a prompt mapping has the key 'prompt' or 'prompt_token_ids', not {sorted(prompt)}"
            raise RequestError(text, "prompt")
        return None, token_ids(prompt)

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of `params.structured_outputs`, None without it."""
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


def params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Return one SamplingParams for each prompt, from one for all or a list."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if isinstance(params, Mapping) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams, one or a list, not {params!r}")
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling_params: give one, or one each")
    return list(params)
