"""The cache folder: downloaded models, and GGUF models unpacked once for a quick restart."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.safetensors_files import read_safetensors

_VERSION = 1  # of what is in an unpacked file; a new number leaves old files unused
_LOG = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$DRAFTPROOF_CACHE, or ~/.cache/draftproof. It may not exist yet."""
    named = os.environ.get("DRAFTPROOF_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "draftproof"


def unpacked_path(source: Path, dtype: torch.dtype) -> Path:
    """Where the unpacked `source` belongs; another file, date or dtype gives another name."""
    source = source.resolve()
    facts = source.stat()
    key = f"{source}|{facts.st_size}|{facts.st_mtime_ns}|{dtype}|{_VERSION}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_folder() / "unpacked" / f"{source.stem}-{digest}.safetensors"


def read_unpacked(
    path: Path, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor] | None:
    """The tensors, or None when they are not there or not whole (they are then made again)."""
    if not path.exists():
        return None
    try:
        found = read_safetensors(path)
    except LoadError as error:
        _LOG.warning("unpacking again: %s", error)
        return None
    whole = {name: tuple(tensor.shape) for name, tensor in found.items()} == dict(expected)
    if not whole or any(tensor.dtype != dtype for tensor in found.values()):
        _LOG.warning("unpacking again: %s does not hold this model", path)
        return None
    return {name: found[name] for name in expected}


def write_unpacked(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Store atomically. A cache that cannot be written costs only time, at the next start."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".unpacking-")
        os.close(handle)
        temporary = Path(name)
        save_file(dict(tensors), temporary)
        os.replace(temporary, path)
    except Exception as error:  # a full disk reaches us as safetensors' own error
        _LOG.warning("the unpacked model was not cached: %s", error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
