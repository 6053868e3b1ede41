"""Files that are made from model files and kept in the cache folder: names, and removal of unused ones."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from draftproof.models.hub import cache_folder

TEMPORARY_PREFIX = ".writing-"
TEMPORARY_SECONDS = 3600.0  # age from which a temporary file belongs to a process that was killed
FOLDER_BYTES = 16 << 30  # of the files of one folder; those that were used last are kept


def cached_file(folder: str, source: Path, kind: str, suffix: str) -> Path:
    """Return the path of a file made from `source`; another file, date or kind gives another name."""
    source = source.resolve()
    status = source.stat()
    state = _digest(f"{status.st_size}|{status.st_mtime_ns}")
    return cache_folder() / folder / f"{source.stem}-{_digest(str(source))}-{kind}-{state}{suffix}"


def record_use(path: Path) -> None:
    """Set the date of a file, by which unused files are found."""
    with suppress(OSError):
        os.utime(path)


def remove_unused(path: Path) -> None:
    """Remove files of an earlier state of the source of `path`, of killed processes, and beyond the limit."""
    same_source = path.stem.rpartition("-")[0] + "-"
    others: list[tuple[float, int, Path]] = []
    for each in path.parent.iterdir():
        status = each.stat()
        if each.name.startswith(TEMPORARY_PREFIX):
            if time.time() - status.st_mtime > TEMPORARY_SECONDS:
                each.unlink(missing_ok=True)
        elif each != path and each.name.startswith(same_source):
            each.unlink(missing_ok=True)
        elif each != path:
            others.append((status.st_mtime, status.st_size, each))
    room = FOLDER_BYTES - path.stat().st_size
    for _, size, each in sorted(others, reverse=True):
        room -= size
        if room < 0:
            each.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
