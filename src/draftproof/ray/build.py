"""Builder of the application for Ray Serve: an ingress and replicas of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from draftproof.config import EngineConfig
from draftproof.ray.ingress import Ingress
from draftproof.ray.options import CLOSE_SECONDS, AppOptions, read_options
from draftproof.ray.replica import EngineReplica
from draftproof.ray.router import PrefixRouter

ENGINE_NAME = "Engine"
MAX_INGRESS_REQUESTS = 4096  # at once, of one ingress replica


def build_app(args: dict[str, Any]) -> serve.Application:
    """Return the application; see `draftproof.ray.options` for the arguments."""
    options = read_options(args)
    EngineConfig.parse(options.model, dict(options.engine))  # an invalid option fails here, not in a replica
    engine = serve.deployment(EngineReplica).options(**engine_deployment(options))
    ingress = serve.deployment(Ingress).options(
        num_replicas=options.ray.num_ingress_replicas,
        max_ongoing_requests=MAX_INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=options.drain_seconds + CLOSE_SECONDS,
    )
    settings = options.settings
    handle = engine.bind(options.model, options.engine, settings, options.log_level)
    return ingress.bind(handle, settings.max_body_bytes, settings.body_seconds)


def engine_deployment(options: AppOptions) -> Mapping[str, Any]:
    """Return the options of the engine's deployment.

    All ranks of a replica are processes of one machine, so their GPUs are one bundle of a placement group.
    """
    ray = options.ray
    made: dict[str, Any] = {
        "name": ENGINE_NAME,
        "max_ongoing_requests": ray.max_ongoing_requests,
        "ray_actor_options": {"num_cpus": ray.num_cpus, "num_gpus": options.num_gpus},
        "graceful_shutdown_timeout_s": options.drain_seconds + CLOSE_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    if ray.autoscaling_config is None:
        made["num_replicas"] = ray.num_replicas
    else:
        made["autoscaling_config"] = ray.autoscaling_config
    if options.num_ranks > 1:
        bundle = {"CPU": ray.num_cpus} | ({"GPU": options.num_gpus} if options.num_gpus else {})
        made["placement_group_bundles"] = [bundle]
        made["placement_group_strategy"] = "STRICT_PACK"
    if ray.routing == "prefix":
        made["request_router_config"] = RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"max_queue_difference": ray.max_queue_difference},
        )
    return made
