"""Endpoints of the KV events of a replica: the replicas of a machine have different ports."""

from __future__ import annotations

import logging
from typing import Any

from draftproof.compat.kv_events_config import KVEventsConfig
from draftproof.engine.kv_events.publisher import can_bind
from draftproof.errors import ConfigError

MAX_TRIED_PORTS = 64
log = logging.getLogger("ray.serve")


def with_endpoints_of_replica(engine: dict[str, Any], local_rank: int) -> dict[str, Any]:
    """Return the engine's options with the endpoints of a replica.

    The offset of its ports is its rank on its machine. Ray numbers replicas again after scaling down, so that
    another replica may still have the port. It is skipped then.
    """
    given = KVEventsConfig.parse(engine.get("kv_events_config") or {})
    if not given.is_enabled:
        return engine
    for offset in range(local_rank, local_rank + MAX_TRIED_PORTS):
        own = given.of_replica(offset)
        if can_bind(own):
            log.info("KV events are published at %s, replay at %s", own.endpoint, own.replay_endpoint)
            changed = {"endpoint": own.endpoint, "replay_endpoint": own.replay_endpoint}
            return engine | {"kv_events_config": {**engine["kv_events_config"], **changed}}
    first = given.of_replica(local_rank).endpoint
    raise ConfigError(f"kv_events_config: {MAX_TRIED_PORTS} ports from {first} on are in use")
