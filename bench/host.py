"""What the host costs at a large batch, with the device left out; the last line of stdout is JSON.

    python bench/host.py [--batch 256] [--tokens 256] [--rounds 5] [--parts generate engine steps]
                         [--profile generate|engine|steps]

Time of this thread, so that a busy machine does little harm, and the quickest of the rounds. Microseconds
a token: `generate` is LLM's own part, from a made-up engine's steps
to finished answers, without and with logprobs, drafts, half characters and stop strings; `engine` is
planning and settling, with a device that answers at once. Milliseconds: taking in a batch with 400 tokens
of prompt each, and what is left to do after the last step. Microseconds a step (`steps`): all that the host
does from one step to the next while everybody decodes, as on a GPU, but for the driver's own calls: plain,
with n-gram drafts that rarely stand (free) and mostly do (copy), without logprobs and with 0, 5 and 20.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.fake_device import Pretence
from common.measure import finish

from draftproof import LLM, SamplingParams
from draftproof.engine.step.device_step import QueuedStep, StepTensors
from draftproof.engine.step.result_buffer import ResultWriter
from draftproof.engine.step.step_results import Finish, LogprobColumns, StepResults
from draftproof.metrics import RequestStats
from draftproof.types import (
    ENDED,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    FinishStatus,
    LogprobKind,
    Outcome,
    Request,
)

PARTS = ("generate", "engine", "steps")
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
VOCAB = 32768
PROMPT = 400
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


class Words:
    """As much of a tokenizer as LLM needs: the ids from 30000 on are halves of a character."""

    eos_token_ids = (2,)
    special_ids = frozenset({1, 2})
    strip_left = 0

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= 30000:
            return (b"\xc3", b"\xa9")[token_id % 2]
        return f" w{token_id}".encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


class Scripted:
    """An engine whose steps were made up beforehand; all else is the real one's."""

    def __init__(self, engine: Any, steps: list[tuple[np.ndarray, Any]], sources: tuple[str, ...]) -> None:
        self.real = engine
        self.steps = steps
        self.sources = sources
        self.requests: list[Request] = []
        self.at = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def add(self, request: Request, max_length: int | None = None) -> RequestStats:
        self.requests.append(request)
        return RequestStats()

    def abort(self, request_id: str) -> bool:
        return False

    def step(self) -> StepResults:
        table, columns = self.steps[self.at]
        self.at += 1
        last = self.at == len(self.steps)
        endings = {i: Finish("length") for i in range(len(self.requests))} if last else {}
        return StepResults(list(self.requests), table, columns, self.sources, None, endings)


class Instant:
    """A device that has committed one token a request before it was asked."""

    def __init__(self, device: Any) -> None:
        self.real = device
        self.length = torch.zeros(len(device.slots.requests), dtype=torch.int64).numpy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def run(self, planned: Any, *rest: Any) -> QueuedStep:
        host, slots = self.real.slots, planned.slots
        for sequence in planned.admitted:
            self.length[sequence.slot] = len(sequence.request.prompt_token_ids)
        parts = ResultWriter(torch.zeros(1 << 16, dtype=torch.uint8))
        tensor = parts.add_table(len(host.requests), TOKENS + 2)
        table = tensor.numpy()
        n = len(slots)
        table[:n, NUM_OUT] = planned.samples
        table[:n, TOKENS] = 7
        self.length[slots] += planned.samples
        table[:n, ENDED] = np.where(self.length[slots] >= self.limit[slots], FinishStatus.LENGTH, 0)
        outcome = Outcome(tensor, None, None)  # type: ignore[arg-type]
        none = None, None, None, None, None
        return QueuedStep(StepTensors(outcome, *none, parts.packed()), None)  # type: ignore[arg-type]


def build(batch: int, **options: Any) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        shared = {"load_format": "dummy", "device": "cpu", "max_num_seqs": batch, "max_model_len": 2048}
        llm = LLM(folder, max_num_batched_tokens=4096, **shared, **options)
    llm.tokenizer = Words()  # type: ignore[assignment]
    return llm


def made_up(batch: int, tokens: int, top: int | None, drafts: int = 0, halves: float = 0.0) -> list[Any]:
    """A step each of `batch` requests that commit one token, or with drafts one to drafts + 1."""
    draw, steps = np.random.default_rng(5), []
    done = 0
    while done < tokens:
        table = np.zeros((batch, TOKENS + drafts + 1), np.int64)
        stood = draw.integers(0, drafts + 1)
        table[:, NUM_OUT], table[:, NUM_DRAFT], table[:, NUM_ACCEPTED] = stood + 1, drafts, stood
        table[:, TOKENS:] = draw.integers(3, 20000, (batch, drafts + 1))
        if halves:
            table[:, TOKENS:][draw.random((batch, drafts + 1)) < halves] = 30001
        table[:, PICK] = np.arange(batch) * (stood + 1)
        columns = {}
        if top is not None:
            count, wide = batch * (int(stood) + 1), next(w for w in (0, 8, 32, 64) if w >= top)
            values = -draw.random((count, wide + 1), np.float32)
            ids, ranks = draw.integers(0, VOCAB, (count, wide)), draw.integers(1, 9, count)
            columns[LogprobKind.RAW] = LogprobColumns(values, ids, ranks)
        steps.append((table, columns))
        done += int(stood) + 1
    return steps


def generate(llm: LLM, steps: list[Any], batch: int, params: SamplingParams) -> tuple[float, float, float]:
    """Seconds: taking in, all steps, and of these after the last results came."""
    real = llm.engine
    prompts = [{"prompt_token_ids": [3 + (i + j) % 9000 for j in range(PROMPT)]} for i in range(batch)]
    llm.tracker.engine = Scripted(real, steps, ("ngram",))  # type: ignore[assignment]
    try:
        begin = time.thread_time()
        jobs = [llm._open_job(prompt, params) for prompt in prompts]
        llm._add(deque(jobs))
        ready = time.thread_time()
        for _ in steps[:-1]:
            llm.tracker.step()
        last = time.thread_time()
        llm.tracker.step()
        results = [llm.tracker.result(job) for job in jobs]
        done = time.thread_time()
        assert all(r.finished for r in results) and not llm.tracker.table.num_open
        for job in jobs:
            llm.tracker.drop(job)
    finally:
        llm.tracker.engine = real
    return ready - begin, done - ready, done - last


def engine_only(llm: LLM, batch: int, tokens: int) -> tuple[float, float, float]:
    """Seconds: adding, the first step, all others; with a device that takes no time."""
    engine = llm.engine
    loop = engine.loop
    instant = loop.device = Instant(loop.device)  # type: ignore[assignment]
    instant.limit = loop.scheduler.mirror.max_length  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [
        Request(id=str(i), prompt_token_ids=[3] * 12, params=params, seed=i, eos_token_ids=(2,))
        for i in range(batch)
    ]
    begin = time.thread_time()
    for request in requests:
        engine.add(request)
    added = time.thread_time()
    engine.step()
    first = time.thread_time()
    while engine.has_work:
        engine.step()
    done = time.thread_time()
    loop.device = instant.real
    return added - begin, first - added, done - first


def between_steps(llm: LLM, device: Pretence, batch: int, top: int | None) -> float:
    """Seconds a step of `LLM.generate` while all decode and nobody ends: of the quickest 16 in a row."""
    params = SamplingParams(max_tokens=256, logprobs=top, ignore_eos=True, temperature=0.0)
    prompts = [{"prompt_token_ids": [3 + (i + j) % 9000 for j in range(50)]} for i in range(batch)]
    jobs = [llm._open_job(prompt, params) for prompt in prompts]
    llm._add(deque(jobs))
    for _ in range(6):
        llm.tracker.step()
    spent = [0.0]
    while llm.tracker.table.num_open == batch and len(spent) < 96:
        begin, pretending = time.thread_time(), device.spent
        llm.tracker.step()
        spent.append(time.thread_time() - begin - (device.spent - pretending))
    total = np.cumsum(spent[:-1])  # the last may have had an end in it
    for job in jobs:
        llm.tracker.drop(job)
    while llm.engine.has_work:
        llm.tracker.step()
    return float((total[16:] - total[:-16]).min()) / 16


def least(runs: list[tuple[float, ...]]) -> list[float]:
    return [min(column) for column in zip(*runs, strict=True)]


def profiled(function: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.runcall(function)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def steps(batches: list[int], rounds: int, profile: bool) -> dict[str, float]:
    """Microseconds a step."""
    kinds: dict[str, tuple[dict[str, Any], float]] = {
        "plain": ({}, 0.0),
        "free": ({"speculative_config": NGRAM}, 0.02),
        "copy": ({"speculative_config": NGRAM}, 0.95),
    }
    us: dict[str, float] = {}
    for kind, (options, stands) in kinds.items():
        for batch in batches:
            llm = build(256, overlap=True, warm_up=False, enable_prefix_caching=False, **options)
            device = Pretence(llm.engine, stands)
            for top in (None, 0, 5, 20):
                go = partial(between_steps, llm, device, batch, top)
                name = f"{kind}, batch {batch}" + ("" if top is None else f", logprobs={top}")
                us[name] = round(1e6 * min(go() for _ in range(rounds + 1)), 1)
                print(f"{name}: {us[name]} us a step", flush=True)
                if profile:
                    profiled(go)
    return us


def generating(llm: LLM, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds a token, and milliseconds."""
    batch, tokens = options.batch, options.tokens
    drafting = build(batch, speculative_config=NGRAM)
    cases: dict[str, tuple[LLM, dict[str, Any], int | None]] = {
        "none": (llm, {}, None),
        "logprobs=5": (llm, {}, 5),
        "logprobs=20": (llm, {}, 20),
        "drafts": (drafting, {"drafts": 5}, None),
        "drafts, logprobs=20": (drafting, {"drafts": 5}, 20),
        "half characters": (llm, {"halves": 0.1}, None),
        "a stop string": (llm, {}, None),
        "a stop string, logprobs=20": (llm, {}, 20),
    }
    us: dict[str, float] = {}
    ms: dict[str, float] = {}
    for name, (target, script, top) in cases.items():
        steps = made_up(batch, tokens, top, **script)
        stop = ["no such text"] if "stop" in name else ()
        params = SamplingParams(max_tokens=tokens, logprobs=top, stop=stop)
        total = batch * sum(int(table[0, NUM_OUT]) for table, _ in steps)
        generate(target, steps, batch, params)  # learn the vocabulary
        runs = [generate(target, steps, batch, params) for _ in range(options.rounds)]
        taken, spent, end = least(runs)
        us[f"generate, {name}"] = round(1e6 * spent / total, 3)
        ms[f"end, {name}"] = round(1e3 * end, 2)
        ms["take in"] = round(1e3 * taken, 2)
        print(f"{name}: {us[f'generate, {name}']} us a token, {ms[f'end, {name}']} ms at the end", flush=True)
        if options.profile == "generate":
            profiled(lambda a=target, b=steps, c=params: generate(a, b, batch, c))
    return us, ms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="of `steps`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--profile", choices=PARTS)
    options = parser.parse_args()
    batch, tokens = options.batch, options.tokens
    us: dict[str, float] = {}
    ms: dict[str, float] = {}
    found: dict[str, Any] = {"batch": batch, "tokens": tokens, "us a token": us, "ms": ms}
    llm = build(batch)
    if "generate" in options.parts:
        for mine, new in zip((us, ms), generating(llm, options), strict=True):
            mine.update(new)
    if "engine" in options.parts:
        added, first, rest = least([engine_only(llm, batch, tokens) for _ in range(options.rounds)])
        us["engine"] = round(1e6 * rest / (batch * (tokens - 1)), 3)
        ms["engine, add"], ms["engine, first step"] = round(1e3 * added, 2), round(1e3 * first, 2)
        if options.profile == "engine":
            profiled(lambda: engine_only(llm, batch, tokens))
    if "steps" in options.parts:  # last: it changes the backend for good
        found["us a step"] = steps(options.batches, options.rounds, options.profile == "steps")
    finish("host", found)


if __name__ == "__main__":
    main()
