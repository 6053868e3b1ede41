"""Tensors of a model on disk by kind: format, bytes in the file and in the memory of the CPU."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from draftproof.models.config import ModelConfig
from draftproof.models.gguf.dense import hf_name
from draftproof.models.gguf.file import TYPES, check_types, num_bytes, read_gguf
from draftproof.models.gguf.mapped_weights import CHUNK_ROWS, GGUFMapping, GGUFWeight, has_blocks
from draftproof.models.safetensors_io import checkpoint_files, read_safetensors
from draftproof.ops import resolve

_LAYER = re.compile(r"^model\.layers\.\d+\.")
_TABLE = "model.embed_tokens.weight"
FLOAT_BYTES = 2  # of an element in bf16, which other formats are unpacked to
BANDWIDTH_BYTES = 256 << 20  # larger than the caches of a CPU
BANDWIDTH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Tensors of one name in all layers that have one format."""

    name: str  # without the number of the layer
    format: str
    count: int
    file_bytes: int
    memory_bytes: int  # with the default options on the CPU
    bytes_per_token: int  # read in a step of one row


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of a file."""

    name: str
    format: str
    shape: tuple[int, ...]
    file_bytes: int
    memory_bytes: int


def stored_tensors(source: Path, config: ModelConfig) -> list[TensorKind]:
    """Return the kinds of tensors of a GGUF file or a folder, in the order of the file.

    Empty for a folder without weights. Memory is that of the default options on the CPU.
    """
    found = _gguf_tensors(source) if source.is_file() else _safetensors(source)
    groups: dict[tuple[str, str], list[_Stored]] = {}
    for tensor in found:
        name = _LAYER.sub("", tensor.name).removeprefix("model.").removesuffix(".weight")
        groups.setdefault((name, tensor.format), []).append(tensor)
    kinds = []
    for (name, form), group in groups.items():
        memory = sum(tensor.memory_bytes for tensor in group)
        is_lookup = group[0].name == _TABLE and not config.tie_embeddings  # one row a token
        read = memory // group[0].shape[0] if is_lookup else memory
        file_bytes = sum(tensor.file_bytes for tensor in group)
        kinds.append(TensorKind(name, form, len(group), file_bytes, memory, read))
    return kinds


def _gguf_tensors(path: Path) -> list[_Stored]:
    file = read_gguf(path)
    check_types(file)
    ops, mapping = resolve("cpu", torch.device("cpu")), GGUFMapping(file)
    found = []
    packed_bytes: dict[str, float] = {}  # of an element, by type
    for info in file.tensors.values():
        kind, count, each = TYPES[info.type_id][0], math.prod(info.shape), float(FLOAT_BYTES)
        if has_blocks(info):
            if kind not in packed_bytes:  # pack the first rows
                part = GGUFWeight(mapping.tensor(info), kind=kind, name=info.name).decode(0, CHUNK_ROWS)
                assert part.scales is not None
                state = ops.forward.packed_state(part.format, part.data, part.scales)
                packed_bytes[kind] = state.weight.nbytes / part.data.numel()
            each = packed_bytes[kind]
        name = hf_name(info.name) or info.name
        found.append(_Stored(name, kind, info.shape, num_bytes(info), int(count * each)))
    return found


def _safetensors(folder: Path) -> list[_Stored]:
    if not any(folder.glob("*.safetensors")):
        return []  # the configuration of a hub model, without its weights
    found = []
    for path in checkpoint_files(folder):
        for name, tensor in read_safetensors(path).items():
            is_float = tensor.is_floating_point() and tensor.element_size() > 1
            wide = tensor.element_size() if tensor.dtype == torch.float32 else FLOAT_BYTES
            memory = tensor.numel() * (wide if is_float else tensor.element_size())
            kind = str(tensor.dtype).removeprefix("torch.")
            found.append(_Stored(name, kind, tuple(tensor.shape), tensor.nbytes, memory))
    return found


def read_bandwidth() -> float:
    """Return the bytes a second at which all threads of torch read memory, the best of half a second."""
    data = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64)
    best, end = math.inf, time.perf_counter() + BANDWIDTH_SECONDS
    while time.perf_counter() < end or best == math.inf:
        begin = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begin)
    return BANDWIDTH_BYTES / best
