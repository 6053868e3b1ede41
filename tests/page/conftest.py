"""Fixtures of the page's tests in headless Chromium.

They need Chromium and the package `playwright` (`make test-page`); elsewhere these tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import opened, tiny_server
from serving import Served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Return a headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def served(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a server of a tiny model; without a browser no engine is started."""
    with tiny_server(tmp_path_factory.mktemp("page")) as running:
        for temperature in (0, 1):  # compile what the tests need
            body = {"prompt": "one two one two", "temperature": temperature, "logprobs": 5}
            assert running.post("/v1/completions", body, timeout=600).status_code == 200
        yield running


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """Return a page with empty storage."""
    yield from opened(browser, served.url)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """Return a text file with a code fence in it."""
    path = tmp_path / "notes.md"
    path.write_text("one\n```\ntwo\n```\n")
    return path
