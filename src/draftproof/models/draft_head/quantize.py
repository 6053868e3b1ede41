"""Int8 storage of a draft head's matrices, which halves the file; read back by `weight_formats`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from draftproof.models.weight_formats import Int8RowWeight


def quantize_matrices(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file with matrices in int8 and a scale per row; other tensors do not change."""
    stored = dict(tensors)
    for name, matrix in tensors.items():
        if matrix.dim() == 2 and matrix.is_floating_point():
            stored |= Int8RowWeight.quantize(matrix).stored(name)
    return stored
