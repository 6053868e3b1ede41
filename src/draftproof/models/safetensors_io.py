"""Reader of safetensors checkpoints: one file, or several with an index, memory-mapped."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import read_json
from draftproof.models.gguf.file import content_hint

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model folder, those of the index where there is one."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise LoadError(f"{index}: there is no weight_map in it")
        names = sorted({str(name) for name in weight_map.values()})
        if bad := [name for name in names if Path(name).name != name]:
            raise LoadError(f"{index}: file names must not contain folders: {bad[0]!r}")
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise LoadError(f"{folder}: the index names files that are not there: {missing}")
        return tuple(folder / name for name in names)
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if len(files) == 1:
        return files
    if files:
        raise LoadError(f"{folder}: several safetensors files but no {INDEX_FILE}")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise LoadError(
            f"{folder}: only pickled PyTorch weights are here, which can run code when loaded; "
            "convert them to safetensors"
        )
    raise LoadError(f"{folder}: there are no safetensors files in it")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of one file, memory-mapped."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise LoadError(f"{path}: no such file") from error
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        hint = ""
        with contextlib.suppress(OSError), path.open("rb") as file:
            hint = content_hint(file.read(64), "safetensors")
        raise LoadError(f"{path}: not a usable safetensors file: {error}{hint}") from error
