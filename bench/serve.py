"""What the server costs: throughput beside LLM.generate, the way of a first token, many streams at once.

    python bench/serve.py overhead --streams 8     # served and offline in turn, the same prompts and seeds
    python bench/serve.py first                    # a lone request's first token, from engine to client
    python bench/serve.py load --streams 256 --logprobs 5 --server-processes 6 --client-processes 4

Clients are processes of their own that count tokens and parse nothing else. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TOPICS = ("rivers", "bread", "clocks", "whales", "bridges", "violins", "glaciers", "maps", "tea", "comets")


def prompt(i: int) -> str:
    topic, years = TOPICS[i % len(TOPICS)], i % 7 + 8
    return f"Write number {i}, a short essay about {topic}, for a class of {years} years. Essay:"


def wish(i: int, options: argparse.Namespace) -> dict[str, Any]:
    made = {
        "prompt": prompt(i),
        "max_tokens": options.tokens,
        "seed": i,
        "temperature": 0.7,
        "ignore_eos": True,
    }
    if options.logprobs is not None:
        made["logprobs"] = options.logprobs
    return made


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "draftproof",
        "serve",
        options.model,
        "--port",
        "0",
        "--log-level",
        "warning",
    ]
    command += ["--device", options.device, "--speculative-config", options.speculative_config]
    command += ["--max-num-seqs", str(options.seats), "--max-model-len", str(options.max_model_len)]
    command += ["--server-processes", str(options.server_processes), "--max-concurrent", "4096"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://\S+?:(\d+)/v1", line):
                break
        else:
            raise SystemExit("the server did not start")
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


# --- clients ----------------------------------------------------------------------------------------------


async def read_stream(port: str, body: dict[str, Any]) -> dict[str, Any]:
    """Tokens, when each write came, and what the last event says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port), limit=1 << 22)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps({**body, **more}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    began = time.perf_counter()
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    first, tokens, last = 0.0, 0, b""
    while part := await reader.read(1 << 18):
        if not first and b"data: " in last[-10:] + part:
            first = time.perf_counter()
        tokens += (last[-6:] + part).count(b"data: {") - last[-6:].count(b"data: {")
        last = (last + part)[-8192:]
    writer.close()
    assert b"[DONE]" in last, last[-500:]
    metrics = json.loads(re.findall(rb'"metrics":(\{.*\})\}', last)[-1])
    return {"tokens": tokens - 1, "first": first - began, "end": time.perf_counter(), "metrics": metrics}


def client(port: str, bodies: list[dict[str, Any]], gate: Any, results: Any) -> None:
    async def main() -> list[dict[str, Any]]:
        return await asyncio.gather(*(read_stream(port, body) for body in bodies))

    gate.wait()
    began = time.perf_counter()
    found = asyncio.run(main())
    results.put((began, max(each["end"] for each in found), found))


def rush(port: str, bodies: list[dict[str, Any]], processes: int) -> tuple[float, list[dict[str, Any]]]:
    """All at once, by several processes; seconds from the first request to the last token."""
    context = multiprocessing.get_context("spawn")
    gate, results = context.Barrier(processes), context.Queue()
    parts = [bodies[i::processes] for i in range(processes)]
    workers = [context.Process(target=client, args=(port, part, gate, results)) for part in parts]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    seconds = max(end for _, end, _ in found) - min(began for began, _, _ in found)
    return seconds, [each for _, _, several in found for each in several]


# --- measurements -----------------------------------------------------------------------------------------


def load(options: argparse.Namespace) -> dict[str, Any]:
    rates, firsts = [], []
    with server(options) as port:
        for number in range(options.rounds + 1):
            bodies = [wish(i, options) for i in range(options.streams)]
            seconds, found = rush(port, bodies, options.client_processes)
            if number:  # the first compiles and fills caches
                rates.append(sum(each["tokens"] for each in found) / seconds)
                firsts += [each["first"] for each in found]
                print(f"{rates[-1]:.0f} tokens a second", file=sys.stderr)
    firsts.sort()
    return {
        "tokens_per_second": statistics.median(rates),
        "rounds": rates,
        "first_token_p50": firsts[len(firsts) // 2],
        "first_token_p99": firsts[int(len(firsts) * 0.99)],
    }


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """In turn, so that both have the same machine: the server sleeps while the offline engine works."""
    from draftproof import LLM, SamplingParams

    config = None if options.speculative_config == "off" else json.loads(options.speculative_config)
    llm = LLM(
        options.model,
        device=options.device,
        max_num_seqs=options.seats,
        max_model_len=options.max_model_len,
        speculative_config=config,
        enable_prefix_caching=False,
    )
    offline, served = [], []
    with server(options) as port:
        for number in range(options.rounds + 1):
            wishes = [wish(number * options.streams + i, options) for i in range(options.streams)]
            params = [SamplingParams(**{k: v for k, v in each.items() if k != "prompt"}) for each in wishes]
            began = time.perf_counter()
            outputs = llm.generate([each["prompt"] for each in wishes], params, use_tqdm=False)
            plain = sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - began)
            seconds, found = rush(port, wishes, options.client_processes)
            behind = sum(each["tokens"] for each in found) / seconds
            if number:
                offline.append(plain)
                served.append(behind)
                print(f"offline {plain:.1f}, served {behind:.1f} tokens a second", file=sys.stderr)
    ratios = [b / a for a, b in zip(offline, served, strict=True)]
    return {"offline": offline, "served": served, "ratios": ratios, "ratio": statistics.median(ratios)}


def first(options: argparse.Namespace) -> dict[str, Any]:
    """What lies between the engine's own time to a first token and the client's."""
    between = []
    with server(options) as port:
        for number in range(options.rounds + 3):
            found = asyncio.run(read_stream(port, {**wish(number, options), "cache_salt": str(number)}))
            if number >= 3:
                between.append(found["first"] - found["metrics"]["first_token_seconds"])
    between.sort()
    return {
        "median_ms": 1000 * statistics.median(between),
        "largest_ms": 1000 * between[-1],
        "count": len(between),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "first", "load"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--speculative-config", default="off")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seats", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-processes", type=int, default=1)
    parser.add_argument("--client-processes", type=int, default=1)
    options = parser.parse_args()
    result = {"overhead": overhead, "first": first, "load": load}[options.what](options)
    print(json.dumps({**vars(options), **result}))


if __name__ == "__main__":
    main()
