"""Programs in examples/ and the code of the README run."""

from __future__ import annotations

import gc
import re
import runpy
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
EXAMPLES = sorted((REPO / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, smollm2_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    gc.collect()  # the engine, before the next one measures the free memory
    assert "tokens a step" in capsys.readouterr().out


def test_readme_code_runs(smollm2_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(block, {"__name__": "__main__"})
        gc.collect()
        assert "Paris" in capsys.readouterr().out
