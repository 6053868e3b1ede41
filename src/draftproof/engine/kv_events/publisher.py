"""Publisher of KV events over ZeroMQ: PUB for new batches, ROUTER for a replay of past ones.

A message has three parts: topic, number of the batch as 8 bytes big-endian, batch in msgpack. A consumer that
finds a gap sends the first missing number to the ROUTER. It receives the messages of that batch and of all
later ones, then one with the number -1 and an empty batch. A thread owns the sockets; the engine never waits
for a consumer.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque

import msgspec
import zmq

from draftproof.compat.kv_events_config import KVEventsConfig
from draftproof.engine.kv_events.events import EventLog, KVEventBatch
from draftproof.errors import ConfigError

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
STOP = b""  # in place of a batch: the thread ends
STOP_SECONDS = 5.0
LINGER_MS = 1000
log = logging.getLogger("draftproof")


class EventPublisher:
    """Thread that publishes batches in order."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Bind or connect the sockets; ConfigError if an address is in use."""
        self._config = config
        self._topic = config.topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._batches: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._batches.sndhwm = config.max_queue_size
        self._batches.bind("inproc://batches")
        self._received: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._received.rcvhwm = config.max_queue_size
        self._received.connect("inproc://batches")
        try:
            self._pub, self._replay = self._publishing_sockets()
        except BaseException:
            self._context.destroy(0)
            raise
        self._number = 0  # of the next batch
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)  # number, batch
        self._thread = threading.Thread(target=self._run, name="draftproof-kv-events", daemon=True)
        self._thread.start()

    def _publishing_sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
        config = self._config
        pub: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        pub.set_hwm(config.hwm)
        if config.binds_endpoint:
            bind(pub, config.endpoint, "endpoint")
        else:
            pub.connect(config.endpoint)
        if config.replay_endpoint is None:
            return pub, None
        replay: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        # A ROUTER drops what exceeds its limit. A reader acknowledges messages in lots of half the limit.
        replay.sndhwm = 2 * (config.buffer_steps + 1)
        bind(replay, config.replay_endpoint, "replay_endpoint")
        return pub, replay

    def publish(self, events: EventLog) -> None:
        """Publish the events that were recorded since the last call, as one batch."""
        if not events.events:
            return
        batch = self._encode(KVEventBatch(time.time(), events.take(), 0))
        try:
            self._batches.send_multipart((self._number.to_bytes(8, "big"), batch), zmq.NOBLOCK)
        except zmq.Again:  # consumers see a gap in the numbers
            log.error("a batch of KV events is lost: %d others wait", self._config.max_queue_size)
        self._number += 1

    def close(self) -> None:
        """Publish what is queued and end the thread."""
        if self._thread.is_alive():
            self._batches.send_multipart((STOP, STOP))
            self._thread.join(STOP_SECONDS)
        self._batches.close(0)
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._received, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        is_running = True
        while is_running:
            ready = dict(poller.poll())
            if self._received in ready:
                number, batch = self._received.recv_multipart()
                is_running = batch != STOP
                if is_running:
                    self._sent.append((number, batch))
                    self._pub.send_multipart((self._topic, number, batch))
            if self._replay is not None and self._replay in ready:
                self._send_again(self._replay)
        self._received.close(0)
        self._pub.close(LINGER_MS)
        if self._replay is not None:
            self._replay.close(LINGER_MS)

    def _send_again(self, replay: zmq.Socket[bytes]) -> None:
        parts = replay.recv_multipart()
        if len(parts) != 3 or len(parts[2]) != 8:
            log.warning("a replay request for KV events is not [identity, empty, number of 8 bytes]")
            return
        client, empty, first = parts
        for number, batch in self._sent:
            if number >= first:
                replay.send_multipart((client, empty, self._topic, number, batch))
        replay.send_multipart((client, empty, b"", END_OF_REPLAY, b""))


def can_bind(config: KVEventsConfig) -> bool:
    """Return whether no other engine of this machine has the addresses of a configuration."""
    with zmq.Context() as context:
        try:
            for endpoint in (config.endpoint if config.binds_endpoint else None, config.replay_endpoint):
                if endpoint is not None:
                    with context.socket(zmq.ROUTER) as probe:
                        bind(probe, endpoint, "endpoint")
        except ConfigError:
            return False
        return True


def bind(publishing: zmq.Socket[bytes], endpoint: str, key: str) -> None:
    """Bind a socket; ConfigError if another engine of this machine has the address."""
    try:
        # ZeroMQ would replace the file of another socket that is in use.
        if endpoint.startswith("ipc://") and _has_listener(endpoint.removeprefix("ipc://")):
            raise zmq.ZMQError(errno.EADDRINUSE)
        publishing.bind(endpoint)
    except zmq.ZMQError as error:
        hint = (
            "give every engine of a machine one of its own"
            if error.errno == errno.EADDRINUSE
            else "change it"
        )
        raise ConfigError(
            f"kv_events_config: the {key} {endpoint} cannot be bound ({error}): {hint}"
        ) from None


def _has_listener(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
