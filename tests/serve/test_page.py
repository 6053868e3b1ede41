"""Files of the page at /: served, self-contained, small, without inline code. tests/page drives them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Served, serving, tiny

PAGE = Path(__file__).parents[2] / "src" / "draftproof" / "serve" / "http" / "page"
VENDOR = PAGE / "vendor"
FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())
OWN = [path for path in FILES if VENDOR not in path.parents]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
IMPORT = re.compile(r'^import (?:[^;"]* from )?"([^"]+)";', re.M)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(tiny(folder)) as running:
        yield running


def test_every_file_is_served(served: Served) -> None:
    index = served.http.get("/")
    assert index.headers["content-type"].startswith("text/html")
    assert index.content == (PAGE / "index.html").read_bytes()
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path in FILES:
        response = served.http.get(f"/page/{path.relative_to(PAGE)}")
        assert response.content == path.read_bytes()
        assert response.headers["content-type"].startswith(types.get(path.suffix, ""))


def test_files_name_each_other_by_relative_paths() -> None:
    """Check that no file is missing or unused, and that the page works below a path of a proxy."""
    index = (PAGE / "index.html").read_text()
    named = {PAGE.parent / name for name in re.findall(r'(?:src|href)="([^#"]+)"', index)}
    for script in SCRIPTS:
        paths = IMPORT.findall(script.read_text())
        assert all(path.startswith((".", "..")) for path in paths)
        named |= {(script.parent / path).resolve() for path in paths}
    documents = {PAGE / "index.html", *VENDOR.glob("LICENSE.*"), VENDOR / "NOTICE"}
    assert named == set(FILES) - documents


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_file_loads_nothing_and_has_no_inline_code(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "://" not in text
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    assert len(text.splitlines()) <= 400
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def test_folders_are_small() -> None:
    for folder in {path.parent for path in OWN}:
        assert sum(path.is_file() for path in folder.iterdir()) <= 12


def test_libraries_are_listed_with_version_licence_and_digest() -> None:
    notice = (VENDOR / "NOTICE").read_text()
    found = re.findall(r"^(\S+\.js) +(\S+) (\S+) +(\S+) +(LICENSE\.\S+) +([0-9a-f]{64})$", notice, re.M)
    assert {name for name, *_ in found} == {path.name for path in VENDOR.glob("*.js")}
    for name, _, version, _, licence, digest in found:
        content = (VENDOR / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        assert version in content[:400].decode() and (VENDOR / licence).stat().st_size > 500
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < 256 << 10


def test_elements_that_scripts_use_exist() -> None:
    """Check the ids in scripts and labels against the document and the table of settings."""
    index = (PAGE / "index.html").read_text()
    ids = re.findall(r'\sid="([^"]+)"', index)
    assert len(ids) == len(set(ids))
    for script in SCRIPTS:
        for name in re.findall(r'\$\("([^"]+)"\)', script.read_text()):
            assert name in ids, f"{script.name} uses #{name}"
    for name in re.findall(r'(?:for|aria-controls|aria-labelledby|aria-describedby)="([^"]+)"', index):
        assert name in ids


def test_page_uses_plain_words() -> None:
    for path in OWN:
        words = set(re.findall(r"[a-z]+", path.read_text().lower()))
        assert not words & {"stood", "fell", "cap", "stands", "falls"}
