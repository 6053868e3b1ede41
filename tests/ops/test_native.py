"""Native loops where they can be kept on disk, and where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
from numba import njit
from numba.core import caching

from draftproof.numba_jit import native
from draftproof.ops.cpu.jit.compile import SourceCache


def twice(x):
    return 2 * x


def test_without_a_folder_to_keep_them_in_they_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """A read-only image whose user has no home: an engine must start there."""

    def nowhere(self: Any) -> None:
        raise OSError("read-only file system")

    for kind in (caching._CacheLocator, *caching._CacheLocator.__subclasses__()):
        monkeypatch.setattr(kind, "ensure_cache_path", nowhere)
    with pytest.raises(RuntimeError, match="no locator"):  # control
        njit(cache=True)(twice)
    with pytest.raises(RuntimeError, match="no locator"):
        SourceCache(twice)
    assert native()(twice)(4) == 8 and native("i8(i8)", boundscheck=False)(twice)(4) == 8
