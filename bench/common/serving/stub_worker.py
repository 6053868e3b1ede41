"""Worker without a model, which commits random tokens at once, to measure the rest of the server.

Only the engine is replaced; frames, sockets, text, HTTP and events are those of `draftproof serve`.
Run by `bench/serve_load.py --device none`.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from draftproof.engine.step.step_results import Finish, LogprobColumns, StepResults
from draftproof.engine.validation import Limits, check_request
from draftproof.metrics import EngineStats, RequestStats, WorkerStatus
from draftproof.serve.ipc.status import socket_address, write_status
from draftproof.types import NUM_OUT, PICK, TOKENS, LogprobKind, Request
from draftproof.verify.guarantee import StrategyGuarantees
from draftproof.verify.target_match import TargetMatch

TOP = 20
NUM_DISTINCT_STEPS = 64  # for each batch size
MIN_TOKEN_ID, MAX_TOKEN_ID = 100, 4000  # range of the generated token ids; the upper end is excluded


class StubEngine:
    """Engine without a model: each step commits one random token for every request."""

    sources: tuple[str, ...] = ()
    guarantees = StrategyGuarantees({"target_match": TargetMatch.guarantee()}, "target_match", "normal")
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab: int, seconds: float) -> None:
        self.limits = Limits(vocab, 4096, TOP, 1 << 24, 0)
        self.seconds = seconds  # that a step takes at least
        self._requests: dict[str, tuple[Request, list[int]]] = {}
        self._noise = np.random.default_rng(1)
        self._made: dict[int, list[Any]] = {}
        self._count = 0
        self.num_tokens = 0

    def describe(self) -> str:
        return "no model at all, float32 on cpu, no drafts"

    def add(self, request: Request, max_length: int | None = None) -> RequestStats:
        length = check_request(request, self.limits)
        self._requests[request.id] = request, [length - len(request.prompt_token_ids)]
        return RequestStats()

    def abort(self, request_id: str) -> bool:
        return self._requests.pop(request_id, None) is not None

    def stats(self) -> EngineStats:
        return EngineStats(len(self._requests), 0, 0, 0, 0, 1, 0, 0)

    def _columns(self, size: int) -> Any:
        """Return the result columns of a batch size. They are cached, so that their cost is not measured."""
        if size not in self._made:
            noise, steps = self._noise, []
            for _ in range(NUM_DISTINCT_STEPS):
                table = np.zeros((size, TOKENS + 1), np.int64)
                table[:, NUM_OUT], table[:, PICK] = 1, np.arange(size)
                table[:, TOKENS] = noise.integers(MIN_TOKEN_ID, MAX_TOKEN_ID, size)
                values = -np.sort(noise.exponential(2.0, (size, 1 + TOP)).astype(np.float32), axis=1)
                best = noise.integers(MIN_TOKEN_ID, MAX_TOKEN_ID, (size, TOP))
                steps.append((table, LogprobColumns(values, best, noise.integers(1, 9, size))))
            self._made[size] = steps
        self._count += 1
        return self._made[size][self._count % NUM_DISTINCT_STEPS]

    def step(self) -> StepResults:
        end = time.perf_counter() + self.seconds
        here = list(self._requests.values())
        table, columns = self._columns(len(here))
        endings = {}
        for i, (_, left) in enumerate(here):
            left[0] -= 1
            if not left[0]:
                endings[i] = Finish("length")
        requests = [request for request, _ in here]
        for i in endings:
            del self._requests[requests[i].id]
        self.num_tokens += len(here)
        while time.perf_counter() < end:
            time.sleep(max(end - time.perf_counter(), 0))
        return StepResults(requests, table, {LogprobKind.RAW: columns}, finishes=endings)


def worker(folder: Path, tokenizer: str, seconds: float, profile: str | None) -> None:
    from draftproof.serve.worker.worker import Worker
    from draftproof.text.tokenizer import load_tokenizer

    vocab = load_tokenizer(tokenizer).vocab_size
    engine = StubEngine(vocab, seconds)
    llm = SimpleNamespace(
        engine=engine,
        config=SimpleNamespace(model="made-up", speculative=None),
        tokenizer=SimpleNamespace(where=tokenizer),
        compile_grammar=None,
    )
    made: Any = Worker(llm, socket_address(folder), {})  # type: ignore[arg-type]
    write_status(folder, WorkerStatus("ready", pid=os.getpid(), since=time.time()))
    signal.signal(signal.SIGTERM, lambda *_: made.stop())
    print("ready", flush=True)
    _run(made.run, profile)


def server(folder: Path, descriptor: int, profile: str | None) -> None:
    from draftproof.serve.http_processes import serve_address
    from draftproof.serve.settings import Settings

    listener = socket.socket(fileno=descriptor)

    def ready(_: Any) -> None:
        print("ready", flush=True)

    settings = Settings(max_concurrent=4096, max_concurrent_per_key=4096)
    _run(lambda: serve_address(socket_address(folder), settings, listener, ready), profile)


def _run(act: Any, profile: str | None) -> None:
    if profile is None:
        act()
        return
    with cProfile.Profile() as found:
        act()
    found.dump_stats(profile)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("worker", "server"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--listener", type=int)
    parser.add_argument("--profile")
    options = parser.parse_args()
    if options.kind == "worker":
        worker(options.folder, options.tokenizer, options.step_seconds, options.profile)
    else:
        server(options.folder, options.listener, options.profile)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
