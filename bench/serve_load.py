"""Overhead of the server over the engine, and its throughput; the last line of stdout is JSON.

    python bench/serve_load.py                       on this CPU: against LLM.generate, and the first token
    python bench/serve_load.py --device cuda --servers 8 --streams 256 --tokens 256
    python bench/serve_load.py --device none --servers 1 --streams 64 --tokens 400
    python bench/serve_load.py --old ../draftproof-before --device cuda --servers 6 --streams 256 --tokens 256
                               --clients 4 --rounds 12 [--speculative-config off]

cpu: `LLM.generate` and the server take turns with the same prompts at concurrency 8. cuda: many streams, one
event a token with five logprobs. none: the same with a stub worker, so that the HTTP side is the bottleneck;
tokens per second of its CPU time. The load client is several processes with raw sockets.

--old: a server of another checkout and one of this checkout stay up, each from its own sources, and take
turns of one round, so that a slow phase of the machine affects both. The ratio is the median over rounds of
the new server's tokens per second over the old one's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common.measure import finish
from common.serving.server_process import (
    NGRAM,
    cpu_seconds,
    family_cpu_seconds,
    get,
    request_bytes,
    send_request,
    served,
)

EVENT = b"data: {"
MIN_RATIO = 0.98  # of the new server's speed to the old one's
TOKENS_PER_STREAM = 2048  # of the context and the KV cache when two servers share a device
Where = tuple[str, int]


# --- the client -------------------------------------------------------------------------------------------


class Counting(asyncio.Protocol):
    """Client of one stream that counts events and keeps no data."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request, self._done = request, done
        self._tail = b""
        self.events = 0
        self.first = self.last = 0.0
        self.status = b""

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the events in the data."""
        self.last = time.monotonic()
        if not self.first:
            self.first, self.status = self.last, data[9:12]
        self.events += (self._tail + data).count(EVENT)
        self._tail = data[1 - len(EVENT) :]

    def connection_lost(self, error: Exception | None) -> None:
        """Finish the stream."""
        if not self._done.done():
            self._done.set_result(None)


async def _streams(where: Where, requests: list[bytes], start: float) -> list[Counting]:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(start - time.monotonic(), 0))

    async def one(request: bytes) -> Counting:
        done = loop.create_future()
        _, made = await loop.create_connection(lambda: Counting(request, done), *where)
        await done
        return made

    return await asyncio.gather(*map(one, requests))


def client(where: Where, requests: list[bytes], start: float) -> list[tuple[int, float, float, bytes]]:
    """Run streams in a process of its own; return events, first and last time and status of each."""
    try:
        import uvloop

        runner: Any = uvloop
    except ImportError:
        runner = asyncio
    found = runner.run(_streams(where, requests, start))
    return [(each.events, each.first, each.last, each.status) for each in found]


def load(where: Where, bodies: list[dict[str, Any]], processes: int) -> dict[str, Any]:
    """Send all requests at once; return tokens a second from the start to the last byte."""
    with start_clients(processes) as pool:
        return load_from(pool, where, bodies, processes)


def start_clients(processes: int) -> ProcessPoolExecutor:
    """Return a pool of client processes that have all started."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"))
    list(pool.map(time.sleep, [0.2] * processes))
    return pool


def load_from(
    pool: ProcessPoolExecutor, where: Where, bodies: list[dict[str, Any]], processes: int
) -> dict[str, Any]:
    """Send all requests at once from the processes of `pool`; return what `load` does."""
    requests = [request_bytes(body) for body in bodies]
    start = time.monotonic() + 0.5
    shares = [requests[i::processes] for i in range(processes)]
    jobs = [pool.submit(client, where, share, start) for share in shares if share]
    found = [line for job in jobs for line in job.result()]
    events, last = sum(line[0] for line in found), max(line[2] for line in found)
    middle = statistics.median(line[1] for line in found)
    return {
        "events": events,
        "seconds": round(last - start, 3),
        "tokens_per_second": round(events / (last - start), 1),
        "statuses": sorted({line[3].decode() for line in found}),
        "median_first_s": round(middle - start, 4),
    }


def stream_bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the bodies of all streams."""
    common = {"max_tokens": options.tokens, "ignore_eos": True, "stream": True, "temperature": 0.8}
    shared = {**common, "logprobs": options.logprobs} if options.logprobs >= 0 else common
    return [
        {**shared, "prompt": f"Story number {i}: once upon a time", "seed": i} for i in range(options.streams)
    ]


# --- a stub worker ----------------------------------------------------------------------------------------


def with_stub_worker(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the HTTP side alone."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="draftproof-") as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        where = listener.getsockname()[:2]
        common = [sys.executable, str(here / "common" / "serving" / "stub_worker.py")]
        profile = ["--profile", options.profile + ".worker"] if options.profile else []
        command = [*common, "worker", folder, "--tokenizer", options.tokenizer, *profile]
        command += ["--step-seconds", str(options.step_seconds)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE)]
        try:
            assert processes[0].stdout is not None and processes[0].stdout.readline()
            for i in range(options.servers):
                profile = ["--profile", f"{options.profile}.{i}"] if options.profile else []
                command = [*common, "server", folder, "--listener", str(listener.fileno()), *profile]
                processes.append(
                    subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[listener.fileno()])
                )
            for process in processes[1:]:
                assert process.stdout is not None and process.stdout.readline()
            load(where, stream_bodies(options)[:8], 1)  # token texts, imports
            before = [cpu_seconds(process.pid) for process in processes]
            found = load(where, stream_bodies(options), options.clients)
            used = [cpu_seconds(p.pid) - b for p, b in zip(processes, before, strict=True)]
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(30)
    found["worker_cpu_s"], found["server_cpu_s"] = round(used[0], 2), round(sum(used[1:]), 2)
    found["tokens_per_worker_cpu_s"] = round(found["events"] / max(used[0], 0.01))
    found["tokens_per_server_cpu_s"] = round(found["events"] / max(sum(used[1:]), 0.01))
    return found


# --- a GPU ------------------------------------------------------------------------------------------------


def server_options(options: argparse.Namespace) -> list[str]:
    """Return the options of a server for many streams."""
    more = ["--device", options.device, "--server-processes", str(options.servers)]
    more += ["--speculative-config", options.speculative_config, "--max-num-seqs", str(options.streams)]
    more += ["--max-concurrent", "4096", "--max-concurrent-per-key", "4096", "--log-level", "warning"]
    return [*more, *options.serve]


def many_streams(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the throughput of many streams."""
    rounds = []
    with served(options.model, *server_options(options), errors=options.errors) as program:
        bodies = stream_bodies(options)
        load(program.where, [{**body, "max_tokens": 16} for body in bodies], options.clients)
        for _ in range(options.rounds):
            pids = [*program.servers(), program.worker() or 0]
            before = [cpu_seconds(pid) for pid in pids]
            found = load(program.where, bodies, options.clients)
            used = [round(cpu_seconds(pid) - b, 2) for pid, b in zip(pids, before, strict=True)]
            rounds.append({**found, "server_cpu_s": used[:-1], "worker_cpu_s": used[-1]})
    best = max(each["tokens_per_second"] for each in rounds)
    whole = all(each["events"] == options.streams * options.tokens for each in rounds)
    bar = 40_000 if options.device.startswith("cuda") else 0
    return {"passed": best >= bar and whole, "best_tokens_per_second": best, "rounds": rounds}


# --- two checkouts ----------------------------------------------------------------------------------------


def two_checkouts(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the servers of two checkouts in turn."""
    folders = {"old": options.old.resolve(), "new": Path(__file__).resolve().parents[1]}
    # equal memory for both: a share of what is free would give the second one less
    sizes = ["--max-model-len", str(TOKENS_PER_STREAM)]
    sizes += ["--kv-cache-tokens", str(TOKENS_PER_STREAM * options.streams)]
    bodies, rounds, starts = stream_bodies(options), [], {}
    with ExitStack() as stack:
        programs = {}
        for name, folder in folders.items():
            path = os.pathsep.join(filter(None, (str(folder / "src"), os.environ.get("PYTHONPATH", ""))))
            began = time.monotonic()
            server = served(
                options.model, *sizes, *server_options(options), errors=options.errors, PYTHONPATH=path
            )
            programs[name] = stack.enter_context(server)
            starts[name] = round(time.monotonic() - began, 1)
        pool = stack.enter_context(start_clients(options.clients))
        for number in range(options.rounds + 1):
            both = {}
            for name in list(programs) if number % 2 else reversed(list(programs)):
                before = family_cpu_seconds(programs[name].pid)
                found = load_from(pool, programs[name].where, bodies, options.clients)
                used = family_cpu_seconds(programs[name].pid) - before
                both[name] = {**found, "cpu_s": round(used, 2)}
            print(number, both, file=sys.stderr, flush=True)
            if number:  # the first one warms up
                rounds.append(both)
    return {"start_seconds": starts, **compare(rounds, options.streams * options.tokens), "rounds": rounds}


def compare(rounds: list[dict[str, dict[str, Any]]], num_events: int) -> dict[str, Any]:
    """Return medians of both sides, and the ratio of new to old by round with its median and quartiles."""
    ratios = [each["new"]["tokens_per_second"] / each["old"]["tokens_per_second"] for each in rounds]
    ordered, count = sorted(ratios), len(ratios)
    whole = all(side["events"] == num_events for each in rounds for side in each.values())
    found: dict[str, Any] = {"passed": whole and statistics.median(ratios) >= MIN_RATIO, "complete": whole}
    for name in ("tokens_per_second", "median_first_s", "cpu_s"):
        found[name] = {
            side: round(statistics.median(each[side][name] for each in rounds), 4) for side in ("old", "new")
        }
    found["ratio"] = round(statistics.median(ratios), 4)
    found["quartiles"] = [round(ordered[count // 4], 4), round(ordered[(3 * count) // 4], 4)]
    return {**found, "ratios": [round(ratio, 4) for ratio in ratios]}


# --- a CPU ------------------------------------------------------------------------------------------------


def beside_llm(options: argparse.Namespace) -> dict[str, Any]:
    """Measure `LLM.generate` in this process and the server in turn."""
    from common.prompts import chat_prompts

    from draftproof import LLM, SamplingParams

    speculation = None if options.speculative_config == "off" else eval_json(options.speculative_config)
    llm = LLM(options.model, speculative_config=speculation, max_num_seqs=8)
    tokenizer = llm.get_tokenizer()
    everything = chat_prompts(8 * (options.rounds + 1), llm.engine.limits.vocab_size, tokenizer)
    common = {"max_tokens": options.tokens, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    params = SamplingParams(**common)
    more = ("--speculative-config", options.speculative_config, "--max-num-seqs", "8")
    ratios, lines = [], []
    with served(options.model, *more, "--log-level", "warning") as program:

        async def over_http(prompts: list[list[int]]) -> list[list[int]]:
            requests = [
                send_request(program.where, {**common, "prompt": p, "return_token_ids": True})
                for p in prompts
            ]
            replies = await asyncio.gather(*requests)
            return [reply.json()["choices"][0]["token_ids"] for reply in replies]

        for number in range(options.rounds + 1):
            prompts = everything[8 * number : 8 * number + 8]
            times, tokens = {}, {}
            for side in ("llm", "server") if number % 2 else ("server", "llm"):
                began = time.perf_counter()
                if side == "llm":
                    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
                    tokens[side] = [list(output.outputs[0].token_ids) for output in outputs]
                else:
                    tokens[side] = asyncio.run(over_http(prompts))
                times[side] = time.perf_counter() - began
            if tokens["llm"] != tokens["server"]:
                raise SystemExit("the outputs of the server differ from those of LLM.generate")
            if number:  # the first one warms up
                made = sum(map(len, tokens["llm"]))
                ratios.append(times["llm"] / times["server"])
                lines.append({side: round(made / seconds, 1) for side, seconds in times.items()})
        first = asyncio.run(first_token(program.where, options.rounds * 4))
    llm.close()
    ratio = statistics.median(ratios)
    return {
        "passed": ratio >= 0.95 and first["median_ms"] <= 10,
        "server_over_llm": round(ratio, 4),
        "ratios": [round(each, 3) for each in ratios],
        "tokens_per_second": lines,
        "first_token": first,
        "load_average": os.getloadavg(),
    }


async def first_token(where: Where, count: int) -> dict[str, Any]:
    """Return the time of a single request outside the engine, up to its first token.

    The usage event has the time from the request's arrival in the worker to its first token. The rest of the
    time up to the first event here is spent on the way to the worker and back.
    """
    rest = []
    for i in range(count):
        arrived = [0.0]

        def note(_: bytes, arrived: list[float] = arrived) -> None:
            arrived[0] = arrived[0] or time.perf_counter()

        body = {"prompt": f"Number {i}", "max_tokens": 4, "stream": True, "temperature": 0, "logprobs": 1}
        body["stream_options"] = {"include_usage": True}
        began = time.perf_counter()
        reply = await send_request(where, body, on_data=note)
        inside = reply.events()[-2]["metrics"]["first_token_seconds"]
        rest.append(1000 * (arrived[0] - began - inside))
        await get(where, "/health")
    rest.sort()
    return {
        "median_ms": round(statistics.median(rest), 2),
        "p90_ms": round(rest[int(0.9 * len(rest))], 2),
        "least_ms": round(rest[0], 2),
        "what": "request and first token, both ways, without the engine's time from arrival to the token",
    }


def eval_json(text: str) -> Any:
    """Return the value of a JSON text."""
    import json

    return json.loads(text)


def main() -> None:
    """Measure one kind of device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or none: a stub worker")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--logprobs", type=int, default=5, help="-1: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=1, help="processes of the load client")
    parser.add_argument("--speculative-config", default=NGRAM)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="of a step of the stub worker")
    parser.add_argument("--tokenizer", help="of the stub worker: a folder or .gguf file")
    parser.add_argument("--profile", metavar="FILE", help="with the stub worker: cProfile of each process")
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="another checkout, to compare with")
    parser.add_argument("--errors", default=os.devnull, metavar="FILE", help="standard error of the servers")
    parser.add_argument("--serve", nargs="*", default=[], metavar="OPTION", help="more for the server")
    options = parser.parse_args()
    if options.old is not None:
        found = two_checkouts(options)
    elif options.device == "none":
        found = with_stub_worker(options)
    elif options.device == "cpu":
        found = beside_llm(options)
    else:
        found = many_streams(options)
    settings = {
        name: getattr(options, name) for name in ("servers", "streams", "tokens", "logprobs", "clients")
    }
    finish("serve_load", {"device": options.device, **settings, **found})


if __name__ == "__main__":
    main()
