"""Selection of the kernel of a GEMM by weight format, rows and epilogue.

This module alone decides between the Triton kernels (dense, fused with an epilogue) and cuBLAS, and lists
the weight formats that each kernel reads. A kernel that is not listed for a format never reads such a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.triton.gemm import dense, fused
from draftproof.ops.triton.gemm.cublas import Cublas
from draftproof.ops.triton.gemm.tiles import QUANTIZED_TILES
from draftproof.ops.triton.gemm.weight import PackedLinear, WeightKind
from draftproof.ops.triton.quantized import gemm as quantized
from draftproof.ops.triton.quantized.row_quantization import QuantizedRows, prepare_rows


class Epilogue(Enum):
    """Op that a kernel fuses with the GEMM."""

    NONE = "none"
    ACT_MUL = "act_mul"
    ROPE_STORE = "rope_store"
    SAMPLE = "sample"  # norm before, sampling after: `lm_head_sample`
    LAYERS = "layers"  # all layers in one kernel: `fused/layers`


class GemmPath(Enum):
    """Kernel that computes a GEMM."""

    TRITON = "triton"  # dense kernel
    TRITON_FUSED = "triton_fused"
    CUBLAS = "cublas"  # all rows; an epilogue is a separate op


MAX_QUANTIZED_ROWS = 1 << 30  # a quantised weight has no library kernel to compare with
MAX_FUSED_ONLY_ROWS = 64  # up to it a fused kernel is not compared with cuBLAS
# Formats that the kernels of an epilogue read.
KINDS: dict[Epilogue, frozenset[WeightKind]] = {
    Epilogue.NONE: frozenset({WeightKind.BF16, WeightKind.FP32, WeightKind.QUANTIZED}),
    Epilogue.ACT_MUL: frozenset({WeightKind.BF16, WeightKind.QUANTIZED}),
    Epilogue.ROPE_STORE: frozenset({WeightKind.BF16, WeightKind.QUANTIZED}),
    Epilogue.SAMPLE: frozenset({WeightKind.BF16}),
    Epilogue.LAYERS: frozenset({WeightKind.BF16}),
}


WEIGHT_FORMATS = frozenset(QUANTIZED_TILES)  # quantised formats that the kernels read


def supports_fused(packed: PackedLinear, rows: int, epilogue: Epilogue, head_dim: int = 0) -> bool:
    """Return whether one kernel computes the GEMM together with `epilogue`."""
    if packed.kind not in KINDS[epilogue]:
        return False
    max_rows = fused.MAX_ROWS if packed.format is None else MAX_QUANTIZED_ROWS
    if epilogue is Epilogue.ACT_MUL:
        return 0 < rows <= max_rows and packed.columns % 2 == 0
    if epilogue is Epilogue.ROPE_STORE:
        return 0 < rows <= max_rows and head_dim % 32 == 0
    if epilogue is Epilogue.SAMPLE:
        return packed.bias is None
    return True


class GemmSelector:
    """Selection for one backend: its dense kernel and its cuBLAS mode."""

    def __init__(self, gemm: dense.Gemm, cublas: Cublas) -> None:
        self.gemm, self.cublas = gemm, cublas

    def select_gemm(
        self, packed: PackedLinear, x: Tensor, epilogue: Epilogue = Epilogue.NONE, head_dim: int = 0,
        run_fused: Callable[[], Any] | None = None, run_separate: Callable[[], Any] | None = None,
        pdl: bool = False,
    ) -> GemmPath:  # fmt: skip
        """Return the path for the rows x [M, K].

        In cuBLAS mode "fast" the paths of an epilogue, `run_fused` and `run_separate`, are measured.
        """
        rows, cublas = len(x), self.cublas
        if packed.format is not None:
            return (
                GemmPath.TRITON_FUSED if supports_fused(packed, rows, epilogue, head_dim) else GemmPath.TRITON
            )
        if packed.kind not in KINDS[Epilogue.NONE]:
            raise ConfigError(f"no GEMM kernel reads a weight of format {packed.kind}")
        if epilogue is Epilogue.NONE or not supports_fused(packed, rows, epilogue, head_dim):
            return GemmPath.TRITON
        if cublas.mode == "fast" and packed.bias is None and run_fused and run_separate:
            key = ("fused", packed.weight.shape, rows)
            faster = cublas.is_second_faster(key, run_fused, run_separate, pdl)
            return GemmPath.CUBLAS if faster else GemmPath.TRITON_FUSED
        if rows > MAX_FUSED_ONLY_ROWS or cublas.mode == "always":
            return GemmPath.CUBLAS if cublas.call_for_all_rows(x, packed) else GemmPath.TRITON_FUSED
        return GemmPath.TRITON_FUSED

    def run_epilogue(
        self, packed: PackedLinear, x: Tensor, epilogue: Epilogue, head_dim: int,
        run_fused: Callable[[], Tensor], run_separate: Callable[[], Tensor], pdl: bool,
    ) -> Tensor:  # fmt: skip
        """Return the result of the selected path."""
        path = self.select_gemm(packed, x, epilogue, head_dim, run_fused, run_separate, pdl)
        return run_separate() if path is GemmPath.CUBLAS else run_fused()

    def linear(self, x: Tensor | QuantizedRows, packed: PackedLinear, out: Tensor, pdl: bool) -> None:
        """Compute out [M, N] = x [M, K] times the weight: leading rows by cuBLAS, the others by Triton."""
        if packed.format is not None or isinstance(x, QuantizedRows):
            if len(x):
                tile = self.gemm.tiles.select("dense", len(x), packed)
                quantized.linear(prepare_rows(x, packed, pdl, tile), packed, out, pdl, tile)
            return
        self.select_gemm(packed, x)
        done = self.cublas.leading_rows(x, packed, out, pdl)
        if done < len(x):
            self.gemm(x[done:], packed, out[done:], pdl)
