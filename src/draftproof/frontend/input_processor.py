"""The text side of an engine: prompts, chat templates, words to ids. Where the engine runs is not asked here.

`LLM` puts an engine of this process behind it, the server one of another. Nothing here needs torch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.config import EngineConfig
from draftproof.errors import RequestError, nearest
from draftproof.frontend.request_tracker import EngineLike, Job, Jobs, Tell
from draftproof.metrics import EngineStats, SpecStats
from draftproof.sampling_params import MAX_SEED, SamplingParams
from draftproof.text.prompts import Prompt, token_ids
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Grammar, Request

Messages = Sequence[Mapping[str, Any]]
# what a caller may say of how a conversation becomes a prompt, beside names for the template itself
TEMPLATE = "add_generation_prompt", "continue_final_message", "chat_template", "tools", "documents"


class Front:
    """Makes jobs of prompts."""

    config: EngineConfig
    engine: EngineLike
    tokenizer: Tokenizer | None
    jobs: Jobs

    def _draw_seeds(self) -> None:
        """With a seed, the n-th request is given the same one in every run."""
        seed = self.config.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    @property
    def stats(self) -> SpecStats:
        """Of everything that was generated through this."""
        return self.jobs.stats

    def engine_stats(self) -> EngineStats:
        """How the engine stands, and what it did and how long that took, for everybody."""
        return self.engine.stats()

    def get_tokenizer(self) -> Tokenizer:
        return self._need_tokenizer("get_tokenizer()")

    def chat_token_ids(
        self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None, **template: Any
    ) -> list[int]:
        tokenizer = self._need_tokenizer("chat")
        for name in template:
            if name not in TEMPLATE:
                raise RequestError(
                    f"chat has no option {name!r}: {nearest(name, TEMPLATE)}; how to sample is said in "
                    "SamplingParams, more names for the template in chat_template_kwargs",
                    name,
                )
        if isinstance(messages, str) or not messages or not all(isinstance(m, Mapping) for m in messages):
            raise RequestError("messages must be a list of {'role': …, 'content': …}", "messages")
        text = tokenizer.apply_chat_template(messages, **{**template, **(chat_template_kwargs or {})})
        return tokenizer.encode(text, add_special_tokens=False)

    def new_job(self, prompt: Prompt, params: SamplingParams, name: str, tell: Tell | None = None) -> Job:
        """A prompt in tokens, with all its requests need; RequestError if it has none of that.

        The engine is not asked, so any thread may do this at any time. A grammar may take seconds.
        """
        text, ids = self.read_prompt(prompt)
        if params.stop:
            self._need_tokenizer("stop")
        bad_words, prediction = self._bad_words(params), self._prediction(params)
        eos, grammar = self._eos_token_ids(), self.grammar_of(params)
        seed = self._seeds.randrange(MAX_SEED - params.n) if params.seed is None else params.seed
        requests = [
            Request(
                id=name if params.n == 1 else f"{name}-{i}",
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
        return Job(name, text, ids, requests, self.tokenizer, tell)

    def close(self) -> None:
        """Give back what is not given back by itself."""
        return None

    # --- prompts ----------------------------------------------------------------------------------

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("a text prompt").encode(prompt)
        if isinstance(prompt, Mapping):
            if set(prompt) == {"prompt_token_ids"}:
                return None, token_ids(prompt["prompt_token_ids"])
            if set(prompt) == {"prompt"}:
                return self.read_prompt(prompt["prompt"])
            raise RequestError(
                f"a prompt mapping has the key 'prompt' or 'prompt_token_ids', not {sorted(prompt)}",
                "prompt",
            )
        return None, token_ids(prompt)

    def grammar_of(self, params: SamplingParams) -> Grammar | None:
        """What `params.structured_outputs` is for the engine."""
        raise NotImplementedError

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and this model has none: pass tokenizer=FOLDER, "
                "or use prompt_token_ids"
            )
        return self.tokenizer

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = set(self.engine.eos_token_ids)
        if self.tokenizer is not None:
            ids |= set(self.tokenizer.eos_token_ids)
        # a tokenizer may know more tokens than the model can say
        return tuple(sorted(i for i in ids if i < self.engine.limits.vocab_size))

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is spelt at the start of a text and after a space."""
        words = []
        for word in params.bad_words:
            tokenizer = self._need_tokenizer("bad_words")
            for form in (word, " " + word.lstrip()):
                ids = tokenizer.encode(form, add_special_tokens=False)
                sayable = ids and max(ids) < self.engine.limits.vocab_size
                if sayable and ids not in words:
                    words.append(ids)
        return words

    def _prediction(self, params: SamplingParams) -> Sequence[int]:
        if isinstance(params.prediction, str):
            return self._need_tokenizer("prediction").encode(params.prediction, add_special_tokens=False)
        return params.prediction or ()


def params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if isinstance(params, Mapping) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams, one or a list, not {params!r}")
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling_params: give one, or one each")
    return list(params)
