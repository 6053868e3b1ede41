"""KV events of a tiny random model, indexed by Dynamo's KV indexer; the last line of stdout is JSON.

    python -m venv /tmp/dynamo && /tmp/dynamo/bin/pip install ai-dynamo-runtime==1.6.1
    python bench/exactness/kv_events.py --indexer /tmp/dynamo/bin/python [--requests 1000] [--wave 50]

Requests with shared prefixes, salts and aborts use few pages, so that blocks are evicted all the time. After
each wave the blocks of the index must be those that the engine can reuse. The indexer starts after half of
the requests and receives their events by replay. With `--vllm FILE`, vllm/distributed/kv_events.py of a
release, every message is decoded with vLLM's own types as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import json
import random
import subprocess
import time
import types
import urllib.request
from typing import Any

import msgspec
import torch
import zmq
from common.measure import finish
from exactness.soak import MODEL, VOCAB, weights

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.engine.kv_events.events import block_hash
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import Request

PAGE_TOKENS, CACHE_TOKENS = 8, 512
NUM_PREFIXES, PREFIX_TOKENS, MAX_OUTPUT_TOKENS = 12, 40, 24
ABORT_SHARE, SALT_SHARE = 0.1, 0.2
WAIT_SECONDS = 120.0


class Indexer:
    """Process of Dynamo's standalone KV indexer."""

    def __init__(self, python: str, endpoint: str, replay: str, port: int) -> None:
        command = [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
        self._url = f"http://127.0.0.1:{port}"
        wait_until(lambda: self._call("/health") is not None)
        worker = {"instance_id": 1, "endpoint": endpoint, "replay_endpoint": replay}
        self._call("/register", {**worker, "model_name": "tiny", "block_size": PAGE_TOKENS})

    def blocks(self) -> set[int]:
        """Return the hashes of all blocks in the index."""
        found = self._call("/dump")
        return set(stored_hashes(found))

    def has(self, hashes: set[int]) -> bool:
        """Return whether the index has these blocks alone, once it has read all events."""
        return wait_until(lambda: self.blocks() == hashes)

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {error.code} {error.read().decode()}") from None
        except OSError:
            return None
        return json.loads(text) if text.startswith((b"{", b"[")) else text.decode()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(WAIT_SECONDS)


def stored_hashes(value: Any) -> list[int]:
    """Return the hashes of stored blocks anywhere in a dump."""
    if isinstance(value, dict):
        own = [value["block_hash"]] if isinstance(value.get("block_hash"), int) else []
        return own + [one for item in value.values() for one in stored_hashes(item)]
    return [one for item in value for one in stored_hashes(item)] if isinstance(value, list) else []


class Subscriber:
    """Consumer with the types of vLLM's own module."""

    def __init__(self, source: Path, endpoint: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(vllm_module(source).KVEventBatch)
        self._context = zmq.Context()
        self._sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._sub.rcvhwm = 0
        self._sub.connect(endpoint)
        self._sub.subscribe(b"")
        self.hashes: set[int] = set()
        self.num_batches = self.num_removed = 0

    def read(self) -> None:
        """Apply what has arrived."""
        while self._sub.poll(0):
            _, number, data = self._sub.recv_multipart()
            assert int.from_bytes(number, "big") == self.num_batches, "a batch was lost"
            self.num_batches += 1
            for event in self._decoder.decode(data).events:
                name = type(event).__name__
                if name == "BlockStored":
                    assert event.parent_block_hash is None or event.parent_block_hash in self.hashes
                    self.hashes.update(event.block_hashes)
                elif name == "BlockRemoved":
                    self.num_removed += len(event.block_hashes)
                    self.hashes.difference_update(event.block_hashes)
                else:
                    self.hashes.clear()

    def close(self) -> None:
        """Close the socket."""
        self._sub.close(0)
        self._context.term()


def vllm_module(source: Path) -> Any:
    """Return vLLM's module of KV events, imported without the rest of vLLM."""
    for name, members in (
        ("vllm.config.kv_events", {"KVEventsConfig": object}),
        ("vllm.logger", {"init_logger": lambda name: None}),
        ("vllm.utils.network_utils", dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"))),
        ("vllm.v1.core.kv_cache_utils", {"ExternalBlockHash": bytes | int}),
    ):  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    made = types.ModuleType("vllm_kv_events")
    sys.modules[made.__name__] = made
    exec(compile(source.read_text(), str(source), "exec"), vars(made))
    return made


def wait_until(condition: Any) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def held(engine: Engine) -> set[int]:
    """Return the hashes of the blocks that the engine can reuse."""
    return {block_hash(digest) for digest in engine.loop.scheduler.pages._page_of_digest}


class Traffic:
    """Random requests with shared prefixes."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prefixes = [self._ids(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        self._count = 0

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB) for _ in range(count)]

    def run(self, engine: Engine, count: int) -> int:
        """Run requests to their end; abort some. Return the number of aborts."""
        rng, open_ids, aborts = self._rng, set[str](), 0
        for _ in range(count):
            ids = [*rng.choice(self._prefixes), *self._ids(rng.randrange(20))]
            salt = "tenant" if rng.random() < SALT_SHARE else None
            params = SamplingParams(
                max_tokens=rng.randrange(1, MAX_OUTPUT_TOKENS),
                ignore_eos=True,
                temperature=0.0,
                cache_salt=salt,
            )
            name = str(self._count)
            engine.add(Request(id=name, prompt_token_ids=ids, params=params, seed=0))
            open_ids.add(name)
            self._count += 1
        while engine.has_work:
            results = engine.step()
            open_ids -= {results.requests[i].id for i in results.finishes}
            if open_ids and rng.random() < ABORT_SHARE / 2:
                name = rng.choice(sorted(open_ids))
                open_ids.remove(name)
                aborts += engine.abort(name)
        return aborts


def main() -> None:
    """Run the waves and compare after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--indexer", required=True, help="python with ai-dynamo-runtime")
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--wave", type=int, default=50)
    parser.add_argument("--port", type=int, default=45600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    endpoint, replay = (f"tcp://127.0.0.1:{options.port + i}" for i in range(2))
    config = {
        "enable_kv_cache_events": True,
        "endpoint": endpoint.replace("127.0.0.1", "*"),
        "replay_endpoint": replay.replace("127.0.0.1", "*"),
    }
    sizes = {
        "max_model_len": 128,
        "max_num_seqs": 6,
        "kv_cache_tokens": CACHE_TOKENS,
        "page_size": PAGE_TOKENS,
    }
    engine = Engine(
        EngineConfig(
            model="tiny",
            device="cpu",
            backend="torch",
            warm_up=False,
            max_num_batched_tokens=64,
            speculative=SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3}),
            kv_events_config=config,
            **sizes,
        ),
        weights("llama"),
    )
    subscriber = None if options.vllm is None else Subscriber(options.vllm, endpoint)
    traffic, indexer = Traffic(seed=7), None
    done = aborts = equal = compared = 0
    time.sleep(1.0)  # for the subscription
    try:
        while done < options.requests:
            if indexer is None and done >= options.requests // 2:
                indexer = Indexer(options.indexer, endpoint, replay, options.port + 2)
                time.sleep(1.0)  # for its subscription
            count = min(options.wave, options.requests - done)
            aborts += traffic.run(engine, count)
            done += count
            if indexer is not None:
                compared += 1
                equal += indexer.has(held(engine))
            if subscriber is not None:
                subscriber.read()
        blocks = held(engine)
        indexed = indexer.blocks() if indexer is not None else set()
        figures: dict[str, Any] = {
            "model": MODEL["architecture"],
            "requests": done,
            "aborted": aborts,
            "requests_before_the_indexer": options.requests // 2,
            "blocks_held": len(blocks),
            "blocks_of_the_index": len(indexed),
            "blocks_that_differ": len(blocks ^ indexed),
            "comparisons": compared,
            "comparisons_equal": equal,
        }
        if subscriber is not None:
            wait_until(lambda: (subscriber.read(), subscriber.hashes == blocks)[1])
            figures["vllm_types"] = {
                "batches": subscriber.num_batches,
                "blocks_removed": subscriber.num_removed,
                "blocks_that_differ": len(blocks ^ subscriber.hashes),
            }
    finally:
        engine.close()
        if indexer is not None:
            indexer.close()
        if subscriber is not None:
            subscriber.close()
    finish("kv_events", figures)


if __name__ == "__main__":
    main()
