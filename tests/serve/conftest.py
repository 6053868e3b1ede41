"""Fixtures that the tests of the server share."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving import make_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint folder of a tiny model without weights."""
    return make_folder(tmp_path_factory.mktemp("served"))
