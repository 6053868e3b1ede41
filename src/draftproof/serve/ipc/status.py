"""How the worker stands, in a file beside its socket, which every server process can read."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["starting", "ready", "restarting", "failed", "stopped"]
SOCKET, FILE = "engine.sock", "status.json"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    state: State
    restarts: int = 0  # that were tried, in total
    reason: str | None = None  # why it ended last
    pid: int | None = None
    since: float = 0.0  # of this state, as time.time() has it


def write_status(folder: Path, status: WorkerStatus) -> None:
    part = folder / f"{FILE}.part"
    part.write_bytes(msgspec.json.encode(status))
    os.replace(part, folder / FILE)


def read_status(folder: Path) -> WorkerStatus:
    """Stopped, if there is nothing: the folder goes with the supervisor."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / FILE).read_bytes(), type=WorkerStatus)
    return WorkerStatus("stopped", reason="the server's main process is gone", since=time.time())


def address_of(folder: Path) -> str:
    return f"ipc://{folder / SOCKET}"


def folder_of(address: str) -> Path:
    return Path(address.removeprefix("ipc://")).parent
