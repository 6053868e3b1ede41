"""Release of memory that only the start of a process uses, and that would stay resident."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

# Their registrations and the compiler run at start-up; a step uses few of their pages.
START_UP_LIBRARIES = ("libllvmlite", "libtorch_cpu", "libtorch_python")


def release_start_up_memory() -> None:
    """Return freed heap to the system, and remove code pages of large libraries from the resident memory.

    Code that runs again is read from the page cache. Only executable mappings are released: code is never
    written, so its pages equal those of the file.
    """
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_DONTNEED"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.split()[1] == "r-xp" and any(name in line for name in START_UP_LIBRARIES):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)  # without success the pages stay
