"""AsyncLLM on an engine in another process, which may end and be restarted.

    llm = connect(supervisor.address)

Detokenization, stop strings and statistics are computed here; requests are sent as token ids. When the worker
ends, unfinished requests finish with "error", and new ones raise EngineDownError until the next worker has
started.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from draftproof.async_llm import STOP_SECONDS, AsyncLLM
from draftproof.config import EngineConfig
from draftproof.engine.live.operations import OperationName, check_mode
from draftproof.errors import ConfigError, EngineDeadError
from draftproof.frontend.engine_thread import EngineThread
from draftproof.frontend.input_processor import InputProcessor
from draftproof.frontend.request_tracker import RequestTracker
from draftproof.metrics import StepTotals, WorkerStatus
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc.remote_engine import CONNECT_SECONDS, RemoteEngine
from draftproof.text.tokenizer import Tokenizer, load_tokenizer
from draftproof.types import Grammar

REMOTE_GRAMMAR = cast(Grammar, object())  # in place of a grammar; only the worker has its states


class RemoteFrontend(InputProcessor):
    """Frontend whose engine is in another process."""

    engine: RemoteEngine

    def __init__(self, engine: RemoteEngine, tokenizer: Tokenizer | None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.config = EngineConfig.parse(engine.info.model, engine.info.options)
        self.default_options = engine.info.default_options
        self.pooler = engine.info.pooler
        self.tracker = RequestTracker(engine)
        self._init_seeds()

    def compile_grammar(self, params: SamplingParams, prompt: Sequence[int]) -> Grammar | None:
        """Return a placeholder if the request has a grammar."""
        if not params.needs_grammar:
            return None
        self._need_tokenizer("a grammar")
        return REMOTE_GRAMMAR

    def close(self) -> None:
        """Close the connection."""
        self.engine.close()


class RemoteLLM(AsyncLLM):
    """AsyncLLM whose engine is in another process. Built by `connect`."""

    def __init__(self, frontend: RemoteFrontend) -> None:
        self._attach(frontend)
        self._owns_llm = True
        self._engine = frontend.engine
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, self._thread, frontend)

    def worker_status(self) -> WorkerStatus:
        """Return the state of the worker process. `ready`: requests are served."""
        status = self._engine.status()
        if status.state == "ready" and not self._engine.is_connected:
            return replace(status, state="restarting")
        return status

    async def _operate(self, name: OperationName, arguments: Mapping[str, Any], mode: str = "keep") -> Any:
        """Send an operation to the worker; weights come from files that the worker can read."""
        self._check_open()
        sent, checked = dict(arguments), check_mode(mode)
        for key in ("weights", "draft_weights"):
            if key in sent and not isinstance(sent[key], str):
                if sent[key]:
                    raise ConfigError(f"{key} must be a folder: the engine is in another process")
                del sent[key]
        return await self._thread.operate(partial(self._engine.operate, name, sent, checked))

    def step_totals(self) -> StepTotals:
        """Return number and duration of the worker's steps."""
        return self._engine.totals

    @property
    def dead_error(self) -> BaseException | None:
        """Error by which the engine stopped for good; None while a worker is being restarted."""
        if self._thread.error is not None or self._engine.is_connected:
            return self._thread.error
        error = self._engine.down_error()
        return error if isinstance(error, EngineDeadError) else None


def _close(thread: EngineThread, frontend: RemoteFrontend) -> None:
    thread.stop(STOP_SECONDS)
    frontend.close()


def connect(
    address: str,
    *,
    tokenizer: Tokenizer | None = None,
    seconds: float = CONNECT_SECONDS,
    on_step: Callable[[float], object] | None = None,
) -> RemoteLLM:
    """Connect to a worker that is ready within `seconds`, otherwise EngineDownError.

    `tokenizer`: used instead of the model's own. `on_step` is called on the engine thread with the seconds
    of each step that had results for this process.
    """
    engine = RemoteEngine(address, seconds, on_step)
    try:
        if tokenizer is None and engine.info.tokenizer is not None:
            tokenizer = load_tokenizer(engine.info.tokenizer)
        return RemoteLLM(RemoteFrontend(engine, tokenizer))
    except BaseException:
        engine.close()
        raise
