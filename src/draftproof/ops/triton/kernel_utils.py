"""Device checks, launch options, the debug mode and input checks that all kernel files share.

Input checks read shapes, dtypes, strides and addresses only, so none of them synchronises with the device.
A tensor at an unaligned address is copied first: the compiler derives its vector width, and with it the
reduction tree, from the alignment, and a row must always be reduced by the same tree.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.kv_layout import kv_format, row_elements
from draftproof.ops.contract.types import AttentionShape
from draftproof.types import Rows

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HAS_PTX = tl.constexpr(not INTERPRETED)  # the interpreter runs no inline assembly
ALIGNMENT = 16  # bytes
FLOATS, FP32, INTS = (torch.float32, torch.bfloat16), (torch.float32,), (torch.int64,)
EARLY_ROWS = 256  # rows up to which kernels are launched early; with more a waiting kernel occupies SMs


@triton.jit
def pdl_launch_next(PDL: tl.constexpr):
    """Allow the next kernel to start: first statement of a kernel with programmatic dependent launch (PDL).

    Such a kernel may be resident before the kernel that it depends on has completed. Until `pdl_wait` it
    writes nothing, and reads only weights and what `pdl_begin_pass` allows.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the previous kernel has completed."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_sync(PDL: tl.constexpr):
    """Do `pdl_launch_next`, then `pdl_wait`."""
    pdl_launch_next(PDL)
    pdl_wait(PDL)


@triton.jit
def pdl_begin_pass(PDL: tl.constexpr):
    """Do `pdl_sync` in the other order: the next kernel starts after the end of all kernels before this one.

    Every forward pass launches a kernel with this first statement before it stores KV or attends. So kernels
    of attention, and of what is stored for it, may read slots, positions, the page table and keys of
    earlier passes before their own wait.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait_mask(k, PDL: tl.constexpr):
    """Return True once the previous kernel has completed; a load with this mask waits, other loads do not.

    The assembly is declared pure, so that the compiler pipelines the loop around it. It reads the loop
    variable `k`, so that the compiler keeps it inside the loop, after the loads that precede it.
    """
    zero = k * 0
    if PDL:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0; // $1", "=r,r", [k], dtype=tl.int32, is_pure=True, pack=1
        )
    return zero == 0


@triton.jit
def prefetch_l2(pointers):
    """Prefetch the L2 lines at these addresses; a hint, so it is allowed before the wait of `pdl_sync`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def pdl_sync_prefetch_weight(w, columns, N, K, is_first_tile, NUM_LINES: tl.constexpr, PDL: tl.constexpr):
    """Do `pdl_sync`, and before its wait prefetch the weight rows `columns` [BN] if `is_first_tile`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if NUM_LINES:  # noqa: SIM102 - a constant, then a value on the device
            if is_first_tile:
                LINE_ELEMENTS: tl.constexpr = 128 // (w.dtype.element_ty.primitive_bitwidth // 8)
                offset = tl.minimum(tl.arange(0, NUM_LINES) * LINE_ELEMENTS, K - 1)
                prefetch_l2(w + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + offset[None, :])
        tl.extra.cuda.gdc_wait()


def launch_options(pdl: bool, **options: Any) -> dict[str, Any]:
    """Return the keyword arguments of a launch; `launch_pdl` is absent where PDL is off."""
    return {**options, "PDL": True, "launch_pdl": True} if pdl else {**options, "PDL": False}


@dataclass(frozen=True, slots=True)
class Chip:
    """Capabilities of a device that kernel selection depends on."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_per_program: int = 0  # maximum bytes of shared memory
    shared_per_sm: int = 0  # bytes of shared memory

    @property
    def has_pdl(self) -> bool:
        """Return whether programmatic dependent launch exists (Hopper and newer)."""
        return self.capability >= (9, 0)


INTERPRETER = Chip(name="interpreter", capability=(0, 0), num_sms=3, shared_per_program=1 << 30)


def read_chip(device: torch.device) -> Chip:
    """Return the record of a device; `INTERPRETER` under Triton's interpreter."""
    if INTERPRETED:
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Chip(
        name=getattr(properties, "name", "unknown"),
        capability=torch.cuda.get_device_capability(device),
        num_sms=properties.multi_processor_count,
        shared_per_program=getattr(properties, "shared_memory_per_block_optin", 0),
        shared_per_sm=getattr(properties, "shared_memory_per_multiprocessor", 0),
    )


class LaunchContext:
    """Options of the kernel launches of one backend.

    `pdl`: launch kernels early where rows are few (programmatic dependent launch, Hopper and newer).
    """

    def __init__(self, device: torch.device, pdl: bool) -> None:
        self.device = device
        self.cuda = not INTERPRETED
        self.chip = read_chip(device)
        self.pdl = pdl and self.cuda and self.chip.has_pdl

    def early(self, x: Tensor) -> bool:
        """Return whether kernels on these rows are launched early."""
        return self.pdl and len(x) <= EARLY_ROWS

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self.device)


def wait_after_ops(family: object, device: torch.device) -> None:
    """Make every op of `family` wait for the device, so that a failure is reported with the op's name."""

    def waiting(op: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(op)
        def run(*args: Any, **options: Any) -> Any:
            out = op(*args, **options)
            if not torch.cuda.is_current_stream_capturing():
                try:
                    torch.cuda.synchronize(device)
                except RuntimeError as error:
                    raise RuntimeError(f"the device failed in or before {op.__name__}: {error}") from error
            return out

        return run

    for name, _ in inspect.getmembers(type(family), inspect.isfunction):
        if not name.startswith("_"):
            setattr(family, name, waiting(getattr(family, name)))


def check_device(device: torch.device) -> None:
    """Raise ConfigError unless this backend can run on `device`."""
    if INTERPRETED:
        return
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            f"cannot load the triton backend on {device}: it needs a CUDA GPU; backend='auto' picks another"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        raise ConfigError(
            f"cannot load the triton backend: {torch.cuda.get_device_name(device)} has compute capability "
            f"{major}.{minor}, 8.0 or newer is needed; use backend='torch'"
        )


def matrix(name: str, x: Tensor, width: int | None = None, dtypes: tuple = FLOATS) -> Tensor:
    """Return `x` as a contiguous aligned matrix [R, width] of one of `dtypes`, or raise ConfigError."""
    if x.ndim != 2 or (width is not None and x.shape[1] != width):
        raise ConfigError(f"{name} must be [rows, {width or 'columns'}], not {list(x.shape)}")
    return _usable(name, x, dtypes)


def vector(name: str, x: Tensor, size: int | None, dtypes: tuple) -> Tensor:
    """Return `x` as a contiguous aligned vector [size] of one of `dtypes`, or raise ConfigError."""
    if x.ndim != 1 or (size is not None and x.shape[0] != size):
        raise ConfigError(f"{name} must be [{'rows' if size is None else size}], not {list(x.shape)}")
    return _usable(name, x, dtypes)


def _usable(name: str, x: Tensor, dtypes: tuple) -> Tensor:
    """Check dtype and device of `x`; copy it if it is not contiguous or not aligned."""
    if x.dtype not in dtypes:
        raise ConfigError(f"{name} must be {' or '.join(map(str, dtypes))}, not {x.dtype}")
    if not INTERPRETED and x.device.type != "cuda":
        raise ConfigError(f"{name} is on {x.device}, this backend needs it on the GPU")
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def check_columns(name: str, columns: Iterable[Tensor], size: int) -> None:
    """Raise ConfigError unless each column is a contiguous [size] int64."""
    for column in columns:
        if column.shape != (size,) or column.dtype != torch.int64 or not column.is_contiguous():
            raise ConfigError(f"{name}: [{size}] int64 is required, not {list(column.shape)} {column.dtype}")


def check_rows(rows: Rows, count: int, heads: AttentionShape, cache: Tensor, dtype: torch.dtype) -> None:
    """Raise ConfigError unless rows [count], their page table and the KV cache fit the kernels."""
    check_columns("positions, slots and kv_index", (rows.positions, rows.slots, rows.kv_index), count)
    table = rows.page_table
    if table.ndim != 2 or table.dtype != torch.int32 or not table.is_contiguous():
        raise ConfigError(f"page_table must be [slots, pages] int32, not {list(table.shape)} {table.dtype}")
    planes = 1 if heads.value_dim else 2
    shape = (planes, cache.shape[1], cache.shape[2], heads.num_kv, row_elements(heads.dim, cache.dtype))
    has_dtype = cache.dtype == dtype or kv_format(cache.dtype) is not None
    if cache.shape != shape or not has_dtype or not cache.is_contiguous():
        raise ConfigError(f"cache must be {list(shape)} {dtype}, not {list(cache.shape)} {cache.dtype}")


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` and at least 1."""
    return triton.next_power_of_2(max(n, 1))
