"""What every kernel file shares: where we run, what a launch needs, and checks at op entry.

Checks read shapes, dtypes, strides and addresses only, all of which the host knows: none of them waits
for the device. A tensor at an odd address is copied first, because the compiler picks its vector width,
and with it the tree of a reduction, by alignment: the same row must never meet two trees.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.errors import ConfigError

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
ALIGNMENT = 16  # bytes
FLOATS = (torch.float32, torch.bfloat16)


@triton.jit
def begin(PDL: tl.constexpr):
    """First statement of a kernel that is launched early: let the next one start, wait for the last one.

    With programmatic dependent launch a kernel may be on the chip before the one it depends on has
    ended. Nothing is read or written before this.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ended(k, PDL: tl.constexpr):
    """True, but not before the last kernel has ended: a load that is masked by it waits, others need not.

    Pure to the compiler, so that a loop with it is pipelined, and a function of the loop's `k`, so that it
    stays inside: what a turn does before it is issued before it.
    """
    zero = k * 0
    if PDL:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0; // $1", "=r,r", [k], dtype=tl.int32, is_pure=True, pack=1
        )
    return zero == 0


@triton.jit
def prefetch(at):
    """Asks for the L2 lines at these addresses; a hint, so it may stand before the wait of `begin`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def begin_with_weight(w, rn, N, K, ask, LINES: tl.constexpr, PDL: tl.constexpr):
    """`begin`; if `ask`, the weight's rows rn [BN] are on their way while the last kernel still runs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:  # noqa: SIM102 - a constant, then a value on the device
            if ask:
                WIDE: tl.constexpr = 128 // (w.dtype.element_ty.primitive_bitwidth // 8)
                line = tl.minimum(tl.arange(0, LINES) * WIDE, K - 1)
                prefetch(w + tl.minimum(rn, N - 1).to(tl.int64)[:, None] * K + line[None, :])
        tl.extra.cuda.gdc_wait()


def launch_options(pdl: bool, **options: Any) -> dict[str, Any]:
    """Keyword arguments of a launch; `launch_pdl` is named only where it is used."""
    return {**options, "PDL": True, "launch_pdl": True} if pdl else {**options, "PDL": False}


def check_device(device: torch.device) -> None:
    """ConfigError unless this backend can run on `device`."""
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
    """`x` as a contiguous aligned matrix [R, width] of one of `dtypes`, or a ConfigError."""
    if x.ndim != 2 or (width is not None and x.shape[1] != width):
        raise ConfigError(f"{name} must be [rows, {width or 'columns'}], not {list(x.shape)}")
    return _usable(name, x, dtypes)


def vector(name: str, x: Tensor, size: int | None, dtypes: tuple) -> Tensor:
    """`x` as a contiguous vector [size]."""
    if x.ndim != 1 or (size is not None and x.shape[0] != size):
        raise ConfigError(f"{name} must be [{'rows' if size is None else size}], not {list(x.shape)}")
    return _usable(name, x, dtypes)


def _usable(name: str, x: Tensor, dtypes: tuple) -> Tensor:
    if x.dtype not in dtypes:
        raise ConfigError(f"{name} must be {' or '.join(map(str, dtypes))}, not {x.dtype}")
    if not INTERPRETED and x.device.type != "cuda":
        raise ConfigError(f"{name} is on {x.device}; this backend wants it on the GPU")
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def power_of_two(n: int) -> int:
    return triton.next_power_of_2(max(n, 1))
