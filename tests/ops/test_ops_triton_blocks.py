"""All layers in one kernel against the ops one by one: see `triton_block_checks`, which runs as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = str(Path(__file__).parents[1] / "support")
NAMES = (
    "plain",
    "bias_and_windows",
    "pieces_of_tiles",
    "taps_and_a_head",
    "a_round_for_nobody",
    "what_it_leaves_to_others",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Name of a check -> what went wrong, or nothing."""
    path = [HERE, *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}; import triton_block_checks as b; b.main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, results: dict[str, str]) -> None:
    assert results[name] == "", results[name]
