"""KV events, decoded with the structs of vLLM's consumers, give the blocks that the engine holds."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

import tiny
from draftproof.compat.kv_events_config import KVEventsConfig
from draftproof.engine.engine import Engine
from draftproof.engine.kv_events.events import block_hash
from draftproof.engine.kv_events.publisher import can_bind
from draftproof.errors import ConfigError
from draftproof.sampling_params import SamplingParams

PAGE_TOKENS = 8
HASH = bytes | int


# types of vLLM 0.33, from vllm/distributed/kv_events.py
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[HASH]
    parent_block_hash: HASH | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[HASH]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Consumer:
    """Subscriber that rebuilds the blocks; it begins with a replay, as one that was started late."""

    def __init__(self, endpoint: str, replay: str, topic: str) -> None:
        self.blocks: dict[HASH, tuple[HASH | None, list[int]]] = {}
        self.next, self.num_removed = 0, 0
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(endpoint)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(replay)

    def catch_up(self) -> None:
        """Read what has been published, and request the batches that were missed."""
        while self.sub.poll(0):
            _, number, data = self.sub.recv_multipart()
            if int.from_bytes(number, "big") != self.next:
                break
            self.apply(data)
        self.replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while self.replay.poll(30_000):
            empty, topic, number, data = self.replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, data) == (b"", b"")
                return
            assert topic == b"kv"
            assert int.from_bytes(number, "big") == self.next
            self.apply(data)
        raise AssertionError("the replay did not end")

    def catch_up_with(self, engine: Engine) -> None:
        """Catch up until the blocks are those of the engine: batches may be on their way to the replay."""
        deadline = time.monotonic() + 10
        self.catch_up()
        while self.blocks.keys() != held(engine) and time.monotonic() < deadline:
            self.catch_up()
        assert self.blocks.keys() == held(engine)

    def apply(self, data: bytes) -> None:
        batch = self.decoder.decode(data)
        self.next += 1
        assert batch.ts > 0 and batch.events
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert event.medium == "GPU" and event.block_size == PAGE_TOKENS
                assert len(event.token_ids) == PAGE_TOKENS * len(event.block_hashes)
                parent = event.parent_block_hash
                assert parent is None or parent in self.blocks, "a block without its parent"
                for i, one in enumerate(event.block_hashes):
                    tokens = event.token_ids[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
                    assert one not in self.blocks, "a block was stored twice"
                    self.blocks[one], parent = (parent, tokens), one
            elif isinstance(event, BlockRemoved):
                self.num_removed += len(event.block_hashes)
                for one in event.block_hashes:
                    del self.blocks[one]
            else:
                self.blocks.clear()

    def close(self) -> None:
        for socket in (self.sub, self.replay):
            socket.close(0)
        self.context.term()


def held(engine: Engine) -> set[int]:
    """Return the hashes of the blocks that the engine can reuse."""
    return {block_hash(digest) for digest in engine.loop.scheduler.pages._page_of_digest}


def test_events_replay_to_the_blocks_that_the_engine_holds(tmp_path: Any) -> None:
    """Serve requests with shared prefixes on few pages; at several points the replayed sets are equal."""
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv"}
    engine = tiny.engine("llama", speculative={"method": "ngram"}, kv_cache_tokens=256, max_num_seqs=3,
                         page_size=PAGE_TOKENS, kv_events_config=config)  # fmt: skip
    rng, consumer = random.Random(3), Consumer(endpoint, replay, "kv")
    shared = [tiny.prompt(i, 20) for i in range(4)]
    try:
        for turn in range(5):
            requests = []
            for i in range(12):
                ids = [*rng.choice(shared), *(rng.randrange(3, 90) for _ in range(rng.randrange(12)))]
                salt = rng.choice([None, "a"])
                params = SamplingParams(max_tokens=rng.randrange(1, 20), ignore_eos=True, cache_salt=salt)
                requests.append(tiny.request(100 * turn + i, params, prompt_token_ids=ids))
            tiny.run(engine, requests)
            consumer.catch_up_with(engine)
        assert consumer.num_removed > 20 and consumer.next > 20
        engine.add(tiny.request(0, SamplingParams(max_tokens=50, ignore_eos=True), length=30))
        for _ in range(12):
            engine.step()
        assert engine.abort("0") and not engine.has_work  # no further step publishes its blocks
        consumer.catch_up_with(engine)
        engine.loop.scheduler.pages.clear()
        engine._publish_events()
        consumer.catch_up_with(engine)
        assert consumer.blocks == {} and held(engine) == set()
    finally:
        engine.close()
        consumer.close()


def test_lost_removal_is_seen_control(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without events for evicted blocks the sets differ."""
    from draftproof.engine.kv_events import events

    monkeypatch.setattr(events.EventLog, "removed", lambda self, digest: None)
    with pytest.raises(AssertionError):
        test_events_replay_to_the_blocks_that_the_engine_holds(tmp_path)


def test_config_is_checked() -> None:
    """Unknown keys and events without a prefix cache are refused."""
    with pytest.raises(ConfigError, match="did you mean 'endpoint'"):
        tiny.engine(kv_events_config={"endpont": "tcp://*:1"})
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        tiny.engine(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
    assert tiny.engine(kv_events_config={"enable_kv_cache_events": False})._publisher is None


def test_addresses_in_use_are_refused(tmp_path: Any) -> None:
    """An address of another engine is refused, also where ZeroMQ would replace the file of its socket."""
    free = zmq.Context()
    with free.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://*")
        taken.bind(f"ipc://{tmp_path}/taken")
        for name in ("endpoint", "replay_endpoint"):
            for address in (f"tcp://*:{port}", f"ipc://{tmp_path}/taken"):
                other = {"endpoint": f"ipc://{tmp_path}/own", "replay_endpoint": f"ipc://{tmp_path}/replay"}
                config = {"enable_kv_cache_events": True, **other, name: address}
                with pytest.raises(ConfigError, match=f"the {name} .* give every engine"):
                    tiny.engine(kv_events_config=config)
                assert not can_bind(KVEventsConfig.parse(config))
        replica = KVEventsConfig.parse({"endpoint": f"tcp://*:{port}", "replay_endpoint": "tcp://*:0"})
        assert not can_bind(replica) and can_bind(replace(replica, endpoint="tcp://*:0"))
    free.term()


def test_replicas_of_a_machine_have_their_own_ports() -> None:
    """Offsets are vLLM's: the port plus the rank. A connected endpoint is the same for all."""
    given = KVEventsConfig.parse({"endpoint": "tcp://*:5557", "replay_endpoint": "ipc:///tmp/replay"})
    assert given.of_replica(0) == given
    assert given.of_replica(3).endpoint == "tcp://*:5560"
    assert given.of_replica(3).replay_endpoint == "ipc:///tmp/replay_dp3"
    joined = KVEventsConfig.parse({"endpoint": "tcp://router:5557"})
    assert joined.of_replica(2) == joined
    with pytest.raises(ConfigError, match="no port for replica 4"):
        KVEventsConfig.parse({"endpoint": "tcp://*:65533"}).of_replica(4)
