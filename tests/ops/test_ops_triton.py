"""The triton backend against the definition, under Triton's interpreter, in a process of its own.

`triton_checks` holds the checks; here each is a test. Every kernel runs; bits of a real GPU are what
`bench/micro/gpu/op_times.py` is for.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from draftproof.errors import ConfigError
from draftproof.ops import resolve

CHECKS = Path(__file__).parents[1] / "support" / "triton_checks.py"
NAMES = [
    node.name
    for node in ast.parse(CHECKS.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
]

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Name of a check -> what went wrong, or nothing."""
    path = [str(CHECKS.parent), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}; import triton_checks; triton_checks.main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, results: dict[str, str]) -> None:
    assert results[name] == "", results[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="cannot load the triton backend"):
        resolve("triton", torch.device("cpu"))
