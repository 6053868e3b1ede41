"""AWQ folder of a model by GPTQModel on a CPU, and the same weights dequantised by GPTQModel's own function.

    python bench/recipes/quantize_awq.py MODEL TEXT.jsonl OUT [--texts 8] [--tokens 256] [--group-size 64]

MODEL: a built-in name, a folder or a GGUF file. OUT/float, OUT/awq and OUT/dequantised are written;
`bench/quality.py --weights OUT/awq --peer-weights OUT/dequantised` compares them. Needs GPTQModel 7.7 and
GPTQMODEL_CPU_WORKERS=2 on machines of few cores. Calibration computes in fp32; scales are stored in fp16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from gptqmodel import GPTQModel
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.quantization.config import AWQConfig
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from draftproof.models.load import load_checkpoint
from draftproof.models.quantized import write
from draftproof.text.tokenizer_export import write_tokenizer

BITS = 4


def write_float(model: str, folder: Path) -> None:
    """Write a model as a folder that transformers loads."""
    folder.mkdir(parents=True)
    checkpoint = load_checkpoint(model)
    assert checkpoint.source is not None
    write.write_tensors(folder, checkpoint.tensors.items())
    write_tokenizer(checkpoint.source, folder)
    (folder / "config.json").write_text(json.dumps(write.config_to_hf(checkpoint.config)))


def calibration(folder: Path, text: Path, texts: int, tokens: int) -> list[dict[str, list[int]]]:
    """Return the first strings of a JSON-lines file, joined and cut to samples of equal length."""
    with text.open(encoding="utf-8") as stored:
        lines = [json.loads(line) for line in stored]
    strings = [value for line in lines for value in line.values() if isinstance(value, str) and " " in value]
    ids = AutoTokenizer.from_pretrained(folder)("\n\n".join(strings))["input_ids"]
    samples = [ids[i * tokens : (i + 1) * tokens] for i in range(texts)]
    return [{"input_ids": sample, "attention_mask": [1] * len(sample)} for sample in samples]


def write_dequantised(source: Path, folder: Path, group_size: int) -> None:
    """Write the weights of an AWQ folder in fp32."""
    folder.mkdir()
    stored = load_file(source / "model.safetensors")
    made = {}
    for name, tensor in stored.items():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            scales = stored[f"{module}.scales"].float()
            matrix = dequantize_gemm(tensor, stored[f"{module}.qzeros"], scales, BITS, group_size)
            made[f"{module}.weight"] = matrix.T.contiguous()
        elif not name.endswith((".qzeros", ".scales")):
            made[name] = tensor.float()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    """Quantise the model."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=64)
    options = parser.parse_args()
    source = options.out / "float"
    write_float(options.model, source)
    AwqTorchLinear.SUPPORTS_DTYPES = [*AwqTorchLinear.SUPPORTS_DTYPES, torch.float32]
    settings = AWQConfig(bits=BITS, group_size=options.group_size, sym=False, format="gemm")
    model = GPTQModel.load(str(source), settings, device="cpu", dtype=torch.float32)
    model.quantize(calibration(source, options.text, options.texts, options.tokens), batch_size=1)
    model.save(str(options.out / "awq"))
    write_dequantised(options.out / "awq", options.out / "dequantised", options.group_size)


if __name__ == "__main__":
    main()
