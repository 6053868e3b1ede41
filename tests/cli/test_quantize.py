"""`draftproof quantize`: the written folder, its sources and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import quantized_files as files
from draftproof.cli import quantize
from draftproof.cli.main import main
from draftproof.models.load import load_checkpoint
from draftproof.models.quantized import write
from quantized_files import write_quantized

# weight format, and a step of its values as a share of the largest in a row; bf16 rounds by another half
FORMATS = {"int8": ("w8a8", 1 / 127), "fp8": ("fp8", 1 / 16), "int4": ("w4a16", 1 / 7)}


def write_floats(folder: Path) -> dict[str, torch.Tensor]:
    """Write a folder in bf16 with a tokenizer file; return its matrices."""
    exact = write_quantized(folder, "int8")
    stored = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if "_proj." not in name}
    matrices = {name: matrix.bfloat16() for name, matrix in exact.items()}
    write.write_tensors(folder, (kept | matrices).items(), max_bytes=40_000)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(files.CONFIG))
    (folder / "tokenizer_config.json").write_text("{}")
    return matrices


@pytest.mark.parametrize("form", FORMATS)
def test_written_folder_loads_with_values_within_a_step(tmp_path: Path, form: str) -> None:
    matrices = write_floats(tmp_path / "model")
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--format", form]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer_config.json"]
    found = load_checkpoint(tmp_path / "out", progress=False)
    before = load_checkpoint(tmp_path / "model", progress=False)
    kind, step = FORMATS[form]
    for name, weight in found.weights.items():
        if name not in matrices:
            assert torch.equal(weight.data, before.weights[name].data), name
            continue
        assert weight.format == kind
        rows = matrices[name].float()
        distance = (weight.dequantize(torch.float32) - rows).abs()
        assert bool((distance <= 1.1 * step * rows.abs().amax(1, keepdim=True)).all()), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]  # no temporary folder stays


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("form", FORMATS)
def test_transformers_reads_the_same_weights(tmp_path: Path, form: str) -> None:
    """Compare with compressed-tensors' own decompression, where that package is installed."""
    pytest.importorskip("compressed_tensors")
    import transformers

    write_floats(tmp_path / "model")
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--format", form]) == 0
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=settings
    )
    state = model.state_dict()
    for name, weight in load_checkpoint(tmp_path / "out", progress=False).weights.items():
        assert torch.equal(weight.dequantize(torch.bfloat16), state[name]), name


def test_refused_inputs_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_floats(tmp_path / "model")
    write_quantized(tmp_path / "quantised", "awq")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    model, out = str(tmp_path / "model"), str(tmp_path / "out")
    for arguments, message in (
        ([model, str(tmp_path / "full"), "--format", "int8"], "exists already"),
        ([str(tmp_path / "quantised"), out, "--format", "int8"], "quantised already (awq"),
        ([model, out, "--format", "int8", "--group-size", "32"], "an option of --format int4"),
        ([model, out, "--format", "int4", "--group-size", "48"], "128, 64 or 32"),
        ([model, out, "--format", "int4", "--group-size", "128"], "must be whole groups"),
    ):
        assert main(["quantize", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(quantize, "_write_json", fail)
    assert main(["quantize", model, out, "--format", "int8"]) == 2
    assert "disk full" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "model", "quantised"]


def test_configuration_of_a_gguf_file_is_written_or_refused() -> None:
    import tiny
    from draftproof.errors import LoadError

    for name in ("llama", "llama3", "smollm2", "mistral", "qwen2", "qwen3"):
        made = write.config_to_hf(tiny.model_config(name))  # compares what it reads back
        assert made["model_type"] == name.replace("llama3", "llama").replace("smollm2", "llama")
    from dataclasses import replace

    from draftproof.models.config import RopeScaling

    odd = replace(tiny.model_config("llama"), rope_scaling=RopeScaling("factors", factors=(2.0,) * 4))
    with pytest.raises(LoadError, match="cannot hold this model's rope_scaling: give the folder"):
        write.config_to_hf(odd)
