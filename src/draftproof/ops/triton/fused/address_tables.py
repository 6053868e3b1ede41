"""Address tables of kernels that run all layers: the tensors of each layer, and its place among the taps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.ops.triton.kernel_utils import ALIGNMENT, INTERPRETED


class AddressTables:
    """Tables on a device by their content."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def table(self, addresses: Sequence[Sequence[int]], taps: Sequence[int]) -> Tensor | None:
        """Return the table [layers, fields]: the addresses of each layer, then its index in `taps` or -1.

        None if an address is not aligned, or if the table would have to be built in a capture.
        """
        if any(address % ALIGNMENT for line in addresses for address in line):
            return None
        lines = [[*line, taps.index(i) if i in taps else -1] for i, line in enumerate(addresses)]
        key = tuple(address for line in lines for address in line)
        if key not in self._tables:
            if not INTERPRETED and torch.cuda.is_current_stream_capturing():
                return None
            self._tables[key] = torch.tensor(lines, dtype=torch.int64).to(self._device)
        return self._tables[key]
