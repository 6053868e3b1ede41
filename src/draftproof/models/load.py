"""Checkpoint loading: a model name in, configuration and weights out.

Every loader returns a `Checkpoint` under Hugging Face tensor names, checked against the table of the model's
class. No later module depends on the file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError, LoadError, nearest
from draftproof.models.config import ModelConfig, read_json
from draftproof.models.draft_head.mtp_forms import declared_mtp_layers
from draftproof.models.expected_tensors import dummy_tensors, split_draft_tensors
from draftproof.models.families.checkpoint import model_names, stored_norms
from draftproof.models.families.moe import keeps_stored_dtype
from draftproof.models.gguf.dense import config_from_gguf, gguf_tensors, gguf_weights
from draftproof.models.gguf.file import GGUFFile, is_gguf, read_gguf
from draftproof.models.gguf.mapped_weights import has_blocks
from draftproof.models.gguf.weight_cache import read_unpacked, unpacked_path, write_unpacked
from draftproof.models.hub import find_model
from draftproof.models.quantized.config import parse_quantization
from draftproof.models.quantized.read import read_stored
from draftproof.models.registry import config_from_hf, expected_tensors
from draftproof.models.safetensors_io import checkpoint_files, read_safetensors
from draftproof.models.weight_formats import FloatWeight, WeightTensor, dequantize_all

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NEEDS_GGUF = "quantization 'gguf' computes from the blocks of a GGUF file: give one as model"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Loaded model, ready to be packed for a device."""

    config: ModelConfig
    weights: dict[str, WeightTensor]  # Hugging Face names; no lm_head.weight when embeddings are tied
    dtype: torch.dtype
    source: Path | None  # folder or .gguf file, for the tokenizer; None for a bare ModelConfig
    format: str  # a key of FORMATS
    header: GGUFFile | None = (
        None  # of a GGUF file; its vocabulary is large, so nothing keeps it after the start
    )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the weights as float tensors; those stored as floats share their memory."""
        return dequantize_all(self.weights)

    def copy(self) -> Checkpoint:
        """Return a copy with a dictionary of its own, since building a model empties it."""
        return replace(self, weights=dict(self.weights))


def load_checkpoint(
    model: str | Path | ModelConfig,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    revision: str | None = None,
    seed: int = 0,
    progress: bool = True,
    keep_blocks: bool | None = False,
    converts: bool = True,
) -> Checkpoint:
    """Load `model`: a folder, a .gguf file, a built-in name or a Hugging Face id.

    dtype "auto" keeps fp32 checkpoints in fp32 and converts every other one to bf16. `load_format` "dummy"
    makes random weights from `seed`; it takes a ModelConfig in place of a name too. `keep_blocks` keeps the
    blocks of a GGUF file instead of dequantising them; None: if there is a GGUF file with blocks. Without
    `converts` the weights of safetensors files keep their stored dtype and stay mapped from the files.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"unknown dtype {dtype!r}: {nearest(dtype, ['auto', *DTYPES])}")
    if load_format not in ("auto", *FORMATS):
        raise ConfigError(f"unknown load_format {load_format!r}: {nearest(load_format, ['auto', *FORMATS])}")
    requested = DTYPES.get(dtype)
    if keep_blocks and (isinstance(model, ModelConfig) or load_format not in ("auto", "gguf")):
        raise ConfigError(NEEDS_GGUF)
    if isinstance(model, ModelConfig):
        if load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format {load_format!r} needs a model on disk")
        return _dummy(model, None, requested, seed)
    source = find_model(str(model), revision, progress)
    if load_format == "auto":
        load_format = _detect(source)
    if keep_blocks and load_format != "gguf":
        raise ConfigError(NEEDS_GGUF)
    if keep_blocks is not False and load_format == "gguf":
        return _load_gguf(source, requested, seed, progress, keep_blocks)
    if load_format == "safetensors":
        return _load_safetensors(source, requested, seed, progress, converts)
    return FORMATS[load_format](source, requested, seed, progress)


def keeps_blocks(quantization: str, device: torch.device) -> bool | None:
    """Return the argument `keep_blocks` that the engine's option `quantization` selects on a device."""
    if quantization == "auto":
        return False if device.type == "cuda" else None
    return quantization == "gguf"


def load_config(model: str | Path, revision: str | None = None) -> tuple[ModelConfig, Path]:
    """Load the configuration alone; return it with the source it was read from."""
    source = find_model(str(model), revision, weights=False)
    if gguf := _gguf_file(source):
        return config_from_gguf(read_gguf(gguf)), gguf
    config, raw = _folder_config(source)
    quantization = parse_quantization(raw, str(source / "config.json"))
    return config if quantization is None else replace(config, dtype=quantization.name), source


def _detect(source: Path) -> str:
    if source.is_file() and source.suffix == ".safetensors":
        raise LoadError(f"{source}: give the folder that holds it together with its config.json")
    return "gguf" if _gguf_file(source) else "safetensors"


def _gguf_file(source: Path) -> Path | None:
    """Return `source` itself, or the only .gguf of a folder that has no config.json."""
    if source.is_file():
        return source if source.name != "config.json" else None
    files = sorted(source.glob("*.gguf"))
    if not files or (source / "config.json").exists():
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise LoadError(f"{source}: several GGUF files, give the path of one: {names}")
    return files[0]


def _folder_config(source: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the configuration of a folder, and the contents of its config.json."""
    folder = source.parent if source.is_file() else source
    path = folder / "config.json"
    if not path.exists():
        raise LoadError(f"{folder}: no config.json in it, so it is not a model folder")
    generation = folder / "generation_config.json"
    raw = read_json(path)
    return config_from_hf(raw, read_json(generation) if generation.exists() else None, str(path)), raw


def _load_safetensors(
    source: Path, requested: torch.dtype | None, seed: int, progress: bool, converts: bool = True
) -> Checkpoint:
    if source.is_file():
        raise LoadError(f"{source}: a folder with config.json and safetensors files is expected")
    config, raw = _folder_config(source)
    quantization = parse_quantization(raw, str(source / "config.json"))
    stored: dict[str, Tensor] = {}
    for path in checkpoint_files(source):
        for name, tensor in read_safetensors(path).items():
            if name in stored:
                raise LoadError(f"{path}: {name} is in another file of this checkpoint too")
            stored[name] = tensor
    tensors, draft_tensors = split_draft_tensors(model_names(stored, config), raw)
    if draft_tensors or declared_mtp_layers(raw):
        config = replace(config, mtp_source=str(source))
    config = _resolve_tied_embeddings(config, tensors)
    weights = read_stored(tensors, expected_tensors(config), quantization, config, str(source))
    floats = {name: weight.data for name, weight in weights.items() if isinstance(weight, FloatWeight)}
    stored_dtype = floats["model.embed_tokens.weight"].dtype
    for tensor in floats.values():
        if tensor.ndim > 1 and tensor.dtype != torch.float32:
            stored_dtype = tensor.dtype
    dtype = requested or (torch.float32 if stored_dtype == torch.float32 else torch.bfloat16)
    stored_name = str(stored_dtype).removeprefix("torch.")
    config = replace(config, dtype=quantization.name if quantization else stored_name)
    floats = stored_norms(floats, config)
    if converts:
        floats = {n: t if keeps_stored_dtype(n, config) else t.to(dtype) for n, t in floats.items()}
    weights |= {name: FloatWeight(tensor) for name, tensor in floats.items()}
    return Checkpoint(config, weights, dtype, source, "safetensors")


def _resolve_tied_embeddings(config: ModelConfig, tensors: dict[str, Tensor]) -> ModelConfig:
    """Drop an LM head stored beside tied embeddings if it is a copy; use it if it differs."""
    lm_head, table = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if not config.tie_embeddings or lm_head is None or table is None:
        return config
    if lm_head.shape == table.shape and torch.equal(lm_head, table):
        del tensors["lm_head.weight"]
        return config
    return replace(config, tie_embeddings=False)  # as transformers does


def _load_gguf(
    source: Path,
    requested: torch.dtype | None,
    seed: int,
    progress: bool,
    keep_blocks: bool | None = False,
) -> Checkpoint:
    path = _gguf_file(source)
    if path is None:
        raise LoadError(f"{source}: there is no GGUF file here")
    file = read_gguf(path)
    config = config_from_gguf(file)
    dtype = requested or (torch.float32 if config.dtype == "float32" else torch.bfloat16)
    if keep_blocks is None:
        keep_blocks = any(has_blocks(info) for info in file.tensors.values())
    if keep_blocks:
        track = _progress_bar(f"reading {path.name}", progress)
        return Checkpoint(config, gguf_weights(file, config, dtype, track), dtype, path, "gguf", file)
    cached = unpacked_path(path, dtype)
    tensors = read_unpacked(cached, expected_tensors(config), dtype)
    if tensors is None:
        tensors = gguf_tensors(file, config, dtype, _progress_bar(f"unpacking {path.name}", progress))
        write_unpacked(cached, tensors)
        # Read back, so that the first start and later ones map the same memory.
        tensors = read_unpacked(cached, expected_tensors(config), dtype) or tensors
    return Checkpoint(config, _float_weights(tensors), dtype, path, "gguf", file)


def _float_weights(tensors: Mapping[str, Tensor]) -> dict[str, WeightTensor]:
    return {name: FloatWeight(tensor) for name, tensor in tensors.items()}


def _progress_bar(text: str, progress: bool) -> Callable[..., Iterable[Any]] | None:
    if not progress:
        return None
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:  # it would write an empty line, and the disk behind stderr may be full
        return None
    return partial(track, description=text, console=console, transient=True)


def _load_dummy(source: Path, requested: torch.dtype | None, seed: int, progress: bool) -> Checkpoint:
    gguf = _gguf_file(source)
    if gguf is not None and is_gguf(gguf):
        return _dummy(config_from_gguf(read_gguf(gguf)), gguf, requested, seed)
    folder = source.parent if source.is_file() else source
    config, raw = _folder_config(source)
    if raw.get("quantization_config"):
        raise LoadError(
            f"{folder}: dummy weights are made in floats: remove quantization_config from config.json and "
            "choose the option quantization"
        )
    return _dummy(config, folder, requested, seed)


def _dummy(config: ModelConfig, source: Path | None, requested: torch.dtype | None, seed: int) -> Checkpoint:
    dtype = requested or (torch.float32 if config.dtype == "float32" else torch.bfloat16)
    return Checkpoint(config, _float_weights(dummy_tensors(config, dtype, seed)), dtype, source, "dummy")


FORMATS: dict[str, Callable[[Path, torch.dtype | None, int, bool], Checkpoint]] = {
    "safetensors": _load_safetensors,
    "gguf": _load_gguf,
    "dummy": _load_dummy,
}
