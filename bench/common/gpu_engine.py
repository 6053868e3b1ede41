"""Shared parts of `gpu.py`: options, time limit, one engine at a time, a timed call."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from common.prompts import chat_prompts, copy_prompts

from draftproof import LLM, SamplingParams
from draftproof.types import Request

K = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"speculative": False},
    "ngram": {"speculative": {"num_speculative_tokens": 5}},
}


class Bench:
    """Options, time limit, and an engine that is built when it is needed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.monotonic() + options.seconds
        self._llm: tuple[Any, LLM] | None = None

    @property
    def is_time_up(self) -> bool:
        """Return whether the time is used up."""
        return time.monotonic() > self.until

    def llm(self, method: str = "ngram", **changes: Any) -> LLM:
        """Return an engine; only one is kept, since it takes most of the memory."""
        key = method, tuple(sorted(changes.items()))
        if self._llm is None or self._llm[0] != key:
            self.drop()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            begin, options = time.monotonic(), self.options
            settings = {
                "dtype": "bfloat16",
                "device": options.device,
                "load_format": options.load_format,
                "quantization": options.quantization,
                "max_model_len": options.max_len,
                "max_num_seqs": max(options.batches),
                "kv_cache_dtype": options.kv_cache_dtype,
                "enable_prefix_caching": False,  # rounds repeat their prompts
                "speculative_config": {"method": method, "num_speculative_tokens": K},
            }
            self._llm = key, LLM(options.model, **{**settings, **changes})
            print(f"{self._llm[1].engine.describe()}: {time.monotonic() - begin:.1f} s to start", flush=True)
        return self._llm[1]

    def drop(self) -> None:
        """Free the engine: its memory is needed, or it was changed permanently."""
        self._llm = None
        gc.collect()

    def prompts(self, task: str, count: int) -> list[list[int]]:
        """Return prompts of a task."""
        llm = self.llm() if self._llm is None else self._llm[1]
        make = {"chat": chat_prompts, "copy": copy_prompts}[task]
        return make(count, llm.engine.limits.vocab_size, llm.tokenizer)


def params_of(count: int, tokens: int, **changes: Any) -> list[SamplingParams]:
    """Return greedy params of `count` requests with `tokens` tokens each."""
    shared = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **changes}
    return [SamplingParams(seed=i, **shared) for i in range(count)]


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, float]:
    """Return the speed and the acceptance length of `LLM.generate`."""
    begin = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    total = sum(len(o.outputs[0].token_ids) for o in done)
    steps = sum(o.metrics.num_steps for o in done)
    return {"tok/s": total / seconds, "acceptance length": total / steps}


def warm_clock(seconds: float = 1.0) -> None:
    """Keep the GPU busy: after idle time its clock is lower for a while."""
    if not torch.cuda.is_available():
        return
    x = torch.ones((4096, 4096), dtype=torch.bfloat16, device="cuda")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(50):
            x @ x
        torch.cuda.synchronize()


@contextmanager
def decoding(engine: Any, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[None]:
    """Add requests, compute their prompts, and abort the requests at the end."""
    for i, ids in enumerate(prompts):
        engine.add(Request(id=f"decoding {i}", prompt_token_ids=ids, params=params[i], seed=i))
    while engine.loop.scheduler.waiting or engine.loop.scheduler.mirror.prompt_left.any():
        engine.step()
    yield
    for i in range(len(prompts)):
        engine.abort(f"decoding {i}")
    engine.step()


def kernels_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, Any]:
    """Return the time of a step while all requests decode, and time and count of each kernel in it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    steps = 20
    llm.generate(prompts, [replace(one, max_tokens=8) for one in params], use_tqdm=False)
    with decoding(llm.engine, prompts, params):
        alone = steps_of(llm.engine, 100)
        with watch(activities=[ProfilerActivity.CUDA]) as seen:
            steps_of(llm.engine, steps - 5)
    events = sorted(
        (e for e in seen.key_averages() if e.device_time_total), key=lambda e: -e.device_time_total
    )
    kernels = sum(e.device_time_total for e in events) / steps
    return {
        "step us": round(alone * 1e6, 1),
        "sum of kernels us": round(kernels, 1),
        "sum over step": round(kernels / alone / 1e6, 3),
        "kernels": {e.key[:60]: [round(e.device_time_total / steps, 1), e.count / steps] for e in events},
    }


def steps_of(engine: Any, count: int) -> float:
    """Return the seconds of a step, as the mean of `count` in a row."""
    for _ in range(5):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count
