"""Copy of a model's checkpoint with a trained MTP layer in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from draftproof.models.config import read_json
from draftproof.models.draft_head.checkpoint_mtp import mtp_tensors
from draftproof.models.load import Checkpoint
from draftproof.models.quantized.write import config_to_hf, copy_other_files, write_tensors
from draftproof.models.safetensors_io import INDEX_FILE, checkpoint_files, read_safetensors
from draftproof.text.tokenizer_export import write_tokenizer
from draftproof.train.config import write_json

MTP_FILE = "mtp.safetensors"


def write_checkpoint(folder: Path, checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> None:
    """Write the model and an MTP layer, which method `mtp` then needs no `model` key for.

    The files of a folder are copied as they are; a GGUF file becomes safetensors in bf16. The layer is a file
    of its own. `weights`: under the names of `DraftHeadConfig.tensors`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = _copy_model(folder, checkpoint)
    kept = [path for path in checkpoint_files(folder) if path.name != MTP_FILE]
    tensors = mtp_tensors(weights, checkpoint.config)
    partial = folder / (MTP_FILE + ".part")
    save_file({n: t.detach().bfloat16().cpu().contiguous() for n, t in tensors.items()}, partial)
    partial.chmod(0o644)  # the library writes for the owner alone
    os.replace(partial, folder / MTP_FILE)
    places = {name: path.name for path in kept for name in read_safetensors(path)}
    size = sum(path.stat().st_size for path in (*kept, folder / MTP_FILE))
    index = {
        "metadata": {"total_size": size},
        "weight_map": places | dict.fromkeys(sorted(tensors), MTP_FILE),
    }
    write_json(folder / INDEX_FILE, index)
    write_json(folder / "config.json", raw | {"num_nextn_predict_layers": 1})


def _copy_model(folder: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Copy everything but the MTP layer, unless a former call did; return the contents of config.json."""
    source = checkpoint.source
    assert source is not None, "a name was loaded"
    if (folder / "config.json").exists():
        return read_json(folder / "config.json")
    if source.is_dir() and checkpoint.format == "safetensors":
        copy_other_files(source, folder)
        for path in (*checkpoint_files(source), source / INDEX_FILE):
            if path.exists():
                shutil.copyfile(path, folder / path.name)
        return read_json(source / "config.json")
    write_tokenizer(source, folder)
    write_tensors(folder, checkpoint.tensors.items())
    return config_to_hf(checkpoint.config)
