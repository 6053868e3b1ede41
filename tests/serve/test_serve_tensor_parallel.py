"""Server with two ranks: one is killed in mid-stream, its stream ends with an error, the engine restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch

from async_serving import LONG, collect, facts, params
from draftproof.serve import supervisor as supervising
from draftproof.serve.ipc.remote_llm import RemoteLLM, connect
from draftproof.serve.supervisor import Supervisor
from text_pieces import CONFIG, Pieces
from worker_thread import TIMEOUT_SECONDS, wait_for

CASE: Any = ("ab", params(1, max_tokens=4))
OPTIONS: Any = {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 8, "backend": "torch"}


def children(parent: int) -> list[int]:
    """Return the processes that a process started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def test_killed_rank_ends_streams_and_the_engine_restarts(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(supervising.log, "disabled", True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    seen: list[int] = []

    async def main(llm: RemoteLLM) -> None:
        before = facts(await llm.generate(*CASE))
        worker = llm.worker_status().pid
        assert worker is not None
        (rank,) = children(worker)
        seen.extend([worker, rank])
        stream = llm.stream("ab", params(**LONG))
        assert await stream.read()
        os.kill(rank, signal.SIGKILL)
        last = (await collect(stream))[-1]
        assert last.finish_reason == "error"
        while llm.worker_status().state != "ready" or llm.worker_status().pid == worker:
            await asyncio.sleep(0.02)
        assert "rank 1 ended: killed by SIGKILL" in str(llm.worker_status().reason)
        assert facts(await llm.generate(*CASE)) == before
        seen.extend([llm.worker_status().pid or 0, *children(llm.worker_status().pid or 0)])

    with Supervisor(str(tmp_path), first_delay=0.05, tensor_parallel_size=2, **OPTIONS) as supervisor:

        async def run() -> None:
            remote = connect(supervisor.address, tokenizer=Pieces())  # type: ignore[arg-type]
            async with remote as llm, asyncio.timeout(TIMEOUT_SECONDS):
                await main(llm)

        asyncio.run(run())
    assert len(seen) == 4
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in seen))
