"""`draftproof serve` as a program: processes, banner, config file, shutdown; and `chat --url`."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pytest import CaptureFixture

from draftproof.cli.engine_options import offered_options, read_engine_options
from draftproof.cli.main import _parse, main
from draftproof.cli.serve import _describe_numerics, read_settings
from draftproof.serve.http.request_guard import OpenRequestCounts, create_shared_counts
from draftproof.serve.settings import KEY_VARIABLE, ApiKeys, Settings
from server_process import TIMEOUT_SECONDS, Program, command_line, started
from serving import events
from worker_thread import wait_for

SPEC = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": false}'


def program(folder: Path, *options: str, **variables: str) -> AbstractContextManager[Program]:
    """Start `draftproof serve` on the tiny model."""
    tiny = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--speculative-config", SPEC]
    return started(command_line(str(folder), *tiny, *options), **variables)


def test_banner_names_fast_numerics_only_where_they_differ() -> None:
    lines = [_describe_numerics("fast", f"float32 on cpu ({name} backend)") for name in ("triton", "cpu")]
    assert "may depend on the batch" in lines[0] and "same bits as exact" in lines[1]
    assert _describe_numerics("exact", "bfloat16 on cuda (triton backend)") == "exact"


def test_server_shows_banner_serves_and_drains_at_sigterm(
    folder: Path, capsys: CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "three four secret five"
    with program(folder, "--served-model-name", "tiny", "--served-model-name", "also") as running:
        shown = "Draftproof", "float32 on cpu", "exact", "ngram", "target_match: lossless", "256 tokens"
        assert all(text in running.banner for text in shown)
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            assert [card.id for card in client.models.list().data] == ["tiny", "also"]
            body: dict[str, Any] = {"prompt": secret, "max_tokens": 9, "temperature": 0, "logprobs": 3}
            body["echo"] = True
            got = client.completions.create(model="also", **body)
        off = running.post({**body, "speculative": False}).json()["choices"][0]
        assert off["text"] == got.choices[0].text
        assert off["logprobs"]["token_logprobs"] == got.choices[0].logprobs.token_logprobs
        assert running.http.get("/health").json() == {"status": "ok", "reason": None, "restarts": 0}
        metrics = running.http.get("/metrics").text
        assert 'draftproof:worker_up{model_name="tiny"} 1.0' in metrics
        assert 'draftproof:engine_step_duration_seconds_count{model_name="tiny"}' in metrics

        monkeypatch.setattr("sys.stdin", io.StringIO("one two three\n/exit\n"))
        assert main(["chat", "--url", running.url, "-n", "12"]) == 0
        out = capsys.readouterr().out
        assert "12 tokens in" in out and "acceptance length" in out and "ngram" in out

        long = {"prompt": "one", "max_tokens": 250, "ignore_eos": True, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=long) as response:
            chunks = events(response)
            next(chunks)
            running.process.send_signal(signal.SIGTERM)
            rest = list(chunks)  # an open stream is finished
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(TIMEOUT_SECONDS) == 0
    lines = [json.loads(line) for line in running.log if line.startswith("{")]
    requests = [line for line in lines if line["message"] == "request"]
    assert {line["path"] for line in requests} == {"/v1/completions", "/v1/chat/completions"}
    assert "secret" not in "".join(running.log) and any(line["message"] == "drained" for line in lines)


def test_cleared_row_no_longer_counts_as_open_requests() -> None:
    settings = Settings(api_keys=ApiKeys(["alpha", "beta"]))
    alpha, beta = settings.api_keys.names
    fd, parent = create_shared_counts(settings, 2)
    one, two = (OpenRequestCounts(settings, row, 2, fd) for row in range(2))
    os.close(fd)
    assert one.increment(alpha) == (1, 1) and two.increment(alpha) == (2, 2) and two.increment(beta) == (3, 1)
    two.decrement(beta)
    parent.clear(1)
    assert one.increment("-") == (2, 1) and one.increment(alpha) == (3, 2) and two.increment(beta) == (4, 1)
    assert OpenRequestCounts(settings).increment(alpha) == (1, 1)


def test_several_http_processes_share_limits_and_metrics(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    lines = "server-processes = 2", "vllm_metrics = true", "max_n = 3", 'served_model_name = ["tiny"]'
    file.write_text("\n".join([*lines, "max_concurrent_per_key = 1", "max_concurrent = 2"]))
    mine = {"authorization": "Bearer alpha"}
    keys = {KEY_VARIABLE: "alpha,beta,gamma"}
    with program(folder, "--config", str(file), "--max-n", "2", **keys) as running:
        assert running.post({"prompt": "one"}).status_code == 401
        assert running.post({"prompt": "one", "n": 3}, headers=mine).status_code == 400
        body = {"prompt": "one two three one two", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        for _ in range(6):  # each over a connection of its own, so that both processes serve some
            assert (
                httpx.post(
                    f"{running.url}/v1/completions", json=body, headers=mine, timeout=TIMEOUT_SECONDS
                ).status_code
                == 200
            )

        def total() -> float:
            text = httpx.get(f"{running.url}/metrics", headers=mine, timeout=TIMEOUT_SECONDS).text
            name = r'vllm:spec_decode_num_emitted_tokens_total\{model_name="tiny"\}'
            found = re.search(name + r" ([\d.]+)", text)
            return float(found[1]) if found else 0.0

        # either process may respond, and each reads the metrics of the other once a second
        wait_for(lambda: all(total() == 120 for _ in range(8)))
        check_limits(running)
        assert running.stop() == 0


def check_limits(running: Program) -> None:
    """Stop the engine, so that requests stay open: both processes reject more of that key, and a third."""

    def post(key: str) -> int:
        """Send a request over a new connection, which either process may accept."""
        body, headers = {"prompt": "one", "max_tokens": 3}, {"authorization": f"Bearer {key}"}
        url = f"{running.url}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_SECONDS).status_code

    def wait_for_open(number: int) -> None:
        headers, line = {"authorization": "Bearer alpha"}, f'requests_open{{model_name="tiny"}} {number}.0'
        options: Any = {"headers": headers, "timeout": TIMEOUT_SECONDS}
        wait_for(lambda: line in httpx.get(f"{running.url}/metrics", **options).text)

    worker = child_of(running.process.pid)
    held = [threading.Thread(target=post, args=(key,)) for key in ("alpha", "beta")]
    os.kill(worker, signal.SIGSTOP)
    try:
        held[0].start()
        wait_for_open(1)
        assert [post("alpha") for _ in range(8)] == [429] * 8
        held[1].start()
        wait_for_open(2)
        assert [post("gamma") for _ in range(8)] == [503] * 8
    finally:
        os.kill(worker, signal.SIGCONT)
    for each in held:
        each.join()
    assert [post("alpha") for _ in range(4)] == [200] * 4


def test_killed_worker_ends_streams_and_is_restarted(folder: Path) -> None:
    """Clients get errors at once, /health reports the restart, and later outputs are the same."""
    body = {"prompt": "one two three", "max_tokens": 200, "temperature": 0.5, "seed": 4, "ignore_eos": True}
    with program(folder, "--max-num-seqs", "4") as running:
        want = running.post({**body, "max_tokens": 20}).json()["choices"][0]["text"]
        worker = child_of(running.process.pid)
        ends: list[Any] = []
        has_begun = threading.Event()

        def read(i: int) -> None:
            more = {**body, "seed": i, "stream": True, "n": 4}
            url = f"{running.url}/v1/completions"
            with httpx.stream("POST", url, json=more, timeout=TIMEOUT_SECONDS) as response:
                chunks = [] if response.status_code == 200 else None
                for chunk in events(response) if chunks is not None else ():
                    chunks.append(chunk)
                    has_begun.set()
                ends.append((response.status_code, chunks))

        readers = [threading.Thread(target=read, args=(i,)) for i in range(8)]
        os.kill(worker, signal.SIGSTOP)  # no request ends before the last one is open
        for reader in readers:
            reader.start()
        line = f'http_requests_open{{model_name="{folder}"}} 8'
        wait_for(lambda: line in running.http.get("/metrics").text)
        os.kill(worker, signal.SIGCONT)
        assert has_begun.wait(TIMEOUT_SECONDS)
        os.kill(worker, signal.SIGKILL)
        for reader in readers:
            reader.join(TIMEOUT_SECONDS)
        assert len(ends) == 8
        for status, chunks in ends:
            code = None if status == 503 else chunks[-1].get("error", {}).get("code")
            assert status == 503 or code == "engine_down" or len(chunks) > 100
        assert any(status == 503 or "error" in chunks[-1] for status, chunks in ends)
        states = set()
        while (health := running.http.get("/health")).status_code != 200:
            states.add(health.json()["status"])
            refused = running.post(body)
            assert refused.status_code in (200, 503), refused.text
            time.sleep(0.05)  # the worker needs the core
        assert states <= {"restarting", "starting"} and health.json()["restarts"] == 1
        assert running.post({**body, "max_tokens": 20}).json()["choices"][0]["text"] == want
        assert "worker_restarts_total{" in running.http.get("/metrics").text


def child_of(pid: int) -> int:
    """Return the pid of the worker process."""
    (line,) = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.read_text().rsplit(")", 1)[1].split()[1] == str(pid)
        and b"draftproof.serve.worker.main" in path.with_name("cmdline").read_bytes()
    ]
    return int(line)


def test_config_file_options_yield_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    values = {"model": "m", "port": 9, "enable_prefix_caching": False, "log_prompts": True}
    more = {"request_seconds": 5, "speculative_config": {"method": "given"}}
    file.write_text(json.dumps({**values, **more}))
    found = _parse(["serve", "--config", str(file), "--port", "10"])
    assert (found.model, found.port, found.log_prompts) == ("m", 10, True)
    engine = read_engine_options(found, offered_options())
    assert engine["speculative_config"] == {"method": "given"} and engine["enable_prefix_caching"] is False
    assert read_settings(found).request_seconds == 5
    assert _parse(["serve", "other", "--config", str(file)]).model == "other"
    plain = _parse(["serve"])
    assert plain.host == "127.0.0.1" and read_settings(plain) != Settings(max_n=3)
    off = _parse(["serve", "--speculative-config", "off"])
    assert read_engine_options(off, offered_options())["speculative_config"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 8000", "did you mean 'port'"),
        ("port = ", "not TOML"),
        ("speculative_config = 'x'", "--speculative-config is not JSON"),
        ("max_n = 0", "max_n must be a positive integer"),
        ("server_processes = 0", "--server-processes"),
        ("host = '192.0.2.1'", "cannot listen"),
        ("vllm_metrics = 1", "vllm_metrics must be true or false"),
        ("log_file = '/nowhere/log'", "cannot be written"),
        ("api_key_file = '/nowhere/keys'", "cannot be read"),
        ("[speculative_config]\nk = 3", "needs a 'method'"),
    ],
)
def test_invalid_config_file_is_refused(
    text: str, message: str, tmp_path: Path, capsys: CaptureFixture[str], folder: Path
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    options = ["--load-format", "dummy", "--port", "0", "--config", str(file)]
    assert main(["serve", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "70000"], "0 to 65535"),
        (["chat", "--url", "http://127.0.0.1:1"], "no server responds"),
        (["chat", "--url", "ftp://x"], "not the address of a server"),
    ],
)
def test_invalid_address_is_refused(arguments: list[str], message: str, capsys: CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
