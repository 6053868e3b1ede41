"""Worker process under a supervisor: killed, hung, terminated, orphaned; nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from async_serving import CASES, LONG, collect, facts, params
from draftproof import ConfigError, EngineDeadError, EngineDownError, LoadError, RequestOutput
from draftproof.serve import supervisor as supervising
from draftproof.serve.ipc.remote_llm import RemoteLLM, connect
from draftproof.serve.supervisor import Supervisor
from text_pieces import CONFIG, Pieces
from worker_thread import TIMEOUT_SECONDS, wait_for

OPTIONS: Any = {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 8, "device": "cpu"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(autouse=True)
def no_process_or_thread_is_left() -> Iterator[None]:
    earlier = set(threading.enumerate())  # threads of engines that other tests of this process keep
    yield
    wait_for(lambda: not worker_pids())
    started = set(threading.enumerate()) - earlier
    assert not [t for t in started if t.name.startswith("draftproof-")]


def worker_pids() -> list[int]:
    """Return the pids of the worker processes that this process started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"draftproof.serve.worker.main" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                found += [int(entry.name)] if int(parent) == os.getpid() else []
    return found


def is_alive(pid: int) -> bool:
    """Return True for a running process that is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def wait_until_ready(llm: RemoteLLM) -> None:
    while llm.worker_status().state != "ready":
        await asyncio.sleep(0.02)


def test_killed_worker_ends_streams_with_errors_and_is_restarted(
    folder: Path, alone: list[RequestOutput], monkeypatch: MonkeyPatch
) -> None:
    """Kill a worker with 32 streams and a whole request; then remove the model, so that restarts fail."""
    monkeypatch.setattr(supervising.log, "disabled", True)
    options = {"speculative_config": {"method": "ngram"}, **OPTIONS}
    supervisor = Supervisor(str(folder), max_restarts=2, first_delay=0.05, **options)
    socket = Path(supervisor.address.removeprefix("ipc://"))

    async def main(llm: RemoteLLM) -> None:
        assert facts(await llm.generate(*CASES[0])) == facts(alone[0])
        streams = [llm.stream("ab", params(i, **LONG)) for i in range(32)]
        pid = llm.worker_status().pid
        assert pid is not None and is_alive(pid)
        begun = llm.stream("ab", params(**LONG))
        assert await begun.read()
        os.kill(pid, signal.SIGSTOP)  # no request ends before the last one is open
        whole = asyncio.create_task(llm.generate("ab", params(99, **LONG)))
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        while llm.num_open < 33 or any(stream._queue is None for stream in streams):
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert (await collect(begun))[-1].finish_reason in ("error", "length")  # it may have ended before
        for stream, some in zip(streams, [await task for task in tasks], strict=True):
            assert some[-1].finish_reason == "error"
            assert "the engine's process has ended" in str(some[-1].error)
            assert stream.output is not None and not stream.output.finished
        output = await whole
        assert not output.finished and output.outputs[0].finish_reason == "error"
        assert not llm.num_open and not llm.dead
        with pytest.raises(EngineDownError, match="try again"):
            await llm.generate("ab", params())
        await wait_until_ready(llm)
        status = llm.worker_status()
        assert status.restarts == 1 and status.pid != pid and "SIGKILL" in str(status.reason)
        assert supervisor.status() == status
        assert facts(await llm.generate(*CASES[0])) == facts(alone[0])
        # without the model no restart succeeds
        (folder / "config.json").unlink()
        os.kill(status.pid or 0, signal.SIGKILL)
        while llm.worker_status().state != "failed":
            await asyncio.sleep(0.02)
        assert llm.worker_status().restarts == 3 - 1 and "3 times in a row" in str(llm.worker_status().reason)
        with pytest.raises(EngineDeadError, match="times in a row"):
            await llm.generate("ab", params())
        assert llm.dead

    with supervisor:
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700

        async def run() -> None:
            async with (
                connect(supervisor.address, tokenizer=Pieces()) as llm,
                asyncio.timeout(TIMEOUT_SECONDS),
            ):  # type: ignore[arg-type]
                await main(llm)

        asyncio.run(run())
    assert not socket.parent.exists()
    supervisor.stop()


def test_hung_worker_is_killed_and_terminated_worker_finishes(folder: Path, monkeypatch: MonkeyPatch) -> None:
    """SIGSTOP, then SIGTERM: the second worker finishes its request before it ends."""
    monkeypatch.setattr(supervising.log, "disabled", True)
    with Supervisor(str(folder), first_delay=0.05, hang_seconds=3600, **OPTIONS) as supervisor:

        async def main() -> None:
            async with (
                connect(supervisor.address, tokenizer=Pieces()) as llm,
                asyncio.timeout(TIMEOUT_SECONDS),
            ):  # type: ignore[arg-type]
                pid = llm.worker_status().pid or 0
                stream = llm.stream("ab", params(**LONG))
                await stream.read()
                os.kill(pid, signal.SIGSTOP)
                supervisor._hang_seconds = 0.5  # only from now on: a slow start must not count as a hang
                events = await collect(stream)
                supervisor._hang_seconds = None
                assert events[-1].finish_reason == "error"
                await wait_until_ready(llm)
                reason = str(llm.worker_status().reason)
                assert "a step took longer" in reason or "no report" in reason
                assert not is_alive(pid)
                pid = llm.worker_status().pid or 0
                stream = llm.stream("ab", params(**LONG))
                await stream.read()
                os.kill(pid, signal.SIGTERM)
                events = await collect(stream)
                assert (events[-1].finish_reason, events[-1].error) == ("length", None)
                while llm.worker_status().restarts < 2:
                    await asyncio.sleep(0.02)
                await wait_until_ready(llm)
                assert "status 0" in str(llm.worker_status().reason)

        asyncio.run(main())


def test_worker_and_folder_end_with_a_killed_server(folder: Path) -> None:
    program = f"""
import time
from draftproof.serve.supervisor import Supervisor
supervisor = Supervisor({str(folder)!r}, **{OPTIONS!r}).start()
print(supervisor.status().pid, supervisor.folder, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            pid, run_folder = server.stdout.readline().split()
            assert is_alive(int(pid)) and Path(run_folder).is_dir()
        finally:
            server.kill()
    assert server.returncode == -signal.SIGKILL  # the server did not end by itself before
    wait_for(lambda: not is_alive(int(pid)) and not Path(run_folder).exists())


def test_invalid_options_or_model_raise_at_start(folder: Path, monkeypatch: MonkeyPatch) -> None:
    """ConfigError before a process is started, LoadError from the worker."""
    with pytest.raises(ConfigError, match="unknown option 'devise'"):
        Supervisor(str(folder), devise="cpu")
    with pytest.raises(ConfigError, match="cannot be sent"):
        Supervisor(str(folder), speculative_config={"method": "ngram", "proposer": object()})
    shutil.copy(folder / "config.json", folder / "other.json")
    (folder / "config.json").write_text("{")
    supervisor = Supervisor(str(folder), **OPTIONS)
    with pytest.raises(LoadError, match=r"config\.json"):
        supervisor.start()
    assert not supervisor.folder.exists()


def test_http_process_does_not_import_torch() -> None:
    program = """
import sys
import draftproof.serve.ipc.remote_llm, draftproof.serve.supervisor
assert not {"torch", "numba", "xgrammar", "transformers"} & set(sys.modules), "slow and large imports"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=TIMEOUT_SECONDS)
