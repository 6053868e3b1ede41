"""Checks of the triton backend under Triton's interpreter, all of them in one other process.

`triton_checks` compares ops with the reference, `triton_layer_checks` the fused layers kernel with separate
ops, `triton_step_checks` step, sampling and draft ops with the reference. Bits of a GPU are checked by
`bench/micro/gpu/op_times.py`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import step_cases
from draftproof.errors import ConfigError
from draftproof.ops import resolve

SUPPORT = Path(__file__).parents[1] / "support"
MODULES = (
    *("triton_checks", "triton_layer_checks", "triton_kv_checks"),
    *("triton_latent_checks", "triton_moe_checks"),
)
STEP_MODULE = "triton_step_checks"  # last: it changes the sizes of blocks
CHECKS = [
    (module, node.name)
    for module in MODULES
    for node in ast.parse((SUPPORT / f"{module}.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "check" for d in node.decorator_list)
]
CHECKS += [(STEP_MODULE, name) for name in step_cases.CHECKS]


@cache
def failures() -> dict[str, dict[str, str]]:
    """Return the failure of each check of each module, "" if there is none."""
    code = f"import sys; sys.path[:0] = {[str(SUPPORT), *sys.path]!r}; import triton_checks; "
    code += f"triton_checks.run_modules({(*MODULES, STEP_MODULE)!r})"
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}  # in whatever order modules are imported
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=3600, env=interpreted
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("module", "name"), CHECKS)
def test_interpreted_kernels_pass(module: str, name: str) -> None:
    assert failures()[module][name] == "", failures()[module][name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_backend_without_a_gpu_raises() -> None:
    with pytest.raises(ConfigError, match="cannot load the triton backend"):
        resolve("triton", torch.device("cpu"))


def test_debug_mode_names_the_failed_op(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from draftproof.ops.triton.kernel_utils import wait_after_ops

    class Family:
        def double(self, x: int) -> int:
            return 2 * x

    def fail(device: torch.device) -> None:
        raise RuntimeError("illegal address")

    family = Family()
    wait_after_ops(family, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert family.double(2) == 4
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="failed in or before double: illegal address"):
        family.double(2)
