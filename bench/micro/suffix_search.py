"""Cost of suffix drafts; the last line of stdout is JSON.

    python bench/micro/suffix_search.py [--device cpu] [--rounds 9]

Thread time on the CPU, device time on a GPU, and the fastest of the rounds. Microseconds: `search` is the op
for a step with a full pool and texts of 500 tokens; `store` adds one output to the pool; `host` is the host
time of a step with an instant device: without drafts, with n-gram and with suffix drafts, and outputs of 64
tokens that are learned. If the package arctic-inference is installed, also its trees, with vLLM's depth.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import time
from collections.abc import Callable
from typing import Any

import host
import numpy as np
import torch
from common.measure import finish

from draftproof import SamplingParams
from draftproof.engine.slots import Slots
from draftproof.ops import Ops, resolve
from draftproof.ops.contract.draft_search import SuffixOptions
from draftproof.propose.suffix_pool import Pool
from draftproof.types import DeviceBatch, Request

BATCHES = (1, 8, 64, 256)
K, VOCAB, LENGTH = 8, 49152, 500
RULE = SuffixOptions(1, 1.5, 0.15)


def texts(number: int, length: int, seed: int) -> np.ndarray:
    """Return texts [number, length] of words by frequency, in phrases that recur."""
    draw = np.random.default_rng(seed)
    phrases = np.minimum(draw.zipf(1.2, (4000, 8)), VOCAB - 1)
    chosen = phrases[np.minimum(draw.zipf(1.3, (number, length // 8 + 1)), 3999)]
    return chosen.reshape(number, -1)[:, :length].astype(np.int64)


def fastest(function: Callable[[], object], rounds: int, times: int = 5) -> float:
    """Return the microseconds of one call."""
    spent = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(times):
            function()
        spent.append((time.thread_time() - begin) / times)
    return round(1e6 * min(spent), 1)


def store(pool: Pool, ids: np.ndarray) -> None:
    """Add an output with a prompt of 32 tokens to the pool, on the device too."""
    pool.add(None, ids, 32)
    pool.store()
    pool.send()


def filled(ops: Ops) -> tuple[Slots, Pool]:
    """Return slots with texts, and a full pool."""
    slots, pool = Slots(max(BATCHES), 2048, K, 1, 64, ops), Pool(ops, max(BATCHES), 1 << 19, 1e9)
    for line in texts(2600, 240, 1):
        store(pool, line)
    columns = slots.columns
    columns.tokens[:, :LENGTH] = torch.from_numpy(texts(max(BATCHES), LENGTH, 2)).to(ops.device)
    columns.length.fill_(LENGTH)
    for slot in range(max(BATCHES)):
        pool.set_owner(slot, None)
    pool.send()
    return slots, pool


def search(ops: Ops, rounds: int) -> dict[str, Any]:
    """Return microseconds of both searches and of adding to the pool."""
    slots, pool = filled(ops)
    found: dict[str, Any] = {}
    for batch in BATCHES:
        at = torch.arange(batch, device=ops.device)
        batched = DeviceBatch(slots.columns, at, torch.full_like(at, K))
        for name, call in (
            ("suffix", lambda given=batched: ops.search.search_suffix(given, pool.device, RULE)),
            ("ngram", lambda given=batched: ops.search.search_ngram(given, 2, 5)),
        ):
            call()
            on_device = ops.device.type != "cpu"
            took = 1e6 * ops.runtime.seconds(ops.runtime.graph(call)) if on_device else fastest(call, rounds)
            found[f"{name}, batch {batch}"] = round(took, 1)
    draw = iter(texts(10 * rounds, 192, 3))

    found["store, an output of 160 tokens"] = fastest(lambda: store(pool, next(draw)), rounds)
    return found


def engine(rounds: int) -> dict[str, float]:
    """Return the microseconds of the host per step, while requests start and finish."""
    found = {}
    for batch in BATCHES:
        for method in (None, "ngram", "suffix"):
            spec = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
            llm = host.build(batch, speculative_config=spec if method else None, overlap=True)
            spent = []
            for _ in range(rounds):
                steps, took = run(llm, batch)
                spent.append(took / steps)
            found[f"{method or 'no drafts'}, batch {batch}"] = round(1e6 * min(spent), 1)
    return found


def run(llm: Any, batch: int) -> tuple[int, float]:
    """Run three requests for each slot; return steps and seconds."""
    core = llm.engine
    loop = core.loop
    instant = loop.device = host.InstantDevice(loop.device)
    instant.limit = loop.scheduler.mirror.max_length
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    for i in range(3 * batch):
        ids = [3 + i % 7] * 12
        core.add(Request(id=str(i), prompt_token_ids=ids, params=params, seed=i, eos_token_ids=(2,)))
    steps, begin = 0, time.thread_time()
    while core.has_work:
        core.step()
        steps += 1
    took = time.thread_time() - begin
    loop.device = instant.real
    return steps, took


def arctic(rounds: int) -> dict[str, float]:
    """Return the microseconds of arctic-inference."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(24, 10_000)
    for i, line in enumerate(texts(2600, 240, 1).astype(np.int32)):
        cache.start_request(i, line[:32])
        cache.add_active_response(i, line[32:])
        cache.stop_request(i)
    outputs = texts(max(BATCHES), LENGTH, 2).astype(np.int32)
    for i, line in enumerate(outputs):
        cache.start_request(("q", i), line[:-100])
        cache.add_active_response(("q", i), line[-100:])
    found = {}
    for batch in BATCHES:

        def step(batch: int = batch) -> None:
            for i in range(batch):
                cache.speculate(("q", i), outputs[i, -24:], max_spec_tokens=K)

        found[f"speculate, batch {batch}"] = fastest(step, rounds, 1)
        one = np.array([7], np.int32)

        def add(batch: int = batch, one: np.ndarray = one) -> None:
            for i in range(batch):
                cache.add_active_response(("q", i), one)

        found[f"add a token, batch {batch}"] = fastest(add, rounds, 1)
    return found


def main() -> None:
    """Measure all parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ops = resolve("auto", torch.device(options.device))
    figures: dict[str, Any] = {"search": search(ops, options.rounds)}
    print(figures["search"], flush=True)
    if options.device == "cpu":
        figures["host"] = engine(options.rounds)
        print(figures["host"], flush=True)
        try:
            figures["arctic"] = arctic(options.rounds)
        except ImportError:
            print("arctic-inference is not installed")
    finish("suffix_search", {"us": figures})


if __name__ == "__main__":
    main()
