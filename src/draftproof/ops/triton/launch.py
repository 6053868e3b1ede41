"""Launch context shared by the op families: device, early launches, and the debug mode."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.triton.runtime import read_chip

EARLY_ROWS = 256  # rows up to which kernels are launched early; with more a waiting kernel takes up room
INTS = (torch.int64,)
FP32 = (torch.float32,)


class LaunchContext:
    """Options of the kernel launches of one backend.

    `pdl`: launch kernels early where rows are few (programmatic dependent launch, Hopper and newer).
    `debug`: wait after every op, so that a failed launch is reported with the op's name.
    """

    def __init__(self, device: torch.device, cuda: bool, pdl: bool, debug: bool | None) -> None:
        self.device = device
        self.cuda = cuda  # on a GPU, not the interpreter
        self.chip = read_chip(device)
        self.pdl = pdl and cuda and self.chip.has_pdl
        self.debug = os.environ.get("DRAFTPROOF_DEBUG", "0") == "1" if debug is None else debug

    def early(self, x: Tensor) -> bool:
        """Return whether kernels on these rows are launched early."""
        return self.pdl and len(x) <= EARLY_ROWS

    def done(self, op: str) -> None:
        """Wait for the op that was launched last, in debug mode."""
        if self.debug and self.cuda and not torch.cuda.is_current_stream_capturing():
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                raise RuntimeError(f"the device failed in or before {op}: {error}") from error

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self.device)


def check_columns(name: str, columns: Iterable[Tensor], size: int) -> None:
    """Raise unless each column is a contiguous [size] int64."""
    for column in columns:
        if column.shape != (size,) or column.dtype != torch.int64 or not column.is_contiguous():
            raise ConfigError(f"{name}: [{size}] int64 is required, not {list(column.shape)} {column.dtype}")
