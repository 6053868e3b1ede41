"""Import of the grammar compiler in its process: with stand-ins for torch, or with torch where needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.text.grammar import worker

TORCH = "__version__ = '9.9'\nclass Tensor: is_real = True\n"
FFI = """
try:
    import torch
    has_torch = True
except ImportError:
    has_torch = False
"""
COMPILERS = {
    "needs no torch": "import torch, transformers, tvm_ffi\nclass Mask(torch.Tensor): pass\n",
    "needs torch": "import torch, tvm_ffi\nversion = torch.__version__\n",
    "needs a submodule": "from xgrammar import mask\nimport torch\nversion = torch.__version__\n",
}
SCRIPT = """
import importlib.util, json, sys
folder, path, is_imported = sys.argv[1:]
sys.path[:] = [folder, *(part for part in sys.path if "site-packages" not in part)]
if is_imported == "True":
    import torch
spec = importlib.util.spec_from_file_location("worker", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
made, torch = module._import_xgrammar(), sys.modules["torch"]
print(json.dumps([
    made is sys.modules["xgrammar"],
    getattr(torch.Tensor, "is_real", False),
    sys.modules["tvm_ffi"].has_torch,
    type(sys.modules.get("transformers")).__name__,
]))
"""


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("is_imported", [False, True])
def test_compiler_is_imported_with_torch_only_where_it_needs_it(
    compiler: str, is_imported: bool, tmp_path: Path
) -> None:
    """Check the imported modules, and whether they import torch; `is_imported`: it was imported before."""
    for name, text in (("torch", TORCH), ("transformers", ""), ("tvm_ffi", FFI)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "xgrammar").mkdir()
    (tmp_path / "xgrammar" / "__init__.py").write_text(COMPILERS[compiler])
    (tmp_path / "xgrammar" / "mask.py").write_text("import torch, tvm_ffi\n")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), worker.__file__, str(is_imported)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    has_torch = is_imported or compiler != "needs no torch"
    kind = "_UnusedModule" if not has_torch else "module" if compiler == "needs no torch" else "NoneType"
    assert json.loads(done.stdout) == [True, has_torch, has_torch, kind]
