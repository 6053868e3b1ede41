"""LLM: the engine in this process, for scripts and notebooks, in the habits of vLLM's users."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from math import inf
from typing import Any

from draftproof.config import DEFAULT_MODEL, EngineConfig
from draftproof.engine.engine import Engine
from draftproof.errors import EngineClosedError, LoadError, QueueFullError
from draftproof.frontend.input_processor import Front, Messages, params_for
from draftproof.frontend.progress import progress_bar
from draftproof.frontend.request_tracker import Job, Jobs, Tell
from draftproof.metrics import SpecStats
from draftproof.models.hub import find_model
from draftproof.models.load import load_checkpoint
from draftproof.sampling_params import SamplingParams
from draftproof.text.grammar.compiler import Grammars
from draftproof.text.prompts import Prompt, prompt_list
from draftproof.text.tokenizer import Tokenizer, load_tokenizer
from draftproof.types import Grammar, RequestOutput, TokenEvent

__all__ = ["LLM", "Messages", "params_for"]

SELDOM = 10_000  # collections of what is new, of some thousand objects each, between two of everything


class LLM(Front):
    """A model, ready to generate.

        llm = LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 5})
        print(llm.generate("The sky is", SamplingParams(temperature=0))[0].outputs[0].text)

    Options are the fields of `EngineConfig`, with `speculative_config` in vLLM's or FastDeploy's keys.
    For one thread at a time: `AsyncLLM` is for several.
    """

    engine: Engine

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
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
        self._draw_seeds()

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
        coming = (self._job(prompt, p) for prompt, p in zip(many, params, strict=True))
        with no_full_collection():
            return self._serve(coming, len(many), progress=use_tqdm and len(many) > 1)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several. `template` goes to the chat template (`front.TEMPLATE`).

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

    def reset_stats(self) -> None:
        """Set the speculation counters to zero."""
        self.jobs.stats = SpecStats()

    def grammar_of(self, params: SamplingParams) -> Grammar | None:
        return self._grammars.of(params)

    # --- serving ----------------------------------------------------------------------------------

    def _job(self, prompt: Prompt, params: SamplingParams, tell: Tell | None = None) -> Job:
        """Everything is checked here, before it enters the engine."""
        job = self.new_job(prompt, params, str(next(self._ids)), tell)
        self.jobs.open(job)
        return job

    def _serve(self, coming: Iterator[Job], count: int, progress: bool) -> list[RequestOutput]:
        """Where steps overlap the device is at work while prompts are taken in and answers given out.

        If a later prompt is refused, what has begun is dropped: the caller has no answers either way.
        """
        here: dict[str, Job] = {}
        results: dict[str, RequestOutput | None] = {}  # in the order of the prompts
        queue: deque[Job] = deque()
        loop, num_ended = self.engine.loop, 0
        full = loop.scheduler.max_rows if loop.overlap else inf
        self.jobs.patient = True
        try:
            with progress_bar() if progress else nullcontext() as show:
                while num_ended < count:
                    rows = 0
                    while rows < full and (job := next(coming, None)) is not None:
                        here[job.name], results[job.name] = job, None
                        queue.append(job)
                        rows += len(job.ids) * len(job.requests)
                    self._add(queue)
                    ended = [job for job in self.jobs.step() if job.name in here]  # not of a stream beside
                    for job in ended:
                        results[job.name] = self.jobs.result(job)
                        self.jobs.drop(here.pop(job.name))
                    num_ended += len(ended)
                    if ended and show is not None:
                        show("generating", num_ended, count)
        finally:
            self.jobs.patient = False
            for job in here.values():
                self.jobs.drop(job)
        return [result for result in results.values() if result is not None]

    def _add(self, queue: deque[Job]) -> None:
        """As many as the engine lets wait; the others are still in `queue` afterwards."""
        if self.jobs.driver is not None:
            raise EngineClosedError(f"{self.jobs.driver} runs this engine: use it, or shut it down first")
        with suppress(QueueFullError):
            while queue:
                self.jobs.add(queue[0])
                queue.popleft()


@contextmanager
def no_full_collection() -> Iterator[None]:
    """A full garbage collection looks at all that was ever imported, which takes as long as a hundred steps
    of a quick device. What is new is collected as ever, and after some ten million objects everything is."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


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
