"""Contract of the communication between the ranks of a tensor-parallel engine."""

from __future__ import annotations

from torch import Tensor


class Communicator:
    """Collectives of one rank; this class is that of an engine with one rank, which sends nothing.

    Every rank calls the same collectives in the same order, with tensors of the same shape and dtype. Results
    are in rank order, so that no sum depends on the order of arrival.
    """

    rank: int = 0
    size: int = 1

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors x [...] of all ranks: [size, ...]."""
        return x[None]

    def broadcast(self, x: Tensor) -> None:
        """Copy the tensor of rank 0 to `x` on all others."""

    def abort(self) -> None:
        """End collectives that wait for a rank which has ended."""
