"""LLM: the engine in this process, for scripts and notebooks, in the habits of vLLM's users."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.engine.extras import needs_settling
from draftproof.engine.settle import Ending, StepResults
from draftproof.errors import LoadError, QueueFullError, RequestError
from draftproof.metrics import RequestStats, SpecStats
from draftproof.models.hub import find_model
from draftproof.models.load import load_checkpoint
from draftproof.sampling_params import MAX_SEED, SamplingParams
from draftproof.text.grammar import Grammars
from draftproof.text.ledger import Answer, Ledger
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.output import OutputBuilder
from draftproof.text.progress import progress_bar
from draftproof.text.prompts import Prompt, prompt_list, token_ids
from draftproof.text.tokenizer import Tokenizer, load_tokenizer
from draftproof.types import LogprobRow, Request, RequestOutput, TokenEvent

Messages = Sequence[Mapping[str, Any]]
BY_STOP_STRING = Ending("stop")  # the engine knows none: the answer says which


class LLM:
    """A model, ready to generate.

        llm = LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 5})
        print(llm.generate("The sky is", SamplingParams(temperature=0))[0].outputs[0].text)

    Options are the fields of `EngineConfig`, with `speculative_config` in vLLM's or FastDeploy's keys.
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
        self.stats = SpecStats()  # of everything this LLM has generated
        self._ids = count()
        # with a seed, the n-th request is given the same one in every run
        seed = self.config.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._owners: dict[str, tuple[_Job, int]] = {}
        loop = self.engine.loop
        self._ledger = Ledger(self.engine.limits.vocab_size, loop.slots.columns.draft.shape[1], loop.sources)
        self._company = _Company([], np.zeros(0, np.int64), np.zeros(0, np.int64), [])

    # --- faces ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order. One params for all, or one each."""
        many = prompt_list(prompts)
        params = _params_for(many, sampling_params)
        eos = self._eos_token_ids()
        jobs = [self._job(prompt, p, eos) for prompt, p in zip(many, params, strict=True)]
        self._serve(jobs, progress=use_tqdm and len(jobs) > 1)
        return [self._result(job) for job in jobs]

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
        params = _params_for([prompt], sampling_params)[0]
        return self._events(self._job(prompt, params, self._eos_token_ids(), stream=True))

    def _events(self, job: _Job) -> Iterator[TokenEvent]:
        """Apart from `stream`, so that a wrong request is refused there and not at the first token."""
        queue = deque([job])
        try:
            while job.events or not job.finished:
                if not job.events:
                    self._add(queue)
                    self._step()
                while job.events:
                    yield job.events.popleft()
        finally:
            self._drop(job)

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

    def _job(
        self, prompt: Prompt, params: SamplingParams, eos: tuple[int, ...], stream: bool = False
    ) -> _Job:
        """Everything is checked here, before anything enters the engine."""
        text, ids = self.read_prompt(prompt)
        seed = self._seeds.randrange(MAX_SEED - params.n) if params.seed is None else params.seed
        name = str(next(self._ids))
        bad_words, prediction = self._bad_words(params), self._prediction(params)
        grammar = self._grammars.of(params)
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
        max_length = self.engine.check(requests[0])
        if params.stop:
            self._need_tokenizer("stop")
        # nobody sees a token before the answer is complete: then it is built when it is
        in_bulk = not (stream or needs_settling(params, self.engine.limits.vocab_size))
        make = self._ledger.answer if in_bulk else OutputBuilder
        answers = [make(i, request, self.tokenizer) for i, request in enumerate(requests)]
        return _Job(name, text, ids, requests, max_length, answers, deque() if stream else None)

    def _result(self, job: _Job) -> RequestOutput:
        params = job.requests[0].params
        strategy = self.engine.strategy_of(params)
        total = SpecStats()
        for answer in job.answers:
            total.add(answer.output.metrics)
        asked = params.prompt_logprobs is not None
        return RequestOutput(
            request_id=job.name,
            prompt=job.text,
            prompt_token_ids=job.ids,
            prompt_logprobs=LogprobMaps([None, *job.prompt_rows], self.tokenizer) if asked else None,
            outputs=[answer.output for answer in job.answers],
            finished=job.finished,
            metrics=total,
            num_cached_tokens=job.counts[0].num_cached_tokens if job.counts else 0,
            num_preemptions=sum(counts.num_preemptions for counts in job.counts),
            strategy=f"{self.engine.strategy_name_of(params)}: {strategy.label}",
            lossless=strategy.lossless_for(params.greedy),
        )

    def _serve(self, jobs: list[_Job], progress: bool) -> None:
        left, queue = {job.name for job in jobs}, deque(jobs)
        try:
            with progress_bar() if progress else nullcontext() as show:
                while left:
                    self._add(queue)
                    ended = self._step()
                    left.difference_update(ended)
                    if ended and show is not None:
                        show("generating", len(jobs) - len(left), len(jobs))
        finally:
            for job in jobs:
                self._drop(job)

    def _add(self, queue: deque[_Job]) -> None:
        """As many as the engine lets wait; the others are still in `queue` afterwards."""
        while queue:
            job = queue[0]
            for request in job.requests[len(job.counts) :]:
                try:
                    counts = self.engine.add(request, job.max_length)
                except QueueFullError:
                    return
                self._owners[request.id] = job, len(job.counts)
                job.counts.append(counts)
            queue.popleft()

    def _step(self) -> list[str]:
        """One step of the engine; several streams may be open, and each gets what is its own.

        The names of the jobs that it completed.
        """
        results, company = self.engine.step(), self._company
        if results.requests != company.requests:
            company = self._company = self._meet(results.requests)
        matched = self._write_down(results, company) if len(company.lines) else []
        for i, extra in results.extras.items():
            job, index = self._owners[results.requests[i].id]
            if extra.prompt_logprobs is not None and index == 0:
                job.prompt_rows.extend(extra.prompt_logprobs)
        completed = []
        for i in company.singly:
            output = results[i]
            job, index = self._owners[output.request_id]
            builder = job.answers[index]
            assert isinstance(builder, OutputBuilder)
            events = builder.feed(output, tell=job.events is not None)
            if job.events is not None:
                job.events.extend(events)
            if builder.finished:
                self.engine.abort(output.request_id)  # a stop string ends it here, not in the engine
                completed += self._ended(job, index)
        for i in dict.fromkeys([*results.endings, *matched]):
            job, index = self._owners[results.requests[i].id]
            answer, ending = job.answers[index], results.endings.get(i)
            if isinstance(answer, Answer):
                reason, stop, error = astuple(ending or BY_STOP_STRING)
                self._ledger.close(answer, reason, stop, error)
                if ending is None:
                    self.engine.abort(results.requests[i].id)
                completed += self._ended(job, index)
        self._ledger.tidy()
        return completed

    def _meet(self, requests: list[Request]) -> _Company:
        """Who takes part in a step, for as long as it stays the same."""
        lines, singly = [], []
        for i, request in enumerate(requests):
            job, index = self._owners[request.id]
            answer = job.answers[index]
            if isinstance(answer, Answer):
                lines.append(answer.line if answer.line >= 0 else self._ledger.open(answer))
            else:
                singly.append(i)
        at = np.delete(np.arange(len(requests)), singly)
        return _Company(requests, np.array(lines, np.int64), at, singly)

    def _write_down(self, results: StepResults, company: _Company) -> list[int]:
        """What a step brought the answers built in bulk; those of them that met a stop string."""
        table, source = results.table, results.source
        ends = {i: ending.reason for i, ending in results.endings.items()}
        if company.singly:
            table, source = table[company.at], None if source is None else source[company.at]
            ends = {n: ends[i] for n, i in enumerate(company.at.tolist()) if i in ends}
        columns = {kind: (c.values, c.ids, c.ranks) for kind, c in results.columns.items()}
        matched = self._ledger.add(company.lines, table, source, columns, ends)
        return [int(company.at[n]) for n in matched]

    def _ended(self, job: _Job, index: int) -> list[str]:
        """Count an answer that is complete; the job's name if it was its last."""
        self.stats.add(job.answers[index].output.metrics)
        job.num_ended += 1
        return [job.name] if job.finished else []

    def _drop(self, job: _Job) -> None:
        """Leave nothing behind, whatever happened."""
        for index, request in enumerate(job.requests):
            self._owners.pop(request.id, None)
            answer = job.answers[index]
            self.engine.abort(request.id)
            if answer.output.finished():
                continue
            if isinstance(answer, Answer):
                self._ledger.close(answer, "abort", None, None)
            else:
                answer.abort()
            self.stats.add(answer.output.metrics)

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


@dataclass(slots=True)
class _Job:
    """One prompt on its way: its requests (n of them) and what has come back."""

    name: str
    text: str | None
    ids: list[int]
    requests: list[Request]
    max_length: int
    answers: Sequence[Answer | OutputBuilder]
    events: deque[TokenEvent] | None  # of a stream
    prompt_rows: list[LogprobRow] = field(default_factory=list)
    counts: list[RequestStats] = field(default_factory=list)  # of the requests that were added
    num_ended: int = 0

    @property
    def finished(self) -> bool:
        return self.num_ended == len(self.requests)


@dataclass(frozen=True, slots=True)
class _Company:
    """The requests of a step: those whose answers are built in bulk, and the others."""

    requests: list[Request]
    lines: NDArray[np.int64]  # in the ledger
    at: NDArray[np.int64]  # where in `requests`
    singly: list[int]  # where the others are


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


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if isinstance(params, Mapping) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams, one or a list, not {params!r}")
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling_params: give one, or one each")
    return list(params)
