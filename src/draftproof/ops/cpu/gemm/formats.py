"""Weight formats of the CPU backend: one file per format, selected by name and machine.

A format packs a weight and provides the kernels that multiply by it. To add a format, write a file with a
`WeightFormat` and add it to `FORMATS`, or for quantised weights a `QuantizedFormat` and `QUANTIZED_FORMATS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from llvmlite import binding
from torch import Tensor

from draftproof.ops.cpu.gemm import amx, blocks, decoded, fma, int8, w8a8
from draftproof.ops.cpu.gemm.weight_format import CpuFeatures as CpuFeatures
from draftproof.ops.cpu.gemm.weight_format import PackedLinear as PackedLinear
from draftproof.ops.cpu.gemm.weight_format import QuantizedFormat, WeightFormat
from draftproof.ops.cpu.jit.compile import Kernel

# in order of preference; the first format that supports the weight is used
FORMATS: dict[str, WeightFormat] = {"int8_amx": int8.FORMAT, "bf16_amx": amx.FORMAT, "fma": fma.FORMAT}
# formats of checkpoints that are multiplied without being dequantised
QUANTIZED_FORMATS: dict[str, QuantizedFormat] = {
    "w8a8": w8a8.FORMAT,
    "blocks": blocks.FORMAT,
    **decoded.FORMATS,
}


def pack(
    weight: Tensor,
    bias: Tensor | None,
    features: CpuFeatures,
    hold: Callable[[Tensor], Tensor],  # copies packed data to weight memory
    draft: bool,  # the weight belongs to a draft model, so lower precision is allowed
) -> PackedLinear:
    """Pack a weight [N, K] in the first format that supports it on this machine."""
    for name, form in FORMATS.items():
        if (draft or not form.draft_only) and form.supports(weight.dtype, features):
            data, extra = form.pack(weight, features)
            return PackedLinear(name, hold(data), bias, *weight.shape, weight.dtype, extra)
    raise ValueError(f"no weight format for {weight.dtype}")


def pack_quantized(
    name: str,
    data: Tensor,  # [N, ...]
    scales: Tensor,
    bias: Tensor | None,
    zeros: Tensor | None,
    hold: Callable[[Tensor], Tensor],  # copies packed data to weight memory
) -> PackedLinear:
    """Pack a quantised weight."""
    bias = None if bias is None else bias.detach().float().clone().contiguous()
    made = QUANTIZED_FORMATS[name].pack(data, scales, zeros)
    sizes = len(data), made.depth
    return PackedLinear(name, hold(made.weight), bias, *sizes, None, made.extra, made.layout)


@cache
def packed_version(features: CpuFeatures) -> str:
    """Return the identity of packed weights: the sources of the packing code, and this machine."""
    digest = hashlib.sha256(repr((features, binding.get_host_cpu_name())).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def select_gemm(packed: PackedLinear, rows: int, out_bf16: bool) -> Kernel:
    """Return the kernel for a packed weight and a number of rows.

    Every format has one kernel for all row counts, so that a row's bits do not depend on them.
    """
    assert packed.dtype is not None
    return FORMATS[packed.format].kernel(packed.dtype, out_bf16)
