"""Disk cache of compiled kernels, which several processes may write at once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numba")

from numba.core.caching import IndexDataCacheFile

from draftproof.ops.cpu.jit.compile import KernelFiles, SourceCache


def test_two_writers_use_separate_files(tmp_path: Path) -> None:
    one, two = (KernelFiles(str(tmp_path), "linear", "stamp") for _ in range(2))
    assert one.load("bf16") is None
    one.save("bf16", "code of bf16")
    two.save("fp32", "code of fp32")
    for files in (one, two, KernelFiles(str(tmp_path), "linear", "stamp")):
        assert files.load("bf16") == "code of bf16" and files.load("fp32") == "code of fp32"
    for other in (
        KernelFiles(str(tmp_path), "linear", "edited"),
        KernelFiles(str(tmp_path), "norm", "stamp"),
    ):
        assert other.load("bf16") is None
        other.save("bf16", "other code")
    assert one.load("bf16") == "code of bf16"
    assert len(list(tmp_path.iterdir())) == 4


def test_control_numbered_files_of_two_writers_collide(tmp_path: Path) -> None:
    """What numba's own files would do: both have read the index before either has written it."""
    one, two = (IndexDataCacheFile(str(tmp_path), "linear", "stamp") for _ in range(2))
    number = one._data_name(1)
    one._save_index({"bf16": number})
    two._save_index({"fp32": number})
    two._save_data(number, "code of fp32")
    one._save_data(number, "code of bf16")
    assert IndexDataCacheFile(str(tmp_path), "linear", "stamp").load("fp32") == "code of bf16"


def test_kernels_use_the_kernel_cache() -> None:
    def kernel() -> None:
        """Do nothing."""

    assert isinstance(SourceCache(kernel)._cache_file, KernelFiles)
