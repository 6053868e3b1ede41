"""Operands of the tensor core keep the order of quantised KV in tiles of all heights, compiled for Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
WIDTHS = {
    "int8": {
        "prefill_attention_kernel 16 blocks": ["2"],
        "prefill_attention_kernel 128 spans": ["2"],
    },
    "fp8": {"splitkv_attention_kernel 16 blocks": ["2"]},
    # Negative control: with a plain conversion the compiler permutes operands.
    "int8, plain": {"splitkv_attention_kernel 16 blocks": ["2", "4"]},
}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_only_a_plain_conversion_permutes_operands(tmp_path: Path) -> None:
    """Compare the widths of operands of each kernel; 4: their elements are permuted."""
    code = f"import sys; sys.path[:0] = {[str(SUPPORT), *sys.path]!r}; import kv_operands; kv_operands.main()"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == WIDTHS
