"""Temporary folder of the ranks of one engine.

An engine that was killed leaves its folder behind, and the next engine removes it. The owner of a folder
holds a lock on a file in it, which the system releases when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path

PREFIX = "draftproof-ranks-"
LOCK_FILE = "owner.lock"


class RankFolder:
    """Folder that exists until `remove`, or until an engine starts after its process has ended."""

    def __init__(self) -> None:
        remove_stale_folders()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        unlocked = self.path / "new"  # under this name no other process tries to lock it
        self._lock = unlocked.open("w")
        with contextlib.suppress(OSError):  # a file system without locks: no folder is removed there
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / LOCK_FILE)

    def remove(self) -> None:
        """Remove the folder and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_stale_folders() -> None:
    """Remove folders whose owner has ended; those of other users cannot be read and stay."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_FILE}"):
        with contextlib.suppress(OSError), path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
