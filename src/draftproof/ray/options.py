"""Options of an application on Ray Serve: those of its deployments, and those of `draftproof serve`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from draftproof.cli import serve
from draftproof.cli.engine_options import offered_options, read_engine_options
from draftproof.errors import ConfigError
from draftproof.serve.settings import ANY_HOST, Settings

SOURCE = "draftproof.ray"  # for error messages
CLOSE_SECONDS = 30.0  # after draining, for a replica to end its engine
# options of `draftproof serve` without a meaning here, and what to use instead
REFUSED = {
    "host": "use the http_options of Ray Serve",
    "port": "use the http_options of Ray Serve",
    "root_path": "use the route_prefix of the Ray Serve application",
    "ssl_certfile": "terminate TLS before Ray Serve",
    "ssl_keyfile": "terminate TLS before Ray Serve",
    "server_processes": "use num_ingress_replicas",
    "log_file": "Ray collects the logs of replicas",
    "config": "give the options themselves",
}


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the deployments."""

    num_replicas: int = 1
    autoscaling_config: dict[str, Any] | None = None  # of Ray Serve, instead of num_replicas
    num_gpus: float | None = None  # of a replica; None: see `default_num_gpus`
    num_cpus: float = 1.0  # of a replica
    max_ongoing_requests: int = 256  # of a replica; further requests wait in the ingress
    num_ingress_replicas: int = 1
    routing: Literal["prefix", "load"] = "prefix"
    max_queue_difference: int = 8  # by which the queue of a replica with the prefix may be longer

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_ingress_replicas", "max_ongoing_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.autoscaling_config is not None and self.num_replicas != 1:
            raise ConfigError("give num_replicas or autoscaling_config, not both")

    @property
    def may_have_several_replicas(self) -> bool:
        """True if the engine has or may get more than one replica."""
        return self.num_replicas > 1 or self.autoscaling_config is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """All options of an application."""

    ray: RayOptions
    model: str
    engine: dict[str, Any]
    settings: Settings
    log_level: str
    drain_seconds: float  # of a replica that is removed

    @property
    def num_ranks(self) -> int:
        """Number of processes that a model is cut between."""
        return int(self.engine["tensor_parallel_size"])

    @property
    def num_gpus(self) -> float:
        """GPUs of a replica."""
        if self.ray.num_gpus is not None:
            return self.ray.num_gpus
        return default_num_gpus(self.engine["device"], self.num_ranks)


def default_num_gpus(device: str, num_ranks: int) -> int:
    """Return one GPU a rank, or 0 where the device is a CPU or this machine has no GPU."""
    may_be_gpu = device.startswith(("auto", "cuda"))
    return num_ranks if may_be_gpu and any(Path("/dev").glob("nvidia[0-9]*")) else 0


def read_options(given: Mapping[str, Any]) -> AppOptions:
    """Parse the arguments of `build_app`; values may be strings, as `serve run` passes them."""
    names = RayOptions.__struct_fields__
    own = {name: _decode_object(value) for name, value in given.items() if name in names}
    others = {name: value for name, value in given.items() if name not in names}
    try:
        ray = msgspec.convert(own, RayOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SOURCE}: {error}") from None
    for name in others:
        if (hint := REFUSED.get(name.replace("-", "_"))) is not None:
            raise ConfigError(f"{SOURCE}: {name} has no effect on Ray: {hint}")
    if ray.may_have_several_replicas:
        if int(others.get("max_stored_responses") or 0):
            raise ConfigError(
                "max_stored_responses needs one replica without autoscaling: the store is in its memory"
            )
        others["max_stored_responses"] = 0
    others.setdefault("allowed_hosts", ANY_HOST)
    parser = _Parser(allow_abbrev=False)
    serve.add_options(parser)
    flags = {name: _decode_bool(value) for name, value in others.items() if value is not None}
    options = parser.parse_args(list(serve.to_arguments(parser, flags, SOURCE)))
    settings = serve.read_settings(options)
    # without the option no response of a removed replica is cut
    drain = settings.drain_seconds if "drain_seconds" in others else settings.request_seconds
    return AppOptions(
        ray=ray,
        model=options.model,
        engine=read_engine_options(options, offered_options()),
        settings=settings,
        log_level=options.log_level,
        drain_seconds=drain,
    )


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise ConfigError(f"{SOURCE}: {message}")


def _decode_object(value: Any) -> Any:
    """Return the object of a JSON string; other values as they are."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{SOURCE}: not JSON: {value!r}: {error}") from None


def _decode_bool(value: Any) -> Any:
    """Return a boolean that was written as a string; other values as they are."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
