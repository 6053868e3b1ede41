"""Faults of every kind in `draftproof serve`; the last line of stdout is JSON with `passed`.

    python bench/micro/serve_faults.py [--only worker_killed …] [--bad-seconds 60] [--connections 10000]

Before, during (where the worker runs) and after each fault, valid requests get right outputs: tokens and
logprobs are bit for bit those of the same request alone, without speculation, in `LLM` in this process.
Memory does not grow and no process remains.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import asyncio
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from glob import glob
from typing import Any

from common.measure import finish
from common.serving.fault_requests import STREAMS, bodies, expectations, invalid_request, tokens_of
from common.serving.server_process import (
    NGRAM,
    Program,
    Reply,
    get,
    num_files,
    request_bytes,
    rss_mib,
    send_request,
    served,
)

MIB_SERVER, MIB_WORKER = 24.0, 64.0  # by which memory may grow in the second half of a fault


class Faults:
    """Faults of one server."""

    def __init__(self, program: Program, expected: list[Any], options: argparse.Namespace) -> None:
        self.program, self.expected, self.options = program, expected, options
        self.where = program.where

    async def probe(self, count: int = 8, begin: int = 0) -> dict[str, int]:
        """Send valid requests at once, half of them streams; return how many outputs were right."""
        todo = [i % STREAMS for i in range(begin, begin + count)]
        requests = [send_request(self.where, {**bodies()[i], "stream": i % 2 == 0}) for i in todo]
        replies = await asyncio.gather(*requests, return_exceptions=True)
        result: Counter[str] = Counter(right=0, wrong=0)
        for i, reply in zip(todo, replies, strict=True):
            if isinstance(reply, BaseException):
                result[type(reply).__name__] += 1
            elif reply.status != 200:
                result[f"status_{reply.status}"] += 1
            else:
                result["right" if tokens_of(reply) == self.expected[i] else "wrong"] += 1
        return dict(result)

    async def healthy(self, seconds: float = 120) -> float | None:
        """Return the seconds until the server is healthy."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            try:
                if (await get(self.where, "/health")).status == 200:
                    return round(time.monotonic() - began, 2)
            except OSError:
                pass
            await asyncio.sleep(0.05)
        return None

    async def until_idle(self, seconds: float = 60) -> bool:
        """Wait until no request runs; return False if some still do."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = (await get(self.where, "/metrics")).data.decode()
            open_ = [line for line in text.splitlines() if line.startswith("draftproof:num_requests_")]
            if open_ and all(float(line.split()[-1]) == 0 for line in open_):
                return True
            await asyncio.sleep(0.2)
        return False

    # --- faults -------------------------------------------------------------------------------------

    async def worker_killed(self) -> dict[str, Any]:
        """Kill the worker during 32 streams and 4 other requests, twice."""
        rounds = []
        for _ in range(2):
            begun: set[int] = set()
            ended: list[float] = []
            death = [0.0]

            async def one(i: int, begun: set[int], ended: list[float]) -> Reply:
                body = {**bodies()[i], "max_tokens": 600, "ignore_eos": True, "stream": True}
                body.pop("structured_outputs", None)
                reply = await send_request(self.where, body, on_data=lambda _: begun.add(i))
                ended.append(time.monotonic())
                return reply

            tasks = [asyncio.create_task(one(i, begun, ended)) for i in range(STREAMS)]
            whole = [{**bodies()[0], "max_tokens": 600, "ignore_eos": True} for _ in range(4)]
            wholes = [asyncio.create_task(send_request(self.where, body)) for body in whole]
            while len(begun) < STREAMS:
                await asyncio.sleep(0.02)
            worker = self.program.worker()
            assert worker is not None
            death[0] = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            red = None
            while red is None and time.monotonic() - death[0] < 10:
                if (await get(self.where, "/health")).status == 503:
                    red = round(time.monotonic() - death[0], 3)
            replies = await asyncio.gather(*tasks)
            statuses = Counter(reply.status for reply in await asyncio.gather(*wholes))
            clean = prefix = 0
            for i, reply in enumerate(replies):
                events = reply.events()
                clean += events[-1] == "[DONE]" and "error" in events[-2]
                same = not bodies()[i].get("structured_outputs")
                ids, values = tokens_of(reply)
                known = self.expected[i]
                size = min(len(ids), len(known[0])) if same else 0
                prefix += ids[:size] == known[0][:size] and values[:size] == known[1][:size]
            back = await self.healthy()
            rounds.append(
                {
                    "streams_ended_by_an_error_event": clean,
                    "what_they_had_was_right": prefix,
                    "last_ended_after_s": round(max(ended) - death[0], 3),
                    "health_red_after_s": red,
                    "whole_answers": {str(status): n for status, n in statuses.items()},
                    "healthy_again_after_s": back,
                    "after": await self.probe(),
                }
            )
        good = all(
            r["streams_ended_by_an_error_event"] == r["what_they_had_was_right"] == STREAMS
            and r["health_red_after_s"] is not None
            and r["whole_answers"] == {"503": 4}
            and r["healthy_again_after_s"] is not None
            and r["last_ended_after_s"] < 5
            for r in rounds
        )
        return {"passed": good, "rounds": rounds}

    async def never_reads(self) -> dict[str, Any]:
        """Open sixteen long streams with many logprobs and read none of them."""
        sockets = []
        for i in range(16):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.connect(self.where)
            body = {"prompt": f"On and on {i}", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            made.sendall(request_bytes({**body, "logprobs": 20, "temperature": 0}))
            sockets.append(made)
        during, sizes = [], []
        for i in range(4):
            during.append(await self.probe(begin=8 * i))
            sizes.append(self.program.rss()["server"])
        idle = await self.until_idle(180)  # they are dropped after --stall-seconds
        for made in sockets:
            made.close()
        right = all(found.get("right") == 8 for found in during)
        return {"passed": right and idle, "during": during, "let_go": idle, "server_mib": sizes}

    async def connections(self) -> dict[str, Any]:
        """Open and close connections: without a request, with half of one, a whole one, or a reset."""
        count, sizes, files = self.options.connections, [], []
        during: list[dict[str, int]] = []
        half = request_bytes(bodies()[0])

        def burst(size: int, chance: random.Random) -> None:
            for _ in range(size):
                with socket.socket() as made:
                    made.settimeout(30)
                    made.connect(self.where)
                    kind = chance.randrange(6)
                    if kind == 1:
                        made.sendall(half[: chance.randrange(1, len(half))])
                    elif kind == 2:
                        made.sendall(half)
                    elif kind == 3:
                        made.sendall(request_bytes(None, "/health", "GET"))
                        made.recv(100)
                    if chance.random() < 0.5:  # a reset in place of an end
                        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        for part in range(4):
            work = asyncio.to_thread(burst, count // 4, random.Random(part))
            _, found = await asyncio.gather(work, self.probe(begin=8 * part))
            during.append(found)
            await self.until_idle()
            sizes.append(self.program.rss()["server"])
            files.append(num_files(self.program.servers()[0]))
        right = all(found.get("right") == 8 for found in during)
        flat = sizes[-1] - sizes[1] < MIB_SERVER and files[-1] - files[0] < 32
        facts = {"connections": count, "during": during, "server_mib": sizes, "open_files": files}
        return {"passed": right and flat, **facts}

    async def bad_requests(self) -> dict[str, Any]:
        """Send invalid requests of every kind, and valid ones among them."""
        seconds, statuses = self.options.bad_seconds, Counter[str]()
        end = time.monotonic() + seconds
        sizes: list[dict[str, float]] = []
        during: Counter[str] = Counter()

        async def spoil(chance: random.Random) -> None:
            while time.monotonic() < end:
                reader, writer = await asyncio.open_connection(*self.where)
                try:
                    async with asyncio.timeout(60):
                        writer.write(invalid_request(chance))
                        if chance.random() < 0.8 and writer.can_write_eof():
                            writer.write_eof()
                        data = await reader.read(20)
                        statuses[data[9:12].decode("latin1") if data.startswith(b"HTTP") else "closed"] += 1
                except (OSError, TimeoutError) as error:
                    statuses[type(error).__name__] += 1
                finally:
                    writer.close()

        async def correct() -> None:
            begin = 0
            while time.monotonic() < end:
                during.update(await self.probe(4, begin))
                begin += 4
                sizes.append(self.program.rss())

        await asyncio.gather(correct(), *(spoil(random.Random(i)) for i in range(4)))
        middle = sizes[len(sizes) // 2]
        flat = sizes[-1]["server"] - middle["server"] < MIB_SERVER
        flat = flat and sizes[-1]["worker"] - middle["worker"] < MIB_WORKER
        bad = [status for status in statuses if status.startswith("5")]
        right = not (set(during) - {"right"}) or (during["wrong"] == 0 and len(+during) == 1)
        facts = {"statuses": dict(statuses), "during": dict(during), "mib": [sizes[0], middle, sizes[-1]]}
        return {"passed": bool(right and flat and not bad and during["right"]), "seconds": seconds, **facts}


# --- faults that need a server of their own ---------------------------------------------------------------


def with_server(
    expected: list[Any],
    options: argparse.Namespace,
    act: Callable[[Faults], Awaitable[Any]],
    *more: str,
    **keys: Any,
) -> dict[str, Any]:
    """Run `act` on a server; outputs are right before and after it, and nothing remains."""
    speculation = ("--speculative-config", NGRAM, "--stall-seconds", "5")
    folder = tempfile.mkdtemp()
    with served(options.model, *speculation, *more, TMPDIR=folder, **keys) as program:
        faults = Faults(program, expected, options)

        async def run() -> dict[str, Any]:
            before = await faults.probe(STREAMS)
            sizes = program.rss()
            found = await act(faults)
            after = await faults.probe(STREAMS) if program.process.poll() is None else None
            return {
                "before": before,
                "mib_before": sizes,
                **found,
                "after": after,
                "mib_after": program.rss(),
            }

        found = asyncio.run(run())
        found["exit_status"] = program.stop()
    found["processes_left"] = len(program.wait_until_ended())
    found["folders_left"] = len(glob(f"{folder}/draftproof-*"))
    shutil.rmtree(folder, ignore_errors=True)
    right = {"right": STREAMS, "wrong": 0}
    found["passed"] &= found["before"] == right and found["after"] in (right, None)
    found["passed"] &= not found["processes_left"] and not found["folders_left"]
    return found


async def server_killed(faults: Faults) -> dict[str, Any]:
    """Kill the main process; all its processes end too."""
    long = {**bodies()[0], "max_tokens": 600, "ignore_eos": True, "stream": True}
    begun: set[int] = set()
    tasks = [
        asyncio.create_task(send_request(faults.where, long, on_data=lambda _, i=i: begun.add(i)))
        for i in range(8)
    ]
    while len(begun) < 8:
        await asyncio.sleep(0.02)
    faults.program.servers()
    os.kill(faults.program.pid, signal.SIGKILL)
    began = time.monotonic()
    await asyncio.gather(*tasks, return_exceptions=True)
    faults.program.process.wait()
    left = await asyncio.to_thread(faults.program.left, 30)
    return {"passed": not left, "all_gone_after_s": round(time.monotonic() - began, 2)}


async def one_of_two_killed(faults: Faults) -> dict[str, Any]:
    """Kill one of two HTTP processes; the other one serves on, a new one starts, the worker stays."""
    worker, (first, *_) = faults.program.worker(), faults.program.servers()
    os.kill(first, signal.SIGKILL)
    await asyncio.sleep(0.1)
    outputs = await faults.probe(16)
    end = time.monotonic() + 60
    while len(faults.program.servers()) < 2 and time.monotonic() < end:
        await asyncio.sleep(0.1)
    same = faults.program.worker() == worker
    good = outputs.get("right", 0) == 16 and same and len(faults.program.servers()) == 2
    return {"passed": good, "meanwhile": outputs, "worker_is_the_same": same}


async def probe_only(faults: Faults) -> dict[str, Any]:
    """Send valid requests to a server that started with the fault."""
    lost = [await faults.probe(8, 8 * i) for i in range(3)]
    return {"passed": all(found.get("right") == 8 for found in lost), "during": lost}


def main() -> None:
    """Run the chosen faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    full = {"log_file": ("--log-file", "/dev/full"), "standard_error": ()}
    names = ("worker_killed", "never_reads", "connections", "bad_requests")
    own = ("server_killed", "one_of_two_killed", "disk_full_log_file", "disk_full_standard_error")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="+", choices=names + own, default=names + own)
    parser.add_argument("--bad-seconds", type=float, default=60)
    parser.add_argument("--connections", type=int, default=10_000)
    options = parser.parse_args()
    expected = expectations(options.model)
    found: dict[str, Any] = {}
    for name in options.only:
        more: tuple[str, ...] = ()
        keys: dict[str, Any] = {}
        if name in names:
            act = getattr(Faults, name)
        elif name.startswith("disk_full"):
            act, more = probe_only, full[name.removeprefix("disk_full_")]
            keys = {} if more else {"errors": "/dev/full"}
        else:
            act = server_killed if name == "server_killed" else one_of_two_killed
            more = ("--server-processes", "2") if name == "one_of_two_killed" else ()
        began = time.monotonic()
        found[name] = with_server(expected, options, act, *more, **keys)
        found[name]["took_s"] = round(time.monotonic() - began, 1)
        print(name, found[name], file=sys.stderr, flush=True)
    passed = all(each["passed"] for each in found.values())
    finish("serve_faults", {"passed": passed, "own_mib": rss_mib(os.getpid()), **found})
    sys.exit(not passed)


if __name__ == "__main__":
    main()
