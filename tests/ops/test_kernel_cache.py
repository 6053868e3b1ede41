"""Disk cache of compiled kernels: several writers, and no writable folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

import torch
from numba import njit
from numba.core import caching
from numba.core.caching import IndexDataCacheFile

import step_cases
from draftproof.numba_jit import native
from draftproof.ops.cpu import elementwise
from draftproof.ops.cpu.backend import CpuOps
from draftproof.ops.cpu.jit import parallel_compile
from draftproof.ops.cpu.jit.compile import KernelFiles, SourceCache, _closure_key
from draftproof.ops.cpu.moe.kernels import widen
from draftproof.ops.cpu.step import LOOPS

LOOP = """
import sys
import numpy as np
from draftproof.numba_jit import native

@native()
def doubled(values):
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = 2 * values[i]
    return out

print(doubled(np.arange(3)), "numba.np.arraymath" in sys.modules)
"""
PARALLEL = """
import ctypes
import os
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock
from draftproof.ops.cpu.jit import parallel_compile
from draftproof.ops.cpu.jit.compile import kernel, load_i64, store_i64

def make(value):
    @kernel
    def run(args, rows, thread, threads, scratch):
        store_i64(load_i64(args), value)
    return run

def stored(made):
    found = (ctypes.c_int64 * 1)()
    args = (ctypes.c_int64 * 1)(ctypes.addressof(found))
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(made.address)(ctypes.addressof(args), 1, 0, 1, 0)
    return found[0]

FOLDER = Path(__file__).parent
fork = parallel_compile._fork

def fork_and_wait(*arguments):  # until a child has compiled a kernel
    child = fork(*arguments)
    until = time.monotonic() + 120
    while not list(FOLDER.rglob("*.nbc")) and time.monotonic() < until:
        time.sleep(0.01)
    return child

CHANGES = {
    "parallel": [mock.patch.object(parallel_compile, "_fork", fork_and_wait)],
    "ends": [mock.patch.object(parallel_compile, "new_symbol_numbers", lambda: os._exit(1))],
    "hangs": [
        mock.patch.object(parallel_compile, "new_symbol_numbers", lambda: time.sleep(600)),
        mock.patch.object(parallel_compile, "MAX_WAIT_SECONDS", 0.1),
    ],
    "full": [mock.patch("os.fork", side_effect=BlockingIOError)],  # no process can be started
}
parallel_compile._num_cores = lambda: 3
for name, changes in CHANGES.items():
    made = [make(value) for value in range(1, 5)]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        parallel_compile.compile_kernels(made)
    print(name, sum(one._compiled is None for one in made), sum(one.is_available for one in made), end=" ")
    print(*map(stored, made))
    for path in FOLDER.rglob("*.nbc"):
        path.unlink()
"""
IN_CHILD = """
import sys
import time
from unittest import mock
import numba
import numpy as np
from draftproof.numba_jit import CompiledLoop, native
from draftproof.ops.cpu.jit import parallel_compile

def make(factor):
    @native()
    def scaled(values):
        return values * factor
    return CompiledLoop(scaled, (numba.int64[::1],))

CHANGES = {
    "child": {},
    "ends": {"new_symbol_numbers": lambda: sys.exit(1)},
    "hangs": {"new_symbol_numbers": lambda: time.sleep(600), "MAX_WAIT_SECONDS": 0.1},
    "one core": {"_num_cores": lambda: 1},
}
for number, (name, changes) in enumerate(CHANGES.items()):
    loops = [make(10 * number + 2), make(10 * number + 3)]
    with mock.patch.multiple(parallel_compile, **{"_num_cores": lambda: 2, **changes}):
        compilation = parallel_compile.LoopCompilation(loops)
        for loop in loops:
            compilation.wait_for(loop)
        available = [loop.is_available for loop in loops]
    found = [loop.function(np.arange(2))[1] - 10 * number for loop in loops]
    has_types = [loop.function.signatures == [loop.types] for loop in loops]
    print(name, available, found == [2, 3], has_types, sep=", ")
"""
VARIANTS = Path(__file__).parents[1] / "support" / "kernel_variants.py"


def output_of(folder: Path, source: str) -> list[str]:
    """Run a script in a new process, with its cache in `folder`; return the lines that it prints."""
    path = folder / "run.py"
    path.write_text(source)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def twice(x: int) -> int:
    return 2 * x


def test_two_writers_use_separate_files(tmp_path: Path) -> None:
    one, two = (KernelFiles(str(tmp_path), "linear", "stamp") for _ in range(2))
    assert one.load("bf16") is None
    one.save("bf16", "code of bf16")
    two.save("fp32", "code of fp32")
    for files in (one, two, KernelFiles(str(tmp_path), "linear", "stamp")):
        assert files.load("bf16") == "code of bf16" and files.load("fp32") == "code of fp32"
    for name, stamp in (("linear", "edited"), ("norm", "stamp")):
        other = KernelFiles(str(tmp_path), name, stamp)
        assert other.load("bf16") is None
        other.save("bf16", "other code")
    assert one.load("bf16") == "code of bf16"
    assert len(list(tmp_path.iterdir())) == 4


def test_control_numbered_files_of_two_writers_collide(tmp_path: Path) -> None:
    """Let both read the index of numba's own files before either has written it."""
    one, two = (IndexDataCacheFile(str(tmp_path), "linear", "stamp") for _ in range(2))
    number = one._data_name(1)
    one._save_index({"bf16": number})
    two._save_index({"fp32": number})
    two._save_data(number, "code of fp32")
    one._save_data(number, "code of bf16")
    assert IndexDataCacheFile(str(tmp_path), "linear", "stamp").load("fp32") == "code of bf16"


def test_kernels_use_the_kernel_cache() -> None:
    assert isinstance(SourceCache(twice)._cache_file, KernelFiles)


def test_closure_key_depends_on_values_and_not_on_the_process() -> None:
    """Compare keys of a kernel whose closure has a device function, which numba numbers at random."""

    def made(factor: int) -> Any:
        scaled = njit(lambda x: factor * x)

        def fn(x: int) -> int:
            return scaled(x)

        return _closure_key(fn)

    assert made(2) == made(2) != made(3)


def stored_by_kernels(folder: Path, *arguments: str) -> list[str]:
    """Run kernels of one factory in a new process, with their cache in `folder`."""
    path = folder / VARIANTS.name
    if not path.exists():
        path.write_text(VARIANTS.read_text())
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_cached_kernel_beside_a_compiled_one_keeps_its_code(tmp_path: Path) -> None:
    """Cache the kernel of 1; then compile that of 2 and load that of 1 in one process."""
    (one,) = stored_by_kernels(tmp_path, "1")
    two, again = stored_by_kernels(tmp_path, "2,1")
    assert again == one != two
    control = tmp_path / "control"
    control.mkdir()
    stored_by_kernels(control, "1", "1")
    two, wrong = stored_by_kernels(control, "2,1", "1")  # symbols numbered from 1, as numba does
    assert wrong == two != one


def test_kernels_of_a_module_are_one_group_unless_there_are_fewer_than_processes() -> None:
    kernels = [elementwise.embed, widen, elementwise.concat_columns]
    first, second = parallel_compile._groups(kernels, 2)
    assert {*first, *second} == {*kernels} and [widen] in (first, second)
    assert len(parallel_compile._groups(kernels, 1)) == 2
    assert sorted(map(len, parallel_compile._groups(kernels, 8))) == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")
def test_children_compile_the_same_kernels(tmp_path: Path) -> None:
    """Let children compile; end or hang before they have compiled anything; or not start."""
    lines = [line.split() for line in output_of(tmp_path, PARALLEL)]
    assert [line[0] for line in lines] == ["parallel", "ends", "hangs", "full"]
    for name, compiled_by_children, *rest in lines:
        assert (int(compiled_by_children) > 0) == (name == "parallel")
        assert rest == ["4", "1", "2", "3", "4"]  # available, and what each kernel stores


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")
def test_child_compiles_loops(tmp_path: Path) -> None:
    """Let a child compile; end or hang before it has compiled anything; or not start."""
    assert output_of(tmp_path, IN_CHILD) == [
        f"{name}, {[name == 'child'] * 2}, True, [True, True]"
        for name in ("child", "ends", "hangs", "one core")
    ]


def test_step_loops_have_their_declared_types() -> None:
    """Compare the types that a child compiles with those of the calls, also where an op is called alone."""
    for name in ("layout", "commit"):
        step_cases.CHECKS[name](CpuOps(torch.device("cpu")), 1, step_cases.Size())
    for loop in LOOPS:
        assert loop.function.signatures == [loop.types]


def test_native_loops_compile_without_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in a read-only image whose user has no home."""

    def nowhere(self: Any) -> None:
        raise OSError("read-only file system")

    for kind in (caching._CacheLocator, *caching._CacheLocator.__subclasses__()):
        monkeypatch.setattr(kind, "ensure_cache_path", nowhere)
    with pytest.raises(RuntimeError, match="no locator"):  # control
        njit(cache=True)(twice)
    with pytest.raises(RuntimeError, match="no locator"):
        SourceCache(twice)
    assert native()(twice)(4) == 8 and native("i8(i8)", boundscheck=False)(twice)(4) == 8


def test_cached_loop_runs_without_the_functions_of_the_compiler(tmp_path: Path) -> None:
    """Compile a loop in one process and load it in another."""
    for is_compiled in ("True", "False"):
        assert output_of(tmp_path, LOOP)[0] == f"[0 2 4] {is_compiled}"
