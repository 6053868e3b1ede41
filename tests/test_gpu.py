"""The promise on a GPU: the matrix of test_exact.py with the triton backend. `make test-gpu` runs it.

It needs torch, triton, numpy, safetensors and pytest only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exact import Ask, Company, Where
from test_exact import GUIDED, MATRIX, check, named

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("case", [*MATRIX, *GUIDED], ids=named)
def test_every_pair_of_factors(case: dict[str, Any]) -> None:
    check(case, "triton", device="cuda")


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral"])
def test_a_gemm_that_feels_the_row_count_is_found(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    from draftproof.ops.triton_cuda import TritonOps

    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 5, "adaptive": False}
    where = Where(arch, "float32", "triton", device="cuda")
    asks = [Ask(0, "none", 0.7, length=20)]
    assert Company(asks, where, spec).differences() == []
    linear = TritonOps.linear
    monkeypatch.setattr(TritonOps, "linear", lambda *a: linear(*a) * (1 + 1e-6 * (len(a[1]) % 3)))
    assert Company(asks, where, spec).differences(fresh=True)
