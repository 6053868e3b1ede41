"""Ops: everything that runs on the device, behind one contract with several backends.

`contract` defines the op families and the `Ops` record that a backend fills with them. This module holds the
table of backends and resolves device and backend names.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch as pytorch  # the subpackage `torch` takes that name here once it is imported

from draftproof.errors import ConfigError
from draftproof.ops.contract.backend import Ops as Ops
from draftproof.ops.contract.communicator import Communicator as Communicator
from draftproof.ops.contract.kv_layout import KVLayout as KVLayout
from draftproof.ops.contract.runtime import GraphPool as GraphPool
from draftproof.ops.contract.runtime import Runtime as Runtime
from draftproof.ops.contract.sampling import STREAM_ACCEPT as STREAM_ACCEPT
from draftproof.ops.contract.sampling import STREAM_RESIDUAL as STREAM_RESIDUAL
from draftproof.ops.contract.sampling import STREAM_SAMPLE as STREAM_SAMPLE
from draftproof.ops.contract.sampling import STREAM_SYNTHETIC as STREAM_SYNTHETIC
from draftproof.ops.contract.types import Attention as Attention
from draftproof.ops.contract.types import AttentionShape as AttentionShape
from draftproof.ops.contract.types import DraftVocab as DraftVocab
from draftproof.ops.contract.types import ExpertPart as ExpertPart
from draftproof.ops.contract.types import LatentAttention as LatentAttention
from draftproof.ops.contract.types import Layer as Layer
from draftproof.ops.contract.types import Layout as Layout
from draftproof.ops.contract.types import Mlp as Mlp
from draftproof.ops.contract.types import Moe as Moe
from draftproof.ops.contract.types import NamedIds as NamedIds
from draftproof.ops.contract.types import NamedLogprobs as NamedLogprobs
from draftproof.ops.contract.types import PackedState as PackedState
from draftproof.ops.contract.types import PendingCopy as PendingCopy
from draftproof.ops.contract.types import QuantizedTable as QuantizedTable
from draftproof.ops.contract.types import Routing as Routing
from draftproof.ops.contract.types import TokenLogprobs as TokenLogprobs
from draftproof.registry import lookup
from draftproof.types import Rows as Rows

BACKENDS = {
    "reference": "draftproof.ops.reference.backend:ReferenceOps",
    "torch": "draftproof.ops.torch.backend:TorchOps",
    "cpu": "draftproof.ops.cpu.backend:CpuOps",
    "triton": "draftproof.ops.triton.backend:TritonOps",
}


def resolve_device(name: str) -> pytorch.device:
    """Return the device by name; "auto" selects a GPU that the kernels support, else the CPU."""
    if name == "auto":
        return pytorch.device("cuda" if _gpu_is_supported() else "cpu")
    try:
        device = pytorch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use 'auto' or 'cpu'") from error
    try:
        pytorch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: use 'auto' or 'cpu' ({error})") from error
    return device


def resolve(backend: str, device: pytorch.device, numerics: str = "exact", num_ranks: int = 1) -> Ops:
    """Return the backend by name; "auto" selects the fastest that the device supports.

    `num_ranks`: processes that share the device's threads, if it is a CPU.
    """
    if backend == "auto":
        if device.type == "cpu" and find_spec("numba") is not None:
            backend = "cpu"
        elif device.type == "cuda" and _gpu_is_supported():
            backend = "triton"
        else:
            backend = "torch"
    options: dict[str, Any] = {} if numerics == "exact" else {"numerics": numerics}
    if backend == "cpu" and num_ranks > 1:
        options["threads"] = max(1, pytorch.get_num_threads() // num_ranks)
    ops: Ops = lookup(BACKENDS, backend, "backend")(device, **options)
    return ops


def _gpu_is_supported() -> bool:
    """Return whether a GPU of compute capability 8.0 or newer and Triton are available."""
    if not pytorch.cuda.is_available() or find_spec("triton") is None:
        return False
    return pytorch.cuda.get_device_capability() >= (8, 0)
