"""Replicas on Ray Serve: same bits as one server, prefix routing, a killed replica, scaling down.

Needs `ray`, which is no dependency of the tests: `make test-ray`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from draftproof.errors import ConfigError
from ray_cluster import (
    OPTIONS,
    LongStream,
    deploy,
    deploy_and_wait,
    engine_pids,
    is_running,
    long_outputs,
    ray_metrics,
    replica_pids,
    replica_states,
    wait_for,
)
from server_process import TIMEOUT_SECONDS, Program, command_line, started
from serving import make_folder

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

NUM_REQUESTS = 200
NUM_SYSTEM_PROMPTS = 20
NUM_CLIENTS = 8
TIMES = ("created", "metrics")  # fields that contain the time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model with a context that is long enough to interrupt a stream."""
    folder = make_folder(tmp_path_factory.mktemp("replicated"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return str(folder)


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[Program]:
    """Start one server with the same options."""
    flags = [
        f"--{name.replace('_', '-')}={json.dumps(value) if isinstance(value, dict) else value}"
        for name, value in OPTIONS.items()
    ]
    with started(command_line(model, *flags)) as running:
        yield running


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start Ray and Ray Serve on this machine."""
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def comparable(value: Any) -> Any:
    """Return a response without times and cached tokens, whose number depends on the order of requests."""
    made = {name: item for name, item in value.items() if name not in TIMES}
    if made.get("usage"):
        made["usage"] = {**made["usage"], "prompt_tokens_details": None}
    return made


def answer(client: openai.OpenAI, number: int) -> Any:
    """Return everything that a client receives for request `number`."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8 + number % 17, "seed": number}
    body |= {"temperature": (0.0, 0.8, 1.3)[number % 3], "extra_headers": {"x-request-id": f"r-{number}"}}
    text = f"one two three {number} four five and then {number % 7} again one two three"
    messages = [{"role": "system", "content": f"System {number % 5}"}, {"role": "user", "content": text}]
    if number % 5 == 0:
        made = client.completions.create(prompt=text, logprobs=3, n=2, **body)
    elif number % 5 == 1:
        made = client.completions.create(prompt=[text, "two"], stream=True, logprobs=2, **body)
    elif number % 5 == 2:
        made = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=4, **body)
    elif number % 5 == 3:
        usage = {"include_usage": True}
        made = client.chat.completions.create(messages=messages, stream=True, stream_options=usage, **body)
    else:
        made = client.responses.create(
            model="tiny", input=text, max_output_tokens=12, temperature=0.0, extra_body={"seed": number}
        )
        return [item.model_dump()["content"] for item in made.output]
    if number % 5 in (1, 3):
        return sorted((json.dumps(comparable(chunk.model_dump())) for chunk in made), key=choice_index)
    return comparable(made.model_dump())


def choice_index(chunk: str) -> int:
    """Return the choice of a chunk: those of one choice are in order, several choices are interleaved."""
    choices = json.loads(chunk)["choices"]
    return choices[0]["index"] if choices else 1 << 30


def answers(url: str) -> list[Any]:
    """Send all requests, several at a time."""
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS) as client,
        ThreadPoolExecutor(NUM_CLIENTS) as pool,
    ):
        return list(pool.map(lambda number: answer(client, number), range(NUM_REQUESTS)))


def test_two_replicas_give_the_bits_of_one_server(model: str, alone: Program, url: str) -> None:
    deploy_and_wait(model)
    expected = answers(alone.url)
    got = answers(url)
    assert [pair for pair in zip(got, expected, strict=True) if pair[0] != pair[1]] == []
    assert expected[0] != expected[5]  # the comparison has something to compare
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as http:
        sent = {"x-request-id": "mine"}
        assert http.get("/v1/models", headers=sent).headers.get_list("x-request-id") == ["mine"]
        for path, body in (("/v1/completions", {"prompt": "a", "n": 99}), ("/v1/nothing", {})):
            mine, other = (client.post(path, json=body) for client in (http, alone.http))
            assert (mine.status_code, mine.json()) == (other.status_code, other.json())
        wait_for(lambda: "draftproof_num_requests_running" in ray_metrics())
        refused = http.post("/sleep")
        assert refused.status_code == 400 and "one replica only" in refused.text


def test_killed_replica_ends_its_streams_with_errors_and_returns(
    model: str, alone: Program, url: str
) -> None:
    deploy_and_wait(model)
    count = 6
    expected = long_outputs(alone.http, count)
    before = replica_pids()
    engines = engine_pids(before)
    assert len(before) == len(engines) == 2
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as http:
        streams = [LongStream(http, number) for number in range(count)]
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)  # no stream ends before the replica is killed
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{before[0]}").exists())
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):  # a stopped process ends with SIGCONT
                os.kill(pid, signal.SIGCONT)
        lost = 0
        for number, stream in enumerate(streams):
            got = stream.rest()
            if "error" in got[-1]:
                lost += 1
                assert (
                    got[-1]["error"]["code"] == "engine_down" and "try again" in got[-1]["error"]["message"]
                )
                assert got[:-1] == expected[number][: len(got) - 1]
            else:
                assert got == expected[number]
        assert 0 < lost < count
        assert LongStream(http, 0).rest() == expected[0]  # meanwhile the other replica serves
        wait_for(lambda: is_running(2))
        assert before[0] not in replica_pids()
        assert long_outputs(http, count) == expected
    wait_for(lambda: len([pid for pid in engines if Path(f"/proc/{pid}").exists()]) == 1)


def test_scaling_down_loses_no_stream(model: str, alone: Program, url: str) -> None:
    deploy_and_wait(model)
    count = 6
    expected = long_outputs(alone.http, count)
    before = replica_pids()
    engines = engine_pids(before)
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as http:
        streams = [LongStream(http, number) for number in range(count)]
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        deploy(model, num_replicas=1)
        wait_for(lambda: replica_states().get("STOPPING") == 1)
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
        assert [stream.rest() for stream in streams] == expected
        wait_for(lambda: len(replica_pids()) == 1)
        assert set(replica_pids()) < set(before)
    wait_for(lambda: len(engine_pids(before)) == 1)


def ask(client: openai.OpenAI, number: int) -> Any:
    """Send a request with one of the shared system prompts; return the usage."""
    system = f"{number % NUM_SYSTEM_PROMPTS} " + "one two three four five six " * 25
    messages = [{"role": "system", "content": system}, {"role": "user", "content": str(number)}]
    made = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, temperature=0.0)
    return made.usage


def test_prefix_routing_finds_twice_the_cached_tokens(model: str, alone: Program, url: str) -> None:
    """Send 20 system prompts in turn to two replicas; the cache of a replica holds 10 of them and a half."""
    from ray import serve

    with openai.OpenAI(base_url=f"{alone.url}/v1", api_key="none", timeout=TIMEOUT_SECONDS) as client:
        tokens = ask(client, 0).prompt_tokens
    rates = {}
    for routing in ("load", "prefix"):
        serve.delete("default")
        deploy_and_wait(model, routing=routing, kv_cache_tokens=(2 * NUM_SYSTEM_PROMPTS + 2) * tokens // 4,
                        max_model_len=2 * tokens)  # fmt: skip
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_SECONDS) as client:
            used = [ask(client, number) for number in range(4 * NUM_SYSTEM_PROMPTS)]
        cached = sum(usage.prompt_tokens_details.cached_tokens for usage in used)
        rates[routing] = cached / sum(usage.prompt_tokens for usage in used)
    print(f"share of cached prompt tokens, prompts of {tokens}: {rates}")
    assert rates["prefix"] >= 2 * rates["load"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 1}, "http_options"),
        ({"devise": "cpu"}, "did you mean 'device'"),
        ({"num_replicas": 0}, "num_replicas must be at least 1"),
        ({"num_replicas": 2, "max_stored_responses": 5}, "needs one replica"),
        ({"num_replicas": 2, "autoscaling_config": {"max_replicas": 2}}, "not both"),
        ({"routing": "other"}, "routing"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    from draftproof.ray import build_app

    with pytest.raises(ConfigError, match=message):
        build_app(options)


def test_options_of_the_deployment() -> None:
    """Strings as `serve run` passes them; ranks in one bundle; drain until no request can be open."""
    from draftproof.ray.build import engine_deployment
    from draftproof.ray.options import read_options

    given = {"tensor_parallel_size": "4", "num_gpus": "4", "num_cpus": "2", "vllm_metrics": "true"}
    scaling = '{"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 16}'
    options = read_options({**given, "autoscaling_config": scaling, "request_seconds": "100"})
    made = engine_deployment(options)
    assert options.settings.vllm_metrics and options.settings.max_stored_responses == 0
    assert made["placement_group_bundles"] == [{"CPU": 2.0, "GPU": 4.0}]
    assert made["autoscaling_config"]["target_ongoing_requests"] == 16 and "num_replicas" not in made
    assert made["graceful_shutdown_timeout_s"] == 130
    assert "request_router_config" in made
    assert "request_router_config" not in engine_deployment(read_options({"routing": "load"}))


def test_router_prefers_the_longest_recorded_prefix() -> None:
    from draftproof.ray.router import PrefixRecord

    record = PrefixRecord(max_blocks=6)
    record.add([b"1", b"2", b"3"], "x")
    record.add([b"1", b"4"], "y")
    both = {"x", "y"}
    assert record.longest_match([b"1", b"2", b"9"], both) == {"x"}
    assert record.longest_match([b"1", b"9"], both) == both
    assert record.longest_match([b"1", *[b"9"] * 20], both) == set()  # below a tenth of the prompt
    assert record.longest_match([b"1", b"2"], {"y"}) == {"y"} and not record.longest_match([b"8"], both)
    record.add([b"5", b"6", b"7"], "x")  # the seventh block: the least recent one is dropped
    assert record.longest_match([b"1", b"2", b"3"], both) == {"x"}
    assert record.fewest_blocks(["x", "y"]) == ["y"] and record.fewest_blocks(["x", "y", "z"]) == ["z"]
    record.remove("x")
    assert record.fewest_blocks(["x", "y"]) == ["x"]
    assert record.longest_match([b"1", b"2"], both) == {"y"}


def test_replicas_publish_kv_events_at_their_own_ports() -> None:
    """Replicas with one configured endpoint get different ports; one that is in use is skipped."""
    from draftproof.ray.event_endpoints import with_endpoints_of_replica

    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        engine = {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port - 1}"}}
        made = [with_endpoints_of_replica(engine, rank)["kv_events_config"]["endpoint"] for rank in range(3)]
    assert made[1:] == [f"tcp://*:{port + 1}"] * 2
    assert made[0] != f"tcp://*:{port}"
    assert with_endpoints_of_replica({"kv_events_config": None}, 1) == {"kv_events_config": None}


def test_examples_are_valid() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from draftproof.ray import build_app

    files = sorted((Path(__file__).parents[2] / "examples" / "ray").glob("*.yaml"))
    assert len(files) == 3
    for file in files:
        found = yaml.safe_load(file.read_text())
        if found.get("kind") == "RayService":
            found = yaml.safe_load(found["spec"]["serveConfigV2"])
        (application,) = ServeDeploySchema.model_validate(found).applications
        assert build_app(dict(application.args))
