"""Application on a Ray cluster of this machine: deployment, processes, metrics, long streams."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from server_process import TIMEOUT_SECONDS

LONG_TOKENS = 1500
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
OPTIONS: dict[str, Any] = {
    "served_model_name": "tiny",
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "seed": 5,
    "max_num_seqs": 8,
    "kv_cache_tokens": 16384,
    "speculative_config": SPECULATION,
}


def deploy(model: str, num_replicas: int = 2, **options: Any) -> None:
    """Deploy the application as a YAML file does; a changed number of replicas is applied in place."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application = {
        "import_path": "draftproof.ray:build_app",
        "args": {"model": model, "num_cpus": 0.5, "num_replicas": 2, **OPTIONS, **options},
        "deployments": [{"name": "Engine", "num_replicas": num_replicas}],
    }
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def deploy_and_wait(model: str, num_replicas: int = 2, **options: Any) -> None:
    """Deploy and wait until all replicas serve."""
    deploy(model, num_replicas, **options)
    wait_for(lambda: is_running(num_replicas))


def replica_states() -> dict[str, int]:
    """Return the number of engine replicas by state."""
    from ray import serve

    application = serve.status().applications.get("default")
    if application is None or "Engine" not in application.deployments:
        return {}
    return dict(application.deployments["Engine"].replica_states)


def is_running(num_replicas: int) -> bool:
    """Return whether the application serves with a number of replicas."""
    from ray import serve

    application = serve.status().applications.get("default")
    is_ready = application is not None and application.status == "RUNNING"
    has_engines = len(engine_pids(replica_pids())) == num_replicas
    return is_ready and has_engines and replica_states() == {"RUNNING": num_replicas}


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, which is expensive to check."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition does not hold in time"
        time.sleep(0.1)


def replica_pids() -> list[int]:
    """Return the processes of the engine's replicas."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(
                b"ray::ServeReplica:default:Engine"
            ):
                found.append(int(entry.name))
    return found


def engine_pids(replicas: list[int]) -> list[int]:
    """Return the engine processes of replicas."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"draftproof.serve.worker.main" in (entry / "cmdline").read_bytes():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(entry.name)] if parent in replicas else []
    return found


def ray_metrics() -> str:
    """Return the page with Ray's metrics of this machine."""
    import ray

    (node,) = ray.nodes()
    return httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text


class LongStream:
    """Open stream of a long output."""

    def __init__(self, http: httpx.Client, number: int) -> None:
        body = {"prompt": f"{number} one two", "max_tokens": LONG_TOKENS, "temperature": 1.0, "seed": number}
        body |= {"stream": True, "ignore_eos": True, "logprobs": 1}
        request = http.build_request("POST", "/v1/completions", json=body)
        self._response = http.send(request, stream=True)
        assert self._response.status_code == 200
        self._lines = (line[6:] for line in self._response.iter_lines() if line.startswith("data: "))
        self._events = [json.loads(next(self._lines))]

    def rest(self) -> list[Any]:
        """Return the choices of all events; the last event may be an error."""
        with contextlib.closing(self._response):
            for line in self._lines:
                if line == "[DONE]":
                    return [event.get("choices", event) for event in self._events]
                self._events.append(json.loads(line))
        raise AssertionError("the stream has no end")


def long_outputs(http: httpx.Client, count: int) -> list[list[Any]]:
    """Return the events of long streams that nothing interrupts."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: LongStream(http, number).rest(), range(count)))
