"""A head's matrices in eight bits, with a scale a row: half of the file. Unpacked when it is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftproof.errors import LoadError

SCALE = ".scale"  # after the name of a packed matrix [rows, columns] int8: [rows] fp32
MOST = 127


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in eight bits, everything else as it is."""
    made = dict(tensors)
    for name, matrix in tensors.items():
        if matrix.dim() == 2 and matrix.is_floating_point():
            rows = matrix.detach().float()
            scale = (rows.abs().amax(1) / MOST).clamp(min=torch.finfo(torch.float32).tiny)
            made[name] = (rows / scale[:, None]).round().clamp(-MOST, MOST).to(torch.int8)
            made[name + SCALE] = scale
    return made


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PackedResults matrices in bf16, everything else as it is."""
    made = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, matrix in made.items():
        if matrix.dtype != torch.int8:
            continue
        scale = tensors.get(name + SCALE)
        if scale is None or scale.shape != matrix.shape[:1]:
            raise LoadError(
                f"{name} is packed, but {name}{SCALE} does not have a number for each of its rows"
            )
        made[name] = (matrix.float() * scale.float()[:, None]).to(torch.bfloat16)
    return made
