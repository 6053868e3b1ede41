"""Ops that only some model families use, on the backends without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftproof.ops import Ops
from family_checks import EVERY_CHECK
from opcheck import importable

OTHERS = {name: ops for name, ops in importable().items() if name != "reference"}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("ops", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("check", EVERY_CHECK)
def test_ops_of_families_equal_reference(
    check: Callable[[Ops, torch.dtype], None], ops: Ops, dtype: torch.dtype
) -> None:
    check(ops, dtype)
