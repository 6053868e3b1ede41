"""The promise and the speed on a GPU; the last line of stdout is JSON.

    python bench/gpu.py [--model smollm2-135m] [--parts bits,control,speed,logprobs,fast,floor,profile,…]
                        [--tokens 256] [--batches 1,8,64,256] [--seconds 500]

bits: every request with n-gram and with junk drafts, with and without overlap, in company, in chunks and
arriving midway, against itself plain; some against themselves alone; and its tokens scored again as a prompt.
control: the same comparison with cuBLAS at all row counts must find differences.
speed, logprobs: tokens a second of `LLM.generate`, prefill and detokenising included, sides in turn.
fast: numerics="fast" against "exact". floor: what the memory allows. profile: where a step's time goes.
transformers: its speed and its logits, on the same weights.
Parts that no time is left for are left out and named. Prompts: bench/prompts.py.
With dummy weights (--load-format dummy) a config with tied embeddings repeats its last token, so drafts from
the text stand; with an untied head they fall.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure import finish
from prompts import chat_prompts, copy_prompts

from draftproof import LLM, SamplingParams
from draftproof.propose import Proposer
from draftproof.types import Draft, ProposeBatch, Request, RequestOutput

K = 8
ROUNDS = 3
READ = 4 << 30  # bytes, at most, that the memory's rate is measured on


class Junk(Proposer):
    """Random tokens: nearly all fall."""

    sources = ("junk",)

    def propose(self, batch: ProposeBatch) -> Draft:
        draw = random.Random(sum(batch.lengths))
        vocab = self.env.vocab_size
        return Draft.of([[draw.randrange(vocab) for _ in range(b)] for b in batch.budget], self.env.k)


class Bench:
    """The options, the clock, and engines that are built when they are needed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.monotonic() + options.seconds
        self._llm: tuple[Any, LLM] | None = None

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    def llm(self, method: str = "ngram", **changes: Any) -> LLM:
        """One engine at a time: it takes most of the memory."""
        key = method, tuple(sorted(changes.items()))
        if self._llm is None or self._llm[0] != key:
            self._llm = None
            gc.collect()
            torch.cuda.empty_cache()
            begin, options = time.monotonic(), self.options
            settings = {
                "dtype": "bfloat16",
                "device": "cuda",
                "load_format": options.load_format,
                "max_model_len": options.max_len,
                "max_num_seqs": max(options.batches),
                "enable_prefix_caching": False,  # rounds repeat their prompts
                "speculative_config": {"method": method, "num_speculative_tokens": K},
            }
            self._llm = key, LLM(options.model, **{**settings, **changes})
            print(f"{self._llm[1].engine.describe()}: {time.monotonic() - begin:.1f} s to start", flush=True)
        return self._llm[1]

    def prompts(self, task: str, count: int) -> list[list[int]]:
        llm = self.llm() if self._llm is None else self._llm[1]
        make = {"chat": chat_prompts, "copy": copy_prompts}[task]
        return make(count, llm.engine.limits.vocab_size, llm.tokenizer)


def params_of(count: int, tokens: int, **changes: Any) -> list[SamplingParams]:
    shared = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **changes}
    return [SamplingParams(seed=i, **shared) for i in range(count)]


# --- bits -------------------------------------------------------------------------------------------------


def differing(left: Sequence[RequestOutput], right: Sequence[RequestOutput]) -> int:
    """How many tokens differ, in id or in any bit of a logprob."""
    wrong = 0
    for a, b in zip(left, right, strict=True):
        x, y = a.outputs[0], b.outputs[0]
        wrong += abs(len(x.token_ids) - len(y.token_ids))
        lines = zip(x.token_ids, x.logprobs or [], y.token_ids, y.logprobs or [], strict=False)
        wrong += sum((t, p) != (u, q) for t, p, u, q in lines)
    return wrong


def rescored(llm: LLM, done: Sequence[RequestOutput]) -> tuple[int, int]:
    """(tokens, differing): a generated token's logprob against its own as a prompt token."""
    prompts = [o.prompt_token_ids + o.outputs[0].token_ids for o in done]
    scored = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=5), use_tqdm=False)
    count = wrong = 0
    for before, after in zip(done, scored, strict=True):
        tokens, lines = before.outputs[0].token_ids, before.outputs[0].logprobs or []
        again = (after.prompt_logprobs or [])[len(before.prompt_token_ids) :]
        count += len(tokens)
        wrong += sum(line[t] != other[t] for t, line, other in zip(tokens, lines, again, strict=True))
    return count, wrong


def bits(bench: Bench) -> dict[str, Any]:
    options, cases = bench.options, []
    total = {"tokens checked": 0, "tokens that differ": 0}
    tokens = min(options.tokens, options.bit_tokens)
    batches = options.batches
    plain: dict[Any, list[RequestOutput]] = {}

    def note(name: str, count: int, wrong: int) -> None:
        total["tokens checked"] += count
        total["tokens that differ"] += wrong
        cases.append(f"{name}: {wrong} of {count} differ")
        print(cases[-1], flush=True)

    few = max(1, max(batches) * 3 // 4)  # of the largest batch some arrive midway
    ways = (("ngram", False), (f"{__name__}:Junk", False), ("ngram", True))
    for method, midway in ways[: options.ways]:
        changes = {"max_num_seqs": few, "max_num_batched_tokens": 512} if midway else {}
        llm = bench.llm(method, **changes)
        for batch, heat in product(batches[-1:] if midway else batches, (0.0, 1.0)):
            prompts = bench.prompts("chat", batch)
            prompts[: batch // 2] = bench.prompts("copy", batch // 2)
            asked = {"temperature": heat, "logprobs": 5}
            if (batch, heat) not in plain:
                off = params_of(batch, tokens, speculative=False, **asked)
                plain[batch, heat] = llm.generate(prompts, off, use_tqdm=False)
                some = range(0, batch, max(1, batch // 2))
                alone = [llm.generate([prompts[i]], off[i], use_tqdm=False)[0] for i in some]
                note(f"batch {batch} T {heat} alone", len(alone) * tokens,
                     differing([plain[batch, heat][i] for i in some], alone))  # fmt: skip
                note(f"batch {batch} T {heat} scored again", *rescored(llm, plain[batch, heat]))
            ks = (3,) if midway else (1, 2, 5, 8) if method == "ngram" else (1, 4, 8)
            for k, overlap in product(ks, (True, False) if method == "ngram" else (False,)):
                if bench.late:
                    cases.append(f"batch {batch} T {heat} {method} k {k}: no time left")
                    continue
                llm.engine.loop.overlap = overlap
                wishes = params_of(batch, tokens, speculative={"num_speculative_tokens": k}, **asked)
                wrong = differing(plain[batch, heat], llm.generate(prompts, wishes, use_tqdm=False))
                what = f"{method} k {k} overlap {overlap}" + (" midway, chunks of 512" if midway else "")
                note(f"batch {batch} T {heat} {what}", batch * tokens, wrong)
    return {**total, "cases": cases}


def control(bench: Bench) -> dict[str, Any]:
    """Negative control: with cuBLAS at every row count the same comparison must find differences."""
    llm = bench.llm()
    llm.engine.ops.cublas.mode = "always"
    llm.engine.ops.one_launch = False  # few rows of a small model would not come to it
    llm.engine.loop.device.forget()
    prompts = bench.prompts("chat", 8)
    asked = {"temperature": 1.0, "logprobs": 5}
    many = llm.generate(prompts, params_of(8, 64, speculative=False, **asked), use_tqdm=False)
    alone = [llm.generate([p], q, use_tqdm=False)[0]
             for p, q in zip(prompts, params_of(8, 64, speculative=False, **asked), strict=True)]  # fmt: skip
    bench._llm = None
    return {"tokens": 512, "differ": differing(many, alone)}


# --- speed ------------------------------------------------------------------------------------------------


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, float]:
    begin = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    total = sum(len(o.outputs[0].token_ids) for o in done)
    steps = sum(o.metrics.num_steps for o in done)
    return {"tok/s": total / seconds, "acceptance length": total / steps}


def abreast(
    bench: Bench, sides: dict[str, Callable[[], dict[str, float]]], rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Medians of rounds in which every side has its turn; the first round warms up and does not count."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            one = side()
            if turn:
                found[name].append(one)
        if bench.late and turn:
            break
    return {
        name: {key: round(statistics.median(one[key] for one in many), 3) for key in many[0]}
        for name, many in found.items()
    }


def heat(seconds: float = 1.0) -> None:
    """A GPU that was idle, or had little to do, has a lower clock for a while."""
    x = torch.ones((4096, 4096), dtype=torch.bfloat16, device="cuda")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(50):
            x @ x
        torch.cuda.synchronize()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"speculative": False},
    "ngram": {"speculative": {"num_speculative_tokens": 5}},
}


def compare(
    bench: Bench, task: str, batch: int, sides: dict[str, dict[str, Any]], **engine: Any
) -> dict[str, Any]:
    llm, prompts = bench.llm(**engine), bench.prompts(task, batch)
    heat()
    rounds = 3 * ROUNDS if batch < 64 else ROUNDS + 2  # a short one is shaken more
    calls = {
        name: lambda c=changes: timed(llm, prompts, params_of(batch, bench.options.tokens, **c))
        for name, changes in sides.items()
    }
    found = abreast(bench, calls, rounds)
    print(f"{task} batch {batch}", found, flush=True)
    return found


def speed(bench: Bench) -> dict[str, Any]:
    """Plain and with n-gram drafts, on chat prompts and on the copy task."""
    out = {}
    for task, batch in product(bench.options.tasks, bench.options.batches):
        if not bench.late:
            out[f"{task} {batch}"] = compare(bench, task, batch, SETTINGS)
    return out


def logprobs(bench: Bench) -> dict[str, Any]:
    """What logprobs cost, plain and speculative."""
    out = {}
    for batch, (name, changes) in product(bench.options.batches, SETTINGS.items()):
        if not bench.late:
            sides = {str(n): {**changes, "logprobs": n} for n in (None, 0, 5, 20)}
            out[f"{name} {batch}"] = compare(bench, "chat", batch, sides)
    return out


def fast(bench: Bench) -> dict[str, Any]:
    """Exact numerics against fast ones: decoding, and the prefill of 2048-token prompts."""
    out: dict[str, Any] = {}
    for numerics in ("exact", "fast", "exact", "fast"):
        llm = bench.llm(numerics=numerics)
        for batch in bench.options.batches:
            prompts = bench.prompts("chat", batch)
            params = params_of(batch, bench.options.tokens, **SETTINGS["plain"])
            timed(llm, prompts, params)
            out.setdefault(f"decode {batch}", {}).setdefault(numerics, []).append(
                round(timed(llm, prompts, params)["tok/s"], 1)
            )
        vocab, draw = llm.engine.limits.vocab_size, random.Random(7)
        long = [[draw.randrange(3, vocab) for _ in range(2048)] for _ in range(16)]
        one = params_of(16, 1, speculative=False)
        timed(llm, long, one)
        rate = timed(llm, long, one)["tok/s"] * 2048
        out.setdefault("prefill of 2048", {}).setdefault(numerics, []).append(round(rate))
        print(numerics, {name: line[numerics][-1] for name, line in out.items()}, flush=True)
        if bench.late:
            break
    for line in out.values():
        if "fast" in line:
            line["exact over fast"] = round(max(line["exact"]) / max(line["fast"]), 3)
    return out


# --- where the time goes, and others ----------------------------------------------------------------------


def profile(bench: Bench) -> dict[str, Any]:
    """Step time, share of it that the GPU is busy, and the sum of kernel times, of plain decoding."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    llm, out = bench.llm(), {}
    engine = llm.engine
    for batch in bench.options.batches:
        prompts = bench.prompts("chat", batch)
        params = params_of(batch, 512, speculative=False)
        llm.generate(prompts, params_of(batch, 8, speculative=False), use_tqdm=False)
        for i, ids in enumerate(prompts):
            engine.add(Request(id=f"profile {i}", prompt_token_ids=ids, params=params[i], seed=i))
        while engine.loop.scheduler.waiting or engine.loop.scheduler.host.prompt_left.any():
            engine.step()
        alone = steps_of(engine, 100)
        with watch(activities=[ProfilerActivity.CUDA]) as seen:
            steps_of(engine, 20)
        for i in range(batch):
            engine.abort(f"profile {i}")
        engine.step()
        events = [e for e in seen.key_averages() if e.device_time_total]
        kernels = sum(e.device_time_total for e in events) / 20
        events.sort(key=lambda e: -e.device_time_total)
        out[str(batch)] = {
            "step us": round(alone * 1e6, 1),
            "sum of kernels us": round(kernels, 1),
            "sum over step": round(kernels / alone / 1e6, 3),
            "kernels": {e.key[:60]: [round(e.device_time_total / 20, 1), e.count / 20] for e in events[:16]},
        }
        print("profile", batch, out[str(batch)], flush=True)
    return out


def steps_of(engine: Any, count: int) -> float:
    """Seconds of a step, of `count` in a row."""
    for _ in range(5):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def floor(bench: Bench) -> dict[str, Any]:
    """Tokens a second at batch 1 if a step did nothing but read the weights, at the rate measured here.

    That is the rate of a plain reduction over one large piece of memory, longer than its start and its end.
    """
    llm = bench.llm()
    model, ops = llm.engine.runner.model, llm.engine.ops
    layers = [layer for block in model.layers for layer in (block.qkv, block.out, block.gate_up, block.down)]
    weights = [packed.weight for packed in (*layers, model.head)]
    size = sum(w.numel() * w.element_size() for w in weights)
    held = max((*weights, *llm.engine.runner.caches), key=lambda t: t.numel() * t.element_size())
    large = held.view(-1).view(torch.int64)[: READ >> 3]
    seconds = min(ops.seconds(reader, 10) for reader in (large.max, large.view(torch.float32).amax))
    rate = large.numel() * 8 / seconds
    found = {"weights": size, "GB/s": round(rate / 1e9), "tok/s": round(rate / size, 1)}
    print("floor", found, flush=True)
    return found


def transformers(bench: Bench) -> dict[str, Any]:
    """The same weights in transformers on the same GPU: speed of greedy decoding, and logits."""
    from peer import side_by_side

    llm, kind = bench.llm(), bench.options.load_format
    return side_by_side(llm, bench.prompts("chat", 8), bench.options.tokens, load_format=kind)


PARTS = {f.__name__: f for f in (bits, control, speed, logprobs, fast, floor, profile, transformers)}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["chat", "copy"])
    parser.add_argument("--ways", type=int, default=3, help="bits: 1 n-gram drafts, 2 and junk, 3 and midway")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--bit-tokens", type=int, default=96)
    parser.add_argument("--max-len", type=int, default=2304)
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256]
    )
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--save", type=Path, help="write what is found after every part")
    options = parser.parse_args()
    bench = Bench(options)
    found: dict[str, Any] = {"model": options.model}
    for name in options.parts:
        begin = time.monotonic()
        found[name] = "no time left" if bench.late else PARTS[name](bench)
        print(f"== {name}: {time.monotonic() - begin:.0f} s", flush=True)
        if options.save:
            options.save.write_text(json.dumps(found))
    finish("gpu", found)


if __name__ == "__main__":
    main()
