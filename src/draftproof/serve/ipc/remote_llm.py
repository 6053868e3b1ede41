"""An AsyncLLM on an engine in another process, which may go and come back.

    llm = connect(supervisor.address)

Text, stop strings and statistics are made here; requests cross as token ids. When the worker goes, what has
not ended ends as "error", and new requests raise EngineDownError until the next worker is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

from draftproof.async_llm import STOP_SECONDS, AsyncLLM
from draftproof.config import EngineConfig
from draftproof.errors import EngineDeadError
from draftproof.frontend.engine_thread import Driver
from draftproof.frontend.input_processor import Front
from draftproof.frontend.request_tracker import Jobs
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc.remote_engine import CONNECT_SECONDS, RemoteEngine, StepTotals
from draftproof.serve.ipc.status import WorkerStatus
from draftproof.text.tokenizer import Tokenizer, load_tokenizer
from draftproof.types import Grammar, GrammarState
from draftproof.verify.guarantee import Guarantee


class FarGrammar:
    """Stands for a grammar that the worker compiles."""

    def start(self) -> GrammarState:
        raise TypeError("this grammar is followed in the engine's process")


FAR = FarGrammar()


class FarFront(Front):
    """Text here, the engine elsewhere."""

    engine: RemoteEngine

    def __init__(self, engine: RemoteEngine, tokenizer: Tokenizer | None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.config = EngineConfig.parse(engine.facts.model, engine.facts.options)
        self.jobs = Jobs(engine)
        self._draw_seeds()

    def grammar_of(self, params: SamplingParams) -> Grammar | None:
        if params.structure is None:
            return None
        self._need_tokenizer("structured_outputs")
        return FAR

    def close(self) -> None:
        self.engine.close()


class RemoteLLM(AsyncLLM):
    """An AsyncLLM whose engine is in another process; made by `connect`."""

    def __init__(self, front: FarFront) -> None:
        self._own(front)
        self._made_it = True
        self._far = front.engine
        self._stop.detach()
        self._stop = weakref.finalize(self, _end, self._driver, front)

    def worker(self) -> WorkerStatus:
        """How the worker stands, for a health check and for metrics. `ready`: requests are served."""
        status = self._far.status()
        if status.state == "ready" and not self._far.up:
            return replace(status, state="restarting")
        return status

    def steps(self) -> StepTotals:
        return self._far.totals

    @property
    def dead(self) -> bool:
        """For good: a worker that is being started again is not dead."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> BaseException | None:
        if self._driver.cause is not None or self._far.up:
            return self._driver.cause
        error = self._far.why_down()
        return error if isinstance(error, EngineDeadError) else None

    @property
    def strategies(self) -> dict[str, Guarantee]:
        """Guarantee of each strategy by name, for requests with speculation."""
        facts = self._far.facts
        return {name: known.under_policy(facts.accept_policy) for name, known in facts.strategies.items()}


def _end(driver: Driver, front: FarFront) -> None:
    driver.stop(STOP_SECONDS)
    front.close()


def connect(
    address: str,
    *,
    tokenizer: Tokenizer | None = None,
    seconds: float = CONNECT_SECONDS,
    on_step: Callable[[float], object] | None = None,
) -> RemoteLLM:
    """To a worker that is ready, or will be within so many seconds (EngineDownError).

    `tokenizer` in place of the model's own; `on_step` is called on the engine's thread, with the seconds of
    each step that had results for this process.
    """
    engine = RemoteEngine(address, seconds)
    engine.on_step = on_step
    try:
        if tokenizer is None and engine.facts.tokenizer is not None:
            tokenizer = load_tokenizer(engine.facts.tokenizer)
        return RemoteLLM(FarFront(engine, tokenizer))
    except BaseException:
        engine.close()
        raise
