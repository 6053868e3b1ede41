"""Cache of dequantised GGUF weights, for a quick restart."""

from __future__ import annotations

import json
import logging
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.gguf.cache_files import TEMPORARY_PREFIX, cached_file, record_use, remove_unused
from draftproof.models.safetensors_io import read_safetensors

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_LOG = logging.getLogger(__name__)


def unpacked_path(source: Path, dtype: torch.dtype) -> Path:
    """Return the path of the unpacked `source`; another file, date or dtype gives another name."""
    kind = str(dtype).removeprefix("torch.")
    return cached_file("unpacked", source, kind, ".safetensors")


def read_unpacked(
    path: Path, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor] | None:
    """Read the tensors; None if the file is missing or damaged, so that it is written again."""
    if not path.exists():
        return None
    try:
        found = read_safetensors(path)
    except LoadError as error:
        _LOG.warning("unpacking again: %s", error)
        return None
    is_complete = {name: tuple(tensor.shape) for name, tensor in found.items()} == dict(expected)
    dtypes = (dtype, torch.float32)  # routers are not rounded
    if not is_complete or any(tensor.dtype not in dtypes for tensor in found.values()):
        _LOG.warning("unpacking again: %s does not hold this model", path)
        return None
    record_use(path)
    return {name: found[name] for name in expected}


def write_unpacked(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the file atomically. A folder that cannot be written is logged: only the next start is slower."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY_PREFIX)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            _write_safetensors(file, tensors)
        os.replace(temporary, path)
        remove_unused(path)
    except OSError as error:
        _LOG.warning("the unpacked model was not cached: %s", error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write tensor after tensor: the library's own writer first copies the whole model."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        kind = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # mapped tensors then begin on whole cache lines
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
