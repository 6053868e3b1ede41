"""Training on a GPU gives the same bits again, resumed or not; `make test-gpu` runs it in its own process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import trained
from draftproof.train.pipeline import repeatable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when cuBLAS is first used

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),  # of modules that the compiler imports
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"feature_norm": "each", "norm_output": 1, "overlap": 0.5}])
def test_resumed_training_writes_the_same_file(
    dtype: str, options: dict[str, object], tmp_path: Path
) -> None:
    with repeatable():
        whole = trained.trainer(device="cuda", dtype=dtype, **options)
        whole.run(tmp_path / "whole")
        for stop in (5, 12):
            part = trained.trainer(device="cuda", dtype=dtype, **options)
            part.resume(tmp_path / "part")
            for batch in part.batches.from_step(part.step):
                if part.step == stop:
                    break
                part.learn(batch, measure=stop == 5)
            part.save(tmp_path / "part")
    one, other = (tmp_path / name / "head" / "model.safetensors" for name in ("whole", "part"))
    assert one.read_bytes() == other.read_bytes()
    first, last = (whole.curve[i]["acceptance"]["coupled"]["length"] for i in (0, -1))
    assert last > first
