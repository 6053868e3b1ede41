"""LLM: offline entry point with the engine in this process. The interface follows vLLM's."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from typing import Any

from draftproof.config import DEFAULT_MODEL, EngineConfig
from draftproof.engine.engine import Engine
from draftproof.engine.parallel.rank_checkpoint import load_for
from draftproof.errors import EngineClosedError, LoadError, QueueFullError
from draftproof.frontend.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, step_logprobs
from draftproof.frontend.continuation_scores import score_output
from draftproof.frontend.input_processor import InputProcessor, Messages, params_for
from draftproof.frontend.operations import EngineOperations
from draftproof.frontend.pooler import PoolingParams, pooling_params_for, read_pooler
from draftproof.frontend.progress import progress_bar
from draftproof.frontend.request_tracker import Job, OnEvents, RequestTracker
from draftproof.models.hub import find_model
from draftproof.models.load import Checkpoint
from draftproof.outputs import EmbeddingRequestOutput, RequestOutput, ScoreOutput, TokenEvent
from draftproof.sampling_params import SamplingParams
from draftproof.text.generation_config import default_options
from draftproof.text.grammar.compiler import GrammarCompiler
from draftproof.text.prompts import Prompt, prompt_list
from draftproof.text.reasoning.section import find_reasoning
from draftproof.text.tokenizer import Tokenizer, load_tokenizer
from draftproof.types import Grammar

MIN_COLLECTIONS_BETWEEN_FULL = 10_000  # collections of the middle generation, some thousand objects each


class LLM(EngineOperations, InputProcessor):
    """Model that is loaded and ready to generate.

        llm = LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 5})
        print(llm.generate("The sky is", SamplingParams(temperature=0))[0].outputs[0].text)

    Options are the fields of `EngineConfig`, with `speculative_config` in vLLM's or FastDeploy's keys.
    Only one thread at a time may use it; `AsyncLLM` serves several. `with LLM(...) as llm:` closes it at
    the end.
    """

    engine: Engine

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        with _no_full_collection():
            self._load(model, options)

    def _load(self, model: str, options: dict[str, Any]) -> None:
        """Read the model and build everything that generates from it."""
        self.config = EngineConfig.parse(model, options)
        checkpoint = load_for(self.config)
        self.tokenizer = _find_tokenizer(self.config, checkpoint)
        self.default_options = default_options(self.config.generation_config, checkpoint.source)
        self.pooler = read_pooler(
            self.config, checkpoint.config.hidden_size, checkpoint.source, checkpoint.header
        )
        with progress_bar() as show:
            self.engine = Engine(self.config, checkpoint, show)
        vocab = self.engine.limits.vocab_size
        reasoning = find_reasoning(self.config.reasoning_parser, self.tokenizer, vocab)
        self._grammars = GrammarCompiler(self.tokenizer, vocab, self._eos_token_ids(), reasoning)
        self.tracker = RequestTracker(self.engine)
        self._ids = count()
        self._is_closed = False
        self._init_seeds()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return one RequestOutput for each prompt, in order; `sampling_params`: one for all, or one each."""
        listed = prompt_list(prompts)
        params = params_for(listed, sampling_params, self.default_params)
        jobs = (self._open_job(self._new_job(prompt, p)) for prompt, p in zip(listed, params, strict=True))
        with _no_full_collection():
            return self._run(jobs, len(listed), progress=use_tqdm and len(listed) > 1)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or several.

        `template`: options of the chat template (`TEMPLATE_OPTIONS`). `chat_template` replaces the model's
        own, `chat_template_kwargs` are further names for it.
        """
        one = not messages or isinstance(messages, str) or isinstance(messages[0], Mapping)
        several: Any = [messages] if one else messages
        prompts = [{"prompt_token_ids": self.chat_token_ids(m, **template)} for m in several]
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in order; `pooling_params`: one for all, or one each."""
        listed = prompt_list(prompts)
        params = pooling_params_for(listed, pooling_params)
        pairs = zip(listed, params, strict=True)
        jobs = (self._open_job(self.new_embedding_job(prompt, p, self._next_id())) for prompt, p in pairs)
        with _no_full_collection():
            results = self._run(jobs, len(listed), progress=use_tqdm and len(listed) > 1)
        return [self.pooler.output(result, p) for result, p in zip(results, params, strict=True)]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best continuations of each prompt, best first.

        Every step is a request of one token for each beam; their common tokens come from the prefix cache.
        """
        listed = [self.read_prompt(prompt)[1] for prompt in prompt_list(prompts)]
        for ids in listed:
            self.check_beams(ids, params)
        searches = [BeamSearch(ids, params, self._eos_token_ids()) for ids in listed]
        vocab_size = self.engine.limits.vocab_size
        with progress_bar() if use_tqdm else nullcontext() as show:
            for step in range(params.max_tokens):
                beams = [(search, beam) for search in searches for beam in search.beams]
                if not beams:
                    break
                tokens: list[Prompt] = [{"prompt_token_ids": beam.tokens} for _, beam in beams]
                results = self.generate(tokens, params.step_params(vocab_size), use_tqdm=False)
                rows = [step_logprobs(result) for result in results]
                for search in searches:
                    search.advance([row for (one, _), row in zip(beams, rows, strict=True) if one is search])
                if show is not None:
                    show("searching", step + 1, params.max_tokens)
        return [search.output(self.tokenizer) for search in searches]

    def score(
        self,
        contexts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt] | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """Return the log-likelihood of each continuation after its context.

        One context is used for all continuations. A continuation is tokenized by itself, without special
        tokens, so that the context has the same tokens with every continuation. Without continuations
        `contexts` are whole sequences, and every token but the first is scored. The logprobs are those that
        generation reports for the same tokens, bit for bit.
        """
        pairs = self.score_pairs(contexts, continuations)
        prompts = [{"prompt_token_ids": context + rest} for context, rest in pairs]
        results = self.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm)
        return [score_output(len(pair[0]), result) for pair, result in zip(pairs, results, strict=True)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Yield tokens as they are committed. Leaving the loop early aborts the request."""
        params = params_for([prompt], sampling_params, self.default_params)[0]
        events: deque[TokenEvent] = deque()
        return self._events(self._open_job(self._new_job(prompt, params, events.extend)), events)

    def _events(self, job: Job, events: deque[TokenEvent]) -> Iterator[TokenEvent]:
        """Run one job and yield its events. Apart from `stream`, which can then refuse a request at once."""
        queue = deque([job])
        try:
            while events or not job.is_finished:
                if not events:
                    self._add(queue)
                    self.tracker.step()
                while events:
                    yield events.popleft()
        finally:
            self.tracker.drop(job)

    def close(self) -> None:
        """Abort what is running and end the processes of this engine. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.tracker.drop_all()
        self._grammars.close()
        self.engine.close()

    def reset_stats(self) -> None:
        """Set the speculation counters to zero."""
        self.tracker.reset_stats()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def compile_grammar(self, params: SamplingParams, prompt: Sequence[int]) -> Grammar | None:
        """Return the grammar of the output after a prompt, None without one."""
        return self._grammars.compile(params, prompt)

    def _next_id(self) -> str:
        self._check_usable()
        return str(next(self._ids))

    def _new_job(self, prompt: Prompt, params: SamplingParams, on_events: OnEvents | None = None) -> Job:
        return self.new_job(prompt, params, self._next_id(), on_events)

    def _open_job(self, job: Job) -> Job:
        """Check a job before it enters the engine."""
        self.tracker.open(job)
        return job

    def _run(self, jobs: Iterator[Job], count: int, progress: bool) -> list[RequestOutput]:
        """Run `count` jobs to their ends and return their outputs in order.

        Where steps overlap, the device works while prompts are tokenized and outputs are built. If a later
        prompt is refused, the jobs that have begun are dropped, since the caller gets no outputs.
        """
        running: dict[str, Job] = {}
        results: dict[str, RequestOutput | None] = {}  # in the order of the prompts
        queue: deque[Job] = deque()
        max_rows, num_finished = self.engine.intake_rows, 0
        try:
            with progress_bar() if progress else nullcontext() as show:
                while num_finished < count:
                    rows = 0
                    while rows < max_rows and (job := next(jobs, None)) is not None:
                        running[job.id], results[job.id] = job, None
                        queue.append(job)
                        rows += len(job.prompt_token_ids) * len(job.requests)
                    self._add(queue)
                    # jobs of a concurrent stream are not among `running`
                    finished = [job for job in self.tracker.step(defer_close=True) if job.id in running]
                    for job in finished:
                        results[job.id] = self.tracker.result(job)
                        self.tracker.drop(running.pop(job.id))
                    num_finished += len(finished)
                    if finished and show is not None:
                        show("generating", num_finished, count)
        finally:
            for job in running.values():
                self.tracker.drop(job)
        return [result for result in results.values() if result is not None]

    def _add(self, queue: deque[Job]) -> None:
        """Add jobs to the engine until its waiting queue is full; the rest stays in `queue`."""
        self._check_usable()
        self.engine.check_awake()
        with suppress(QueueFullError):
            while queue:
                self.tracker.add(queue[0])
                queue.popleft()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineClosedError("this LLM was closed: create another one")
        owner = self.tracker.owner
        if owner is not None:
            raise EngineClosedError(f"{owner} runs this engine: use it, or shut it down first")


def _find_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """Load the configured tokenizer, or the model's own; None if it is off or dummy weights have none."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(find_model(config.tokenizer, weights=False))
    if checkpoint.source is None:
        return None
    try:
        return load_tokenizer(checkpoint.source, checkpoint.header)
    except LoadError:
        if config.load_format == "dummy":  # random weights need no tokenizer
            return None
        raise


@contextmanager
def _no_full_collection() -> Iterator[None]:
    """Delay full garbage collections.

    A full collection visits every object that was ever imported, which takes as long as a hundred steps of a
    fast device. New objects are collected as usual, and everything after some ten million objects.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, MIN_COLLECTIONS_BETWEEN_FULL))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
