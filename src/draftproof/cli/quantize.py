"""`draftproof quantize`: write a quantised copy of a model that other engines load too."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from draftproof.errors import ConfigError, LoadError

if TYPE_CHECKING:
    from torch import Tensor

    from draftproof.models.load import Checkpoint

FORMATS = ("int8", "fp8", "int4")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "model", help="a built-in name, a folder, a .gguf file or a hub id, in floats or GGUF"
    )
    parser.add_argument("out", type=Path, help="folder to write; it must not exist, or be empty")
    text = (
        "int8: per channel, activations in int8 per token. fp8: e4m3 per channel, activations in e4m3 per "
        "token. int4: groups, activations in bf16"
    )
    parser.add_argument("--format", choices=FORMATS, required=True, help=text)
    text = "columns that share a scale in int4 (default: the largest of 128, 64, 32 that divides every layer)"
    parser.add_argument("--group-size", type=int, metavar="COLUMNS", help=text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Quantise the linear layers and write a compressed-tensors folder."""
    from draftproof.models.load import load_checkpoint
    from draftproof.models.weight_formats import FloatWeight

    out: Path = options.out
    if options.group_size is not None and options.format != "int4":
        raise ConfigError("--group-size is an option of --format int4")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists already; give a new folder")
    checkpoint = load_checkpoint(options.model)
    if any(not isinstance(weight, FloatWeight) for weight in checkpoint.weights.values()):
        raise ConfigError(
            f"{options.model} is quantised already ({checkpoint.config.dtype}): give a float model"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that it can be renamed: an interrupted run leaves no half of a model there.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
            made = Path(folder) / "model"
            made.mkdir()
            size = _write(checkpoint, made, options.format, options.group_size)
            if out.exists():
                out.rmdir()
            made.rename(out)
    except OSError as error:
        raise LoadError(f"{out}: cannot be written: {error.strerror or error}") from error
    console.print(Text(f"{out}: {size / 1e6:,.1f} MB of weights in {options.format}"))
    return 0


def _write(checkpoint: Checkpoint, folder: Path, name: str, group_size: int | None) -> int:
    """Write all files of the model and return the bytes of the weights."""
    from draftproof.models.expected_tensors import split_draft_tensors
    from draftproof.models.quantized import write
    from draftproof.models.weights.low_bit import INT4_GROUPS
    from draftproof.text.tokenizer_export import write_tokenizer

    source = checkpoint.source
    assert source is not None, "a name was loaded"
    if source.is_dir() and checkpoint.format == "safetensors":
        raw, tensors = _stored_folder(source)
        write.copy_other_files(source, folder)
    else:
        raw, tensors = write.config_to_hf(checkpoint.config), checkpoint.tensors
        write_tokenizer(source, folder)
    kept = [n for n in split_draft_tensors(tensors, raw)[1] if write.is_quantizable(n)]  # MTP layers
    form = write.OUTPUT_FORMATS[name]
    depths = {t.shape[1] for n, t in tensors.items() if write.is_quantizable(n) and n not in kept}
    group = write.common_group(depths) if group_size is None else group_size
    if group_size is not None and (group_size not in INT4_GROUPS or any(d % group for d in depths)):
        sizes = ", ".join(str(depth) for depth in sorted(depths))
        raise ConfigError(
            f"--group-size {group_size}: 128, 64 or 32, and rows ({sizes}) must be whole groups"
        )
    raw = raw | {"quantization_config": write.quantization_config(form, group, kept)}
    size = write.write_tensors(folder, write.quantized_tensors(tensors, form, group, kept))
    _write_json(folder / "config.json", raw)
    return size


def _stored_folder(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the tensors as they are stored."""
    from draftproof.models.config import read_json
    from draftproof.models.safetensors_io import checkpoint_files, read_safetensors

    tensors: dict[str, Tensor] = {}
    for path in checkpoint_files(source):
        tensors |= read_safetensors(path)
    return read_json(source / "config.json"), tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
