"""LLM: the engine in this process, for scripts and notebooks, in the habits of vLLM's users."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.errors import EngineClosedError, LoadError, QueueFullError, RequestError
from draftproof.jobs import Job, Jobs, Tell
from draftproof.metrics import SpecStats
from draftproof.models.hub import find_model
from draftproof.models.load import load_checkpoint
from draftproof.sampling_params import MAX_SEED, SamplingParams
from draftproof.text.grammar import Grammars
from draftproof.text.progress import progress_bar
from draftproof.text.prompts import Prompt, prompt_list, token_ids
from draftproof.text.tokenizer import Tokenizer, load_tokenizer
from draftproof.types import Request, RequestOutput, TokenEvent

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, ready to generate.

        llm = LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 5})
        print(llm.generate("The sky is", SamplingParams(temperature=0))[0].outputs[0].text)

    Options are the fields of `EngineConfig`, with `speculative_config` in vLLM's or FastDeploy's keys.
    For one thread at a time: `AsyncLLM` is for several.
    """

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        self.config = EngineConfig.parse(model, options)
        checkpoint = load_checkpoint(
            model,
            dtype=self.config.dtype,
            load_format=self.config.load_format,
            revision=self.config.revision,
            seed=self.config.seed or 0,
        )
        self.tokenizer = _find_tokenizer(self.config, checkpoint.source)
        with progress_bar() as show:
            self.engine = Engine(self.config, checkpoint, show)
        self._grammars = Grammars(self.tokenizer, self.engine.limits.vocab_size, self._eos_token_ids())
        self.jobs = Jobs(self.engine)
        self._ids = count()
        # with a seed, the n-th request is given the same one in every run
        seed = self.config.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    @property
    def stats(self) -> SpecStats:
        """Of everything this LLM has generated."""
        return self.jobs.stats

    # --- faces ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order. One params for all, or one each."""
        many = prompt_list(prompts)
        params = params_for(many, sampling_params)
        jobs = [self._job(prompt, p) for prompt, p in zip(many, params, strict=True)]
        self._serve(jobs, progress=use_tqdm and len(jobs) > 1)
        return [self.jobs.result(job) for job in jobs]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several. `template` goes to the chat template.

        `chat_template` in it is another template to use, `chat_template_kwargs` more names for it.
        """
        one = not messages or isinstance(messages, str) or isinstance(messages[0], Mapping)
        several: Any = [messages] if one else messages
        prompts = [{"prompt_token_ids": self.chat_token_ids(m, **template)} for m in several]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Token by token, as they are committed. Leaving the loop early aborts the request."""
        params = params_for([prompt], sampling_params)[0]
        events: deque[TokenEvent] = deque()
        return self._events(self._job(prompt, params, events.extend), events)

    def _events(self, job: Job, events: deque[TokenEvent]) -> Iterator[TokenEvent]:
        """Apart from `stream`, so that a wrong request is refused there and not at the first token."""
        queue = deque([job])
        try:
            while events or not job.finished:
                if not events:
                    self._add(queue)
                    self.jobs.step()
                while events:
                    yield events.popleft()
        finally:
            self.jobs.drop(job)

    def close(self) -> None:
        """End the process that compiles grammars, if there is one. Else it ends with this program."""
        self._grammars.close()

    def get_tokenizer(self) -> Tokenizer:
        return self._need_tokenizer("get_tokenizer()")

    def chat_token_ids(
        self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None, **template: Any
    ) -> list[int]:
        tokenizer = self._need_tokenizer("chat")
        if isinstance(messages, str) or not messages or not all(isinstance(m, Mapping) for m in messages):
            raise RequestError("messages must be a list of {'role': …, 'content': …}", "messages")
        text = tokenizer.apply_chat_template(messages, **{**template, **(chat_template_kwargs or {})})
        return tokenizer.encode(text, add_special_tokens=False)

    # --- serving ----------------------------------------------------------------------------------

    def _job(self, prompt: Prompt, params: SamplingParams, tell: Tell | None = None) -> Job:
        """Everything is checked here, before anything enters the engine."""
        job = self.new_job(prompt, params, str(next(self._ids)), tell)
        self.jobs.open(job)
        return job

    def new_job(self, prompt: Prompt, params: SamplingParams, name: str, tell: Tell | None = None) -> Job:
        """A prompt in tokens, with all its requests need; RequestError if it has none of that.

        The engine is not asked, so any thread may do this at any time. A grammar may take seconds.
        """
        text, ids = self.read_prompt(prompt)
        if params.stop:
            self._need_tokenizer("stop")
        bad_words, prediction = self._bad_words(params), self._prediction(params)
        eos, grammar = self._eos_token_ids(), self._grammars.of(params)
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

    def _serve(self, jobs: list[Job], progress: bool) -> None:
        left, queue = {job.name for job in jobs}, deque(jobs)
        try:
            with progress_bar() if progress else nullcontext() as show:
                while left:
                    self._add(queue)
                    ended = self.jobs.step()
                    left.difference_update(job.name for job in ended)
                    if ended and show is not None:
                        show("generating", len(jobs) - len(left), len(jobs))
        finally:
            for job in jobs:
                self.jobs.drop(job)

    def _add(self, queue: deque[Job]) -> None:
        """As many as the engine lets wait; the others are still in `queue` afterwards."""
        if self.jobs.driver is not None:
            raise EngineClosedError(f"{self.jobs.driver} runs this engine: use it, or shut it down first")
        with suppress(QueueFullError):
            while queue:
                self.jobs.add(queue[0])
                queue.popleft()

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

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and this model has none: pass tokenizer=FOLDER, "
                "or use prompt_token_ids"
            )
        return self.tokenizer

    def _eos_token_ids(self) -> tuple[int, ...]:
        config = self.engine.model_config
        ids = set(config.eos_token_ids)
        if self.tokenizer is not None:
            ids |= set(self.tokenizer.eos_token_ids)
        # a tokenizer may know more tokens than the model can say
        return tuple(sorted(i for i in ids if i < config.vocab_size))

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is spelt at the start of a text and after a space."""
        words = []
        for word in params.bad_words:
            tokenizer = self._need_tokenizer("bad_words")
            for form in (word, " " + word.lstrip()):
                ids = tokenizer.encode(form, add_special_tokens=False)
                sayable = ids and max(ids) < self.engine.model_config.vocab_size
                if sayable and ids not in words:
                    words.append(ids)
        return words

    def _prediction(self, params: SamplingParams) -> Sequence[int]:
        if isinstance(params.prediction, str):
            return self._need_tokenizer("prediction").encode(params.prediction, add_special_tokens=False)
        return params.prediction or ()


def _find_tokenizer(config: EngineConfig, source: Any) -> Tokenizer | None:
    if config.tokenizer is not None:
        return load_tokenizer(find_model(config.tokenizer, weights=False))
    if source is None:
        return None
    try:
        return load_tokenizer(source)
    except LoadError:
        if config.load_format == "dummy":  # random weights need no tokenizer
            return None
        raise


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
