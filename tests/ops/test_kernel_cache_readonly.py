"""Native loops without a writable cache folder."""

from __future__ import annotations

from typing import Any

import pytest
from numba import njit
from numba.core import caching

from draftproof.numba_jit import native
from draftproof.ops.cpu.jit.compile import SourceCache


def twice(x):
    return 2 * x


def test_native_loops_compile_without_cache_folder(monkeypatch: pytest.MonkeyPatch):
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
