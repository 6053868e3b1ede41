"""Configuration of KV events, in vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from draftproof.errors import ConfigError, nearest

PUBLISHERS = ("null", "zmq")
MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where changes of the prefix cache are published."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # None: zmq if events are enabled
    endpoint: str = "tcp://*:5557"  # of the PUB socket; bound with `*`, `::` or `ipc://`, else connected
    replay_endpoint: str | None = None  # of the ROUTER socket that sends past batches again
    buffer_steps: int = 10_000  # batches that are kept for replay
    hwm: int = 100_000  # messages queued for a slow consumer; later ones are lost to it
    max_queue_size: int = 100_000  # batches that wait for the publisher
    topic: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> KVEventsConfig:
        """Read the mapping of the option `kv_events_config`."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise ConfigError(f"kv_events_config has no key {key!r}: {nearest(key, known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        """Check the type and range of every field."""
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError("kv_events_config: enable_kv_cache_events must be true or false")
        if self.publisher not in (None, *PUBLISHERS):
            raise ConfigError(f"kv_events_config: publisher must be one of {', '.join(PUBLISHERS)}")
        for name in ("endpoint", "replay_endpoint", "topic"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "replay_endpoint" and value is None):
                raise ConfigError(f"kv_events_config: {name} must be a string, got {value!r}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"kv_events_config: {name} must be a positive integer, got {value!r}")

    @property
    def binds_endpoint(self) -> bool:
        """Return whether the PUB socket is bound, not connected."""
        return any(part in self.endpoint for part in ("*", "::", "ipc://", "inproc://"))

    def of_replica(self, rank: int) -> KVEventsConfig:
        """Return the configuration of a replica: ports are larger by its rank, as between the ranks of vLLM.

        Other addresses get a suffix. An endpoint that is connected is the same for all replicas.
        """
        endpoint = _offset(self.endpoint, rank) if self.binds_endpoint else self.endpoint
        replay = self.replay_endpoint and _offset(self.replay_endpoint, rank)
        return replace(self, endpoint=endpoint, replay_endpoint=replay)

    @property
    def is_enabled(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def _offset(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank; rank 0 has the given one, and port 0 is any free port."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    if not port.isdigit() or int(port) + rank > MAX_PORT:
        raise ConfigError(f"kv_events_config: {endpoint} has no port for replica {rank}")
    return endpoint if int(port) == 0 else f"{address}:{int(port) + rank}"
