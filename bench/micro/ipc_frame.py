"""Cost of a frame: encoding in the worker, decoding in an HTTP process, transfer between two processes.

    python bench/micro/ipc_frame.py --batch 256 --logprobs 5

The last line is JSON. Times are medians in microseconds of a step of `batch` requests with `logprobs` each.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from common.measure import finish

from draftproof.engine.step.step_results import LogprobColumns, LogprobWidth, StepResults
from draftproof.metrics import EngineStats
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc.decode import ReceivedGroup, decode_frame, to_step_results
from draftproof.serve.ipc.encode import EngineSnapshot, RequestGroup, encode_step
from draftproof.serve.ipc.frame import Bounds
from draftproof.types import NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, PICK, TOKENS, LogprobKind, Request

VOCAB = 49152
ENGINE_STATS = EngineStats(256, 0, 0, 1000, 500, 4096, 2000, 100)


def random_step(batch: int, logprobs: int, k: int, tokens: int) -> StepResults:
    """Return a step in which every request commits `tokens` tokens."""
    params = SamplingParams(logprobs=logprobs if logprobs >= 0 else None)
    requests = [Request(id=str(i), prompt_token_ids=[1], params=params, seed=i) for i in range(batch)]
    noise = np.random.default_rng(1)
    table = np.zeros((batch, TOKENS + k + 1), np.int64)
    table[:, NUM_OUT] = tokens
    table[:, NUM_DRAFT] = min(k, tokens)
    table[:, NUM_ACCEPTED] = min(k, tokens) - 1 if k else 0
    table[:, PICK] = np.arange(batch) * tokens
    table[:, TOKENS : TOKENS + tokens] = noise.integers(0, VOCAB, (batch, tokens))
    columns = {}
    if logprobs >= 0:
        rows, width = batch * (k + 1), max(8, logprobs)
        columns[LogprobKind.RAW] = LogprobColumns(
            noise.normal(size=(rows, 1 + width)).astype(np.float32),
            noise.integers(0, VOCAB, (rows, width)),
            noise.integers(1, VOCAB, rows),
        )
    return StepResults(requests, table, columns, ("ngram",) if k else ())


def timed(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """Return the median duration in microseconds."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 20:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e6, 1)


def echo(address: str) -> None:
    """Send every received message back, in another process."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(address)
    socket.send(b"")
    while data := socket.recv():
        socket.send(data)


def transfer_microseconds(frame: bytes) -> float:
    """Return half of the round-trip time of a frame to another process."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{folder}/s"
        socket = context.socket(zmq.ROUTER)
        socket.bind(address)
        child = multiprocessing.get_context("spawn").Process(target=echo, args=(address,), daemon=True)
        child.start()
        identity, _ = socket.recv_multipart()

        def once() -> None:
            socket.send_multipart((identity, frame))
            socket.recv_multipart()

        found = timed(once)
        socket.send_multipart((identity, b""))
        child.join()
        socket.close(0)
    return round(found / 2, 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--logprobs", type=int, default=5, help="-1: none")
    parser.add_argument("--k", type=int, default=5, help="drafts; 0: no speculation")
    parser.add_argument("--tokens", type=int, default=2, help="tokens that each request commits in a step")
    options = parser.parse_args()
    results = random_step(options.batch, options.logprobs, options.k, options.tokens)
    bounds = Bounds(VOCAB, options.k, len(results.source_names))
    snapshot = EngineSnapshot(options.k, 1, 0.005, 1.0, ENGINE_STATS)
    kind = LogprobKind.NONE if options.logprobs < 0 else LogprobKind.RAW
    width = LogprobWidth(max(options.logprobs, 0))
    group = RequestGroup.build(None, [(i, kind, width) for i in range(options.batch)])
    quarter = list(range(0, options.batch, 4))
    quarter_group = RequestGroup.build(quarter, [(i, kind, width) for i in quarter])
    frame = encode_step(0, snapshot, results, group)
    received_group = ReceivedGroup.build(list(range(options.batch)), dict(enumerate(results.requests)), VOCAB)

    def receive() -> None:
        to_step_results(decode_frame(frame, bounds), received_group, results.source_names, {})

    receive()
    found = {
        "batch": options.batch,
        "logprobs": options.logprobs,
        "k": options.k,
        "tokens": options.tokens * options.batch,
        "frame_bytes": len(frame),
        "encode_us": timed(lambda: encode_step(0, snapshot, results, group)),
        "encode_quarter_us": timed(lambda: encode_step(0, snapshot, results, quarter_group)),
        "decode_us": timed(receive),
        "transfer_us": transfer_microseconds(frame),
    }
    finish("ipc_frame", found)


if __name__ == "__main__":
    main()
