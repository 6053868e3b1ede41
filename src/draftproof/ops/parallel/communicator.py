"""Communicator over torch.distributed: NCCL between GPUs, gloo between processes on CPUs.

The process group is an object of its own. The default group of torch.distributed, which a trainer in the same
process may use, is not touched.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, FileStore

from draftproof.errors import ConfigError
from draftproof.ops.contract.communicator import Communicator

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # of one collective; another rank may compile kernels in that time


class ProcessCommunicator(Communicator):
    """Communicator of one process per rank, on one machine."""

    def __init__(self, path: str, rank: int, size: int, device: torch.device) -> None:
        """Meet the other ranks, which give the same `path` of a file."""
        if not distributed.is_available():
            raise ConfigError("tensor_parallel_size > 1 needs a build of torch with torch.distributed")
        self.rank, self.size = rank, size
        store = FileStore(path, size)
        self._group: Any = (_nccl if device.type == "cuda" else _gloo)(store, rank, size)

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x[None] if self.size == 1 else x.new_empty((self.size, *x.shape))  # one rank: in place
        if x.numel() and not _is_compiling(x):  # sent as bytes, so that every dtype can be
            options = AllgatherOptions()
            options.asyncOp = False  # on the stream of the kernels: no event between it and a second stream
            work = self._group._allgather_base(_as_bytes(out), _as_bytes(x), options)
            if work is not None:  # NCCL returns none for an operation on the current stream
                work.wait()
        return out

    def broadcast(self, x: Tensor) -> None:
        if x.numel() and not _is_compiling(x):
            options = distributed.BroadcastOptions()
            options.rootRank = 0
            self._group.broadcast([_as_bytes(x)], options).wait()

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()


def rank_device(device: torch.device, rank: int, size: int) -> torch.device:
    """Return the device of a rank: GPUs in order from `device` on, or the CPU for all ranks."""
    if device.type != "cuda":
        return device
    first, count = device.index or 0, torch.cuda.device_count()
    if first + size > count:
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} GPUs from {device} on, and this machine has {count}"
        )
    return torch.device("cuda", first + rank)


def select_device(device: torch.device) -> None:
    """Make `device` the current GPU of this process, on which kernels are launched."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _gloo(store: Any, rank: int, size: int) -> Any:
    """Return a gloo group that is bound to this machine's own address."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = COLLECTIVE_TIMEOUT
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    if not distributed.is_nccl_available():
        raise ConfigError("tensor_parallel_size > 1 on GPUs needs a build of torch with NCCL")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _is_compiling(x: Tensor) -> bool:
    """Return whether kernels are only compiled now, so that tensors have no contents yet."""
    if not x.is_cuda:
        return False
    from draftproof.ops.triton.compile_ahead import is_compiling

    return is_compiling()
