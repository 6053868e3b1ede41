"""Writer of quantised checkpoints as compressed-tensors folders, which transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.quantized.layouts import is_float, pack_words
from draftproof.models.registry import config_from_hf
from draftproof.models.safetensors_io import INDEX_FILE, SINGLE_FILE
from draftproof.models.weight_formats import LINEAR_SUFFIXES, W8A8Weight
from draftproof.models.weights.low_bit import E4M3_MAX, INT4_GROUPS, Int4GroupWeight

_WEIGHT_FILES = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".index.json")
_MAX_OTHER_BYTES = 100 << 20  # of a tokenizer, template or licence that is copied
MAX_FILE_BYTES = 5 << 30  # as the files of public checkpoints
MIN_SCALE = 2.0**-100  # of a row of zeros
_PER_TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
_WEIGHTS = {"symmetric": True, "dynamic": False}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Format of a written checkpoint: the arguments of its config group and the stored tensors of a layer."""

    compression: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    store: Callable[[Tensor, int], dict[str, Tensor]]  # matrix [N, K] and group -> suffix -> tensor


def _scaled(matrix: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return the rows divided by their scales within +-limit, and the scales [N, 1] in bf16.

    Scales are rounded before they are used: transformers reads them in the dtype of the model.
    """
    rows = matrix.detach().float()
    scales = (rows.abs().amax(1, keepdim=True) / limit).clamp(min=MIN_SCALE).to(torch.bfloat16)
    return (rows / scales.float()).clamp_(-limit, limit), scales


def _store_int8(matrix: Tensor, group: int) -> dict[str, Tensor]:
    values, scales = _scaled(matrix, W8A8Weight.limit)
    return {"weight": values.round().to(torch.int8), "weight_scale": scales}


def _store_fp8(matrix: Tensor, group: int) -> dict[str, Tensor]:
    values, scales = _scaled(matrix, E4M3_MAX)
    return {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scales}


def _store_int4(matrix: Tensor, group: int) -> dict[str, Tensor]:
    weight = Int4GroupWeight.quantize(matrix, group)
    assert weight.scales is not None
    shape = torch.tensor(matrix.shape)
    return {
        "weight_packed": pack_words(weight.integers()),
        "weight_scale": weight.scales,
        "weight_shape": shape,
    }


OUTPUT_FORMATS = {
    "int8": OutputFormat(
        "int-quantized",
        _WEIGHTS | {"num_bits": 8, "type": "int", "strategy": "channel"},
        _PER_TOKEN | {"type": "int"},
        _store_int8,
    ),
    "fp8": OutputFormat(
        "float-quantized",
        _WEIGHTS | {"num_bits": 8, "type": "float", "strategy": "channel"},
        _PER_TOKEN | {"type": "float"},
        _store_fp8,
    ),
    "int4": OutputFormat("pack-quantized", _WEIGHTS | {"num_bits": 4, "type": "int"}, None, _store_int4),
}


def is_quantizable(name: str) -> bool:
    """Return whether a tensor is the matrix of a linear layer; embeddings and the LM head stay floats."""
    return name.endswith(LINEAR_SUFFIXES)


def common_group(depths: Iterable[int]) -> int:
    """Return the largest group of 4-bit weights that divides every row length; 0: whole rows."""
    every = set(depths)
    return next((size for size in INT4_GROUPS if all(depth % size == 0 for depth in every)), 0)


def quantized_tensors(
    tensors: Mapping[str, Tensor], form: OutputFormat, group: int, kept: Iterable[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the written checkpoint; `kept` and all but linear layers are unchanged."""
    as_stored = set(kept)
    for name, tensor in tensors.items():
        if not is_quantizable(name) or name in as_stored:
            yield name, tensor
            continue
        if not is_float(tensor) or not bool(tensor.isfinite().all()):
            raise LoadError(f"{name} is {tensor.dtype} or has values that are not finite: not quantised")
        try:
            parts = form.store(tensor, group)
        except LoadError as error:
            raise LoadError(f"{name} cannot be quantised: {error}") from error
        for suffix, part in parts.items():
            yield f"{name.removesuffix('weight')}{suffix}", part


def quantization_config(form: OutputFormat, group: int, kept: Iterable[str] = ()) -> dict[str, Any]:
    """Return the key `quantization_config` of config.json."""
    weights = dict(form.weights)
    if "strategy" not in weights:
        weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = {"targets": ["Linear"], "weights": weights, "output_activations": None}
    scheme["input_activations"] = None if form.inputs is None else dict(form.inputs)
    return {
        "quant_method": "compressed-tensors",
        "format": form.compression,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", *(name.removesuffix(".weight") for name in kept)],
        "kv_cache_scheme": None,
    }


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json; LoadError if it cannot hold the configuration."""
    kind = config.architecture.removesuffix("ForCausalLM").lower()
    windowed = [window for window in config.windows if window]
    made: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": kind,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": windowed[0] if windowed else None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    found = config_from_hf(made)
    names = [field.name for field in fields(config) if field.name != "dtype"]
    if lost := [name for name in names if getattr(found, name) != getattr(config, name)]:
        raise LoadError(
            f"config.json of a {config.architecture} cannot hold this model's {', '.join(lost)}: give the "
            "folder with the model's own config.json and safetensors files"
        )
    return made


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling.kind in ("none", "factors"):  # factors of single frequencies: refused by the caller's check
        return None
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_max_position:
        rope["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        rope |= {"attention_factor": scaling.attention_factor, "truncate": scaling.truncate}
    return rope


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy tokenizer, template and licence files: everything small at the top but weights."""
    for path in sorted(source.iterdir()):
        is_weight = path.name.endswith(_WEIGHT_FILES) or path.name == "config.json"
        is_small = path.is_file() and path.stat().st_size <= _MAX_OTHER_BYTES
        if is_small and not is_weight and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int = MAX_FILE_BYTES
) -> int:
    """Write safetensors files of at most `max_bytes`, and an index for several; return the bytes."""
    files: list[list[str]] = []  # tensor names of each file
    part: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(part, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(part))
        part.clear()

    for name, tensor in tensors:
        if part and size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        part[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files):
        final = SINGLE_FILE if len(files) == 1 else f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"part-{i}").rename(folder / final)
        (folder / final).chmod(0o644)  # the library writes for the owner alone
        weight_map |= dict.fromkeys(names, final)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return total
