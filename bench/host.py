"""Host time at a large batch, without the device; the last line of stdout is JSON.

    python bench/host.py [--batch 256] [--tokens 256] [--rounds 5] [--parts generate engine steps]
                         [--policy] [--profile generate|engine|steps]

Thread time, so that a busy machine disturbs little, and the fastest of the rounds. Microseconds a token:
`generate` is the part of LLM, from prepared steps to finished outputs, without and with logprobs, drafts,
split characters and stop strings; `engine` is the plan and the results of a step, with an instant device.
Milliseconds: adding a batch with 400 tokens of prompt each, and the work after the last step. Microseconds a
step (`steps`): all host work from one step to the next while all requests decode, as on a GPU without the
driver's calls: plain, with n-gram drafts that are rarely (free) or mostly accepted (copy), without logprobs
with 0, 5 and 20, with logprobs of the drafts, and with 8 named ids. `--policy`: in addition the part of
`decide` and `observe` of the draft policy in it.
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
from common.fake_device import FakeDevice
from common.measure import finish

from draftproof import LLM, SamplingParams
from draftproof.engine.step.device_step import StepTensors
from draftproof.engine.step.result_buffer import PackedResults
from draftproof.engine.step.step_results import Finish, LogprobColumns, StepResults
from draftproof.metrics import RequestStats
from draftproof.outputs import DraftColumns
from draftproof.types import (
    FINISH_STATUS,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    FinishStatus,
    LogprobKind,
    Request,
)

PARTS = ("generate", "engine", "steps")
STEP_SIDES: dict[str, dict[str, Any]] = {
    "none": {},
    **{f"logprobs={top}": {"logprobs": top} for top in (0, 5, 20)},
    "drafts": {"logprobs": 0, "include_draft_logprobs": True},
    "named ids": {"logprob_token_ids": list(range(100, 900, 100))},
}
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
    """Part of a tokenizer that LLM needs; ids from 30000 on are halves of a character."""

    eos_token_ids = (2,)
    special_ids = frozenset({1, 2})
    strip_left = 0

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= 30000:
            return (b"\xc3", b"\xa9")[token_id % 2]
        return f" w{token_id}".encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


class ReplayEngine:
    """Engine that returns prepared step results; other methods are those of the real engine."""

    def __init__(
        self, engine: Any, steps: list[tuple[np.ndarray, Any, DraftColumns | None]], sources: tuple[str, ...]
    ) -> None:
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
        table, columns, drafts = self.steps[self.at]
        self.at += 1
        last = self.at == len(self.steps)
        endings = {i: Finish("length") for i in range(len(self.requests))} if last else {}
        requests = list(self.requests)
        return StepResults(requests, table, columns, self.sources, None, endings, drafts=drafts)


class InstantDevice:
    """Device that commits one token a request without computing anything."""

    def __init__(self, device: Any) -> None:
        self.real = device
        self.length = torch.zeros(len(device.slots.requests), dtype=torch.int64).numpy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def run(self, planned: Any, *rest: Any) -> tuple[StepTensors, None]:
        host, slots = self.real.slots, planned.slots
        for sequence in planned.admitted:
            self.length[sequence.slot] = len(sequence.request.prompt_token_ids)
        parts = PackedResults(torch.zeros(1 << 16, dtype=torch.uint8))
        tensor = parts.add_table(len(host.requests), TOKENS + 2)
        table = tensor.numpy()
        n = len(slots)
        table[:n, NUM_OUT] = planned.is_sampled
        table[:n, TOKENS] = 7
        self.length[slots] += planned.is_sampled
        table[:n, FINISH_STATUS] = np.where(self.length[slots] >= self.limit[slots], FinishStatus.LENGTH, 0)
        return StepTensors(None, None, None, None, parts.complete()), None  # type: ignore[arg-type]


def build(batch: int, **options: Any) -> LLM:
    """Build an LLM of a tiny model with dummy weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        shared = {"load_format": "dummy", "device": "cpu", "max_num_seqs": batch, "max_model_len": 2048}
        llm = LLM(folder, max_num_batched_tokens=4096, **shared, **options)
    llm.tokenizer = Words()  # type: ignore[assignment]
    return llm


def scripted_steps(
    batch: int,
    tokens: int,
    top: int | None,
    drafts: int = 0,
    halves: float = 0.0,
    named: int = 0,
    records: bool = False,
) -> list[Any]:
    """Return steps of `batch` requests that commit one token each, or with drafts 1 to drafts + 1.

    named: ids with logprobs. records: all drafts are reported, with the drafter's logprobs and ranks.
    """
    draw, steps = np.random.default_rng(5), []
    done = 0
    while done < tokens:
        table = np.zeros((batch, TOKENS + drafts + 1), np.int64)
        accepted = draw.integers(0, drafts + 1)
        table[:, NUM_OUT], table[:, NUM_DRAFT], table[:, NUM_ACCEPTED] = accepted + 1, drafts, accepted
        table[:, TOKENS:] = draw.integers(3, 20000, (batch, drafts + 1))
        if halves:
            table[:, TOKENS:][draw.random((batch, drafts + 1)) < halves] = 30001
        table[:, PICK] = np.arange(batch) * (accepted + 1)
        columns = {}
        if top is not None:
            count, wide = batch * (int(accepted) + 1), next(w for w in (0, 8, 32, 64) if w >= top)
            values = -draw.random((count, wide + 1), np.float32)
            ids, ranks = draw.integers(0, VOCAB, (count, wide)), draw.integers(1, 9, count)
            columns[LogprobKind.RAW] = LogprobColumns(values, ids, ranks)
            if named:
                columns[LogprobKind.RAW].named_values = -draw.random((count, named), np.float32)
                columns[LogprobKind.RAW].named_ranks = draw.integers(1, 9, (count, named))
        steps.append((table, columns, reported_drafts(table, done, draw) if records else None))
        done += int(accepted) + 1
    return steps


def reported_drafts(table: np.ndarray, start: int, draw: np.random.Generator) -> DraftColumns:
    """Return the drafts of a step in which all requests have the same number; start: index in the output."""
    entry = np.repeat(np.arange(len(table)), table[:, NUM_DRAFT])
    place = np.tile(np.arange(table[0, NUM_DRAFT]), len(table))
    return DraftColumns(
        entry=entry,
        token=draw.integers(3, 20000, len(entry)),
        position=start + place,
        source=np.zeros(len(entry), np.int8),
        accepted=place < table[entry, NUM_ACCEPTED],
        draft_logprob=-draw.random(len(entry), np.float32),
        target_logprob=-draw.random(len(entry), np.float32),
        rank=draw.integers(1, 9, len(entry)),
        top_width=np.zeros(len(entry), np.int64),
        top_ids=np.zeros((len(entry), 0), np.int64),
        top_logprobs=np.zeros((len(entry), 0), np.float32),
    )


def generate(llm: LLM, steps: list[Any], batch: int, params: SamplingParams) -> tuple[float, float, float]:
    """Return seconds: adding, all steps, and the part of these after the last results."""
    real = llm.engine
    prompts = [{"prompt_token_ids": [3 + (i + j) % 9000 for j in range(PROMPT)]} for i in range(batch)]
    llm.tracker.engine = ReplayEngine(real, steps, ("ngram",))  # type: ignore[assignment]
    try:
        begin = time.thread_time()
        jobs = [llm._open_job(llm._new_job(prompt, params)) for prompt in prompts]
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
    """Return seconds: adding, the first step, all others; with an instant device."""
    engine = llm.engine
    loop = engine.loop
    instant = loop.device = InstantDevice(loop.device)  # type: ignore[assignment]
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


def between_steps(llm: LLM, device: FakeDevice, batch: int, side: dict[str, Any]) -> float:
    """Return seconds a step of `LLM.generate` while all requests decode: the fastest 16 in a row."""
    params = SamplingParams(max_tokens=256, ignore_eos=True, temperature=0.0, **side)
    prompts = [{"prompt_token_ids": [3 + (i + j) % 9000 for j in range(50)]} for i in range(batch)]
    jobs = [llm._open_job(llm._new_job(prompt, params)) for prompt in prompts]
    llm._add(deque(jobs))
    for _ in range(6):
        llm.tracker.step()
    spent = [0.0]
    while llm.tracker.table.num_open == batch and len(spent) < 96:
        begin, device_before = time.thread_time(), device.spent
        llm.tracker.step()
        spent.append(time.thread_time() - begin - (device.spent - device_before))
    total = np.cumsum(spent[:-1])  # a request may have finished in the last one
    for job in jobs:
        llm.tracker.drop(job)
    while llm.engine.has_work:
        llm.tracker.step()
    return float((total[16:] - total[:-16]).min()) / 16


def least(runs: list[tuple[float, ...]]) -> list[float]:
    """Return the minimum of each figure over the runs."""
    return [min(column) for column in zip(*runs, strict=True)]


def profiled(function: Callable[[], object]) -> None:
    """Print a profile of one call."""
    profile = cProfile.Profile()
    profile.runcall(function)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


class PolicyClock:
    """Thread time of the draft policy's `decide` and `observe`."""

    def __init__(self, policy: Any) -> None:
        """Time the two methods of `policy` from now on."""
        self.seconds, self.calls = 0.0, 0
        policy.decide, policy.observe = self._timed(policy.decide, 1), self._timed(policy.observe, 0)

    def _timed(self, method: Callable[..., Any], step: int) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            begin = time.thread_time()
            result = method(*given)
            self.seconds, self.calls = self.seconds + time.thread_time() - begin, self.calls + step
            return result

        return timed


def steps(batches: list[int], rounds: int, profile: bool, policy: bool) -> dict[str, float]:
    """Return microseconds a step."""
    kinds: dict[str, tuple[dict[str, Any], float]] = {
        "plain": ({}, 0.0),
        "free": ({"speculative_config": NGRAM}, 0.02),
        "copy": ({"speculative_config": NGRAM}, 0.95),
    }
    us: dict[str, float] = {}
    for kind, (options, acceptance) in kinds.items():
        for batch in batches:
            llm = build(256, overlap=True, warm_up=False, enable_prefix_caching=False, **options)
            device = FakeDevice(llm.engine, acceptance)
            clock = PolicyClock(llm.engine.loop.policy) if policy else None
            for side, changes in STEP_SIDES.items():
                go = partial(between_steps, llm, device, batch, changes)
                name = f"{kind}, batch {batch}" + ("" if side == "none" else f", {side}")
                us[name] = round(1e6 * min(go() for _ in range(rounds + 1)), 1)
                print(f"{name}: {us[name]} us a step", flush=True)
                if profile:
                    profiled(go)
            if clock is not None and clock.calls:  # mean over all steps of this engine
                us[f"{kind}, batch {batch}, policy"] = round(1e6 * clock.seconds / clock.calls, 1)
                print(f"{kind}, batch {batch}: {1e6 * clock.seconds / clock.calls:.1f} us in the policy")
    return us


def generating(llm: LLM, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Return microseconds a token, and milliseconds."""
    batch, tokens = options.batch, options.tokens
    drafting = build(batch, speculative_config=NGRAM)
    cases: dict[str, tuple[LLM, dict[str, Any], int | None]] = {
        "none": (llm, {}, None),
        "logprobs=5": (llm, {}, 5),
        "logprobs=20": (llm, {}, 20),
        "drafts": (drafting, {"drafts": 5}, None),
        "drafts, logprobs=20": (drafting, {"drafts": 5}, 20),
        "drafts, draft logprobs": (drafting, {"drafts": 5, "records": True}, 0),
        "8 named ids": (llm, {"named": 8}, 0),
        "half characters": (llm, {"halves": 0.1}, None),
        "a stop string": (llm, {}, None),
        "a stop string, logprobs=20": (llm, {}, 20),
    }
    us: dict[str, float] = {}
    ms: dict[str, float] = {}
    for name, (target, script, top) in cases.items():
        steps = scripted_steps(batch, tokens, top, **script)
        stop = ["no such text"] if "stop" in name else ()
        params = SamplingParams(
            max_tokens=tokens,
            logprobs=top,
            stop=stop,
            logprob_token_ids=range(100, 900, 100) if "named" in script else None,
            include_draft_logprobs="records" in script,
        )
        total = batch * sum(int(table[0, NUM_OUT]) for table, *_ in steps)
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
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="of `steps`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--policy", action="store_true", help="of `steps`: time of the draft policy")
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
        found["us a step"] = steps(
            options.batches, options.rounds, options.profile == "steps", options.policy
        )
    finish("host", found)


if __name__ == "__main__":
    main()
