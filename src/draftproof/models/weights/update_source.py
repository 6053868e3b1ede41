"""Sources of a weight update: pairs of name and tensor, or files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, read_json
from draftproof.models.families.checkpoint import model_names, stored_norms
from draftproof.models.rope import loaded_form
from draftproof.models.safetensors_io import checkpoint_files, read_safetensors
from draftproof.models.weight_formats import WeightTensor
from draftproof.models.weights.tensor import FLOAT_NAMES, FloatWeight

# a folder or file, or (name, tensor) pairs under the names of the checkpoint
WeightSource = str | PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_DTYPES = {name: dtype for dtype, name in FLOAT_NAMES.items()}


def is_path(source: WeightSource) -> bool:
    """Return whether a source is a folder or file."""
    return isinstance(source, (str, PathLike))


def needs_loader(path: Path) -> bool:
    """Return whether files have a format that only the loader of checkpoints reads."""
    config = path / "config.json"
    return path.is_file() or (config.exists() and bool(read_json(config).get("quantization_config")))


def read_tensors(source: WeightSource) -> dict[str, Tensor]:
    """Return all tensors of a source by name; LoadError if a name occurs twice or one is no tensor."""
    pairs: Iterable[Any]
    if isinstance(source, (str, PathLike)):
        folder = Path(source)
        if not folder.is_dir():
            raise LoadError(f"{folder}: there is no such folder")
        pairs = [pair for path in checkpoint_files(folder) for pair in read_safetensors(path).items()]
    else:
        pairs = source.items() if isinstance(source, Mapping) else source
    tensors: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise LoadError("weights are (name, tensor) pairs, or a folder with safetensors files")
        name, tensor = str(pair[0]), pair[1]
        if name in tensors:
            raise LoadError(f"{name} is given twice")
        tensors[name] = tensor.detach()
    return tensors


def target_weights(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    dtype: torch.dtype,
    formats: Mapping[str, str],
    quantize: Callable[[dict[str, WeightTensor]], None],  # in place, as when the model was loaded
) -> dict[str, WeightTensor]:
    """Return the weights of a model from tensors of its checkpoint; `formats`: of its packed weights."""
    given = model_names(tensors, config)
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if config.tie_embeddings and head in given:  # trainers often list both
        if table not in given or not torch.equal(given[head], given[table]):
            raise LoadError(f"{head} is the embedding of this model: give {table} alone")
        del given[head]
    for name, tensor in given.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise LoadError(f"{name} is {kind}: give floats, or files in the format of the model")
    weights: dict[str, WeightTensor] = {
        name: FloatWeight(tensor.to(_DTYPES.get(formats.get(name, ""), dtype)))
        for name, tensor in stored_norms(loaded_form(given, config), config).items()
    }
    quantize(weights)
    return weights
