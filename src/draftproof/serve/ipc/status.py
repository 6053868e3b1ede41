"""Status file of the worker, beside its socket, readable by every HTTP process."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from draftproof.metrics import WorkerStatus

SOCKET_NAME, STATUS_NAME = "engine.sock", "status.json"


def write_status(folder: Path, status: WorkerStatus) -> None:
    """Replace the status file atomically."""
    part = folder / f"{STATUS_NAME}.part"
    part.write_bytes(msgspec.json.encode(status))
    os.replace(part, folder / STATUS_NAME)


def read_status(folder: Path) -> WorkerStatus:
    """Return the status; "stopped" without a file, because the supervisor removes the folder when it ends."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / STATUS_NAME).read_bytes(), type=WorkerStatus)
    return WorkerStatus("stopped", reason="the server's main process has ended", since=time.time())


def socket_address(folder: Path) -> str:
    """Return the ZeroMQ address of the worker's socket in `folder`."""
    return f"ipc://{folder / SOCKET_NAME}"


def status_folder(address: str) -> Path:
    """Return the folder that holds the socket at `address` and the status file."""
    return Path(address.removeprefix("ipc://")).parent
