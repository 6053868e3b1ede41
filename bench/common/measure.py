"""Helpers of all benchmarks: best of several runs, hardware, commit, the last line of JSON."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding

# shows the progress of a start without a terminal
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")


def best(function: Callable[[], object], repeat: int) -> float:
    """Return the seconds of the fastest of `repeat` calls."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def read_bandwidth(size: int, repeat: int = 8) -> float:
    """Return bytes a second when all threads read `size` bytes once, by the faster of two readers.

    The data lie in large pages, as packed weights do: small ones are read more slowly.
    """
    from draftproof.ops.cpu.backend import CpuOps
    from draftproof.ops.cpu.jit.huge_pages import WeightMemory

    data = WeightMemory().hold(torch.ones(size // 4096 // 4, 4096))
    ops = CpuOps(torch.device("cpu"))
    readers = (lambda: torch.max(data), lambda: ops.sampling.argmax(data))
    return data.numel() * 4 / min(best(reader, repeat) for reader in readers)


def others_seconds() -> float:
    """Return the processor time of other processes and machines so far; 0 if it is unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, soft, steal = map(int, stat.read_text().split()[1:9])
    mine = os.times()
    busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return busy - mine.user - mine.system


def python_us() -> float:
    """Return the microseconds of a fixed piece of Python: how fast this processor is now.

    On a shared machine this changes by up to a half from one second to the next, and host times with it.
    """
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        {i: (i, str(i)) for i in range(1000)}
        times.append(time.perf_counter() - begin)
    return round(1e6 * sorted(times)[4], 1)


def hardware() -> dict[str, Any]:
    """Return the names of the processors and the version of torch."""
    cpu = platform.processor() or binding.get_host_cpu_name()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    found = {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def instructions() -> list[str]:
    """Return the vector and matrix instructions of this processor that change the speed of products."""
    features = binding.get_host_cpu_features()
    names = ("neon", "dotprod", "i8mm", "bf16", "sve", "sve2", "avx2", "avx512f", "avx512vnni", "avxvnni")
    names += ("avx512bf16", "amx-tile", "amx-int8", "amx-bf16")
    return [name for name in names if features.get(name)]


def commit() -> str:
    """Return the commit of the working tree."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip() or "unknown"


def finish(name: str, figures: dict[str, Any]) -> None:
    """Print the figures as one JSON document, the last line of stdout."""
    document = {
        "bench": name,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "hardware": hardware(),
        **figures,
    }
    print(json.dumps(document))
