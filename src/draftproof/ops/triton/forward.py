"""Forward ops on the GPU: checks, kernel selection, launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.kv_layout import kv_format
from draftproof.ops.contract.types import Attention, AttentionShape, Layer
from draftproof.ops.triton import elementwise, kernel_utils
from draftproof.ops.triton import rope as rope_kernels
from draftproof.ops.triton.attention import prefill, splitkv
from draftproof.ops.triton.fused import layers as fused_kernel
from draftproof.ops.triton.fused_dense.launcher import FusedDenseLayers
from draftproof.ops.triton.fused_moe.launcher import FusedMoeLayers
from draftproof.ops.triton.gemm import dense, fused
from draftproof.ops.triton.gemm.autotune import create_tuner
from draftproof.ops.triton.gemm.cublas import Cublas, Mode
from draftproof.ops.triton.gemm.select import WEIGHT_FORMATS, Epilogue, GemmSelector, supports_fused
from draftproof.ops.triton.gemm.tile_cache import initial_tiles
from draftproof.ops.triton.gemm.tiles import TileTable
from draftproof.ops.triton.gemm.weight import PackedLinear, check_input, pack, pack_quantized
from draftproof.ops.triton.kernel_utils import FP32, INTS, LaunchContext, check_rows
from draftproof.ops.triton.latent.attention import check_shared_memory, latent_attention
from draftproof.ops.triton.latent.forward import TritonLatent
from draftproof.ops.triton.moe.forward import TritonMoe
from draftproof.ops.triton.moe.op import MixtureOfExperts
from draftproof.ops.triton.quantized import gemm as quantized
from draftproof.ops.triton.quantized.row_quantization import QuantizedRows, norm_quantize, prepare_rows
from draftproof.types import Rows

FP8_CAPABILITY = (8, 9)  # compute capability from which the tensor core multiplies e4m3


class TritonForward(TritonLatent, TritonMoe):
    """Forward ops.

    `cublas`: where cuBLAS may be used; see `gemm/cublas`.
    `one_launch`: run all layers in one kernel where one supports them: few rows of a small model, one row of
    another dense model or of a mixture of experts.
    """

    fused_rows_limit: ClassVar[int] = 96
    gather_last_layer_from_rows: ClassVar[int] = 1024
    weight_formats: ClassVar[frozenset[str]] = WEIGHT_FORMATS
    int4_format: ClassVar[str] = "w4a16"
    norms_round_sums: ClassVar[bool] = True

    def __init__(self, launch: LaunchContext, cublas: Mode, one_launch: bool) -> None:
        self._launch, self.one_launch, chip = launch, one_launch, launch.chip
        measured = initial_tiles(chip.name, chip.capability) if launch.cuda else {}
        self.tiles = TileTable(measured, chip.shared_per_program)
        self.gemm = dense.Gemm(self.tiles)
        self.cublas = Cublas(self.gemm, cublas)
        self.selector = GemmSelector(self.gemm, self.cublas)
        self.tuner = create_tuner(launch, self.gemm)
        self.mixture = MixtureOfExperts(launch, self.tiles)
        self._partials = splitkv.PartialBuffers(launch.device)
        has_wgmma = chip.capability == (9, 0)
        self._splitkv = splitkv.SplitKVAttention(
            self._partials, chip.shared_per_program, chip.num_sms if has_wgmma else 0
        )
        self._prefill = prefill.PrefillAttention(launch.pdl, has_wgmma, chip.num_sms, self._partials)
        self._fused_layers = fused_kernel.FusedLayersKernel(launch.device, chip)
        self._fused_moe = FusedMoeLayers(launch)
        self._fused_dense = FusedDenseLayers(launch)

    def begin_pass(self, rows: Rows) -> None:
        self._prefill.worklists.begin(rows)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return pack(weight, bias)

    def pack_quantized(
        self, weight_format: str, data: Tensor, scales: Tensor | None, bias: Tensor | None = None,
        zeros: Tensor | None = None,
    ) -> PackedLinear:  # fmt: skip
        assert scales is not None
        if (
            weight_format.startswith("fp8")
            and self._launch.cuda
            and self._launch.chip.capability < FP8_CAPABILITY
        ):
            raise ConfigError(f"{self._launch.chip.name} has no fp8 instructions: use quantization='int8'")
        return pack_quantized(weight_format, data, scales, bias, zeros)

    def linear(
        self, x: Tensor | QuantizedRows, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        x, dtype = check_input(x, packed, out_dtype)
        out = self._launch.empty((len(x), packed.columns), dtype)
        self.selector.linear(x, packed, out, self._launch.early(x))
        return out

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        tokens, table = kernel_utils.vector("tokens", tokens, None, INTS), kernel_utils.matrix("table", table)
        return elementwise.embed(tokens, table, self._launch.early(tokens))

    def vocab_places(self, tokens: Tensor, num_rows: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        tokens = kernel_utils.vector("tokens", tokens, None, INTS)
        early = self._launch.early(tokens)
        return elementwise.vocab_places(tokens, num_rows, rank * num_rows, num_ranks, early)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = kernel_utils.matrix("x", x)
        width = len(weight) if x.shape[1] % len(weight) == 0 else x.shape[1]
        weight = kernel_utils.vector("weight", weight, width, (x.dtype,))
        vectors = x.view(-1, width)
        return elementwise.rms_norm(vectors, weight, eps, self._launch.early(vectors)).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._add_rms_norm(x, None, residual, weight, eps)

    def _add_rms_norm(
        self, x: Tensor, output_norm: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Compute `add_rms_norm` of x, normed before with `output_norm` if it is not None."""
        residual = kernel_utils.matrix("residual", residual)
        x = kernel_utils.matrix("x", x, residual.shape[1], (residual.dtype, torch.float32))
        weight = kernel_utils.vector("weight", weight, x.shape[1], (residual.dtype,))
        if output_norm is not None:
            output_norm = kernel_utils.vector("output_norm", output_norm, x.shape[1], (residual.dtype,))
        if len(residual) != len(x):
            raise ConfigError(f"x has {len(x)} rows, residual {len(residual)}")
        return elementwise.add_rms_norm(x, output_norm, residual, weight, eps, self._launch.early(x))

    def rms_norm_input(
        self, x: Tensor, weight: Tensor, eps: float, reader: PackedLinear
    ) -> Tensor | QuantizedRows:
        if reader.format is None or not reader.quantizes_rows:
            return self.rms_norm(x, weight, eps)
        x = kernel_utils.matrix("x", x)
        weight = kernel_utils.vector("weight", weight, x.shape[1], (x.dtype,))
        return norm_quantize(x, None, weight, eps, reader.format, self._launch.early(x))[0]

    def add_rms_norm_input(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: PackedLinear | None = None
    ) -> tuple[Tensor | QuantizedRows, Tensor]:
        if reader is None or reader.format is None or not reader.quantizes_rows:
            return self.add_rms_norm(x, residual, weight, eps)
        x = kernel_utils.matrix("x", x.to(residual.dtype))
        residual = kernel_utils.matrix("residual", residual, x.shape[1], (x.dtype,))
        weight = kernel_utils.vector("weight", weight, x.shape[1], (x.dtype,))
        return norm_quantize(x, residual, weight, eps, reader.format, self._launch.early(x))

    def norm_add_rms_norm(
        self, x: Tensor, output_norm: Tensor, residual: Tensor, weight: Tensor, eps: float,
        reader: PackedLinear | None = None,
    ) -> tuple[Tensor | QuantizedRows, Tensor]:  # fmt: skip
        if reader is not None and reader.quantizes_rows:
            return super().norm_add_rms_norm(x, output_norm, residual, weight, eps, reader)
        return self._add_rms_norm(x, output_norm, residual, weight, eps)

    def act_mul(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        gate_up = kernel_utils.matrix("gate_up", gate_up)
        if gate_up.shape[1] % 2:
            raise ConfigError(f"gate_up must have an even number of columns, not {gate_up.shape[1]}")
        return elementwise.act_mul(gate_up, activation, self._launch.early(gate_up))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        x = kernel_utils.matrix("x", x)
        residual = kernel_utils.matrix("residual", residual, x.shape[1], (x.dtype,))
        if len(residual) != len(x):
            raise ConfigError(f"x has {len(x)} rows, residual {len(residual)}")
        return elementwise.add(x, residual, self._launch.early(x))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        x = kernel_utils.matrix("x", x)
        return elementwise.scale(x, factor, self._launch.early(x))

    def row_norms(self, qkv: Tensor, attention: Attention, eps: float) -> Tensor:
        heads, kind = attention.heads, (qkv.dtype,)
        qkv = kernel_utils.matrix("qkv", qkv, (heads.num_q + 2 * heads.num_kv) * heads.dim)
        assert attention.q_row_norm is not None and attention.k_row_norm is not None
        q_norm = kernel_utils.vector("q_norm", attention.q_row_norm, heads.num_q * heads.dim, kind)
        k_norm = kernel_utils.vector("k_norm", attention.k_row_norm, heads.num_kv * heads.dim, kind)
        return elementwise.row_norms(qkv, q_norm, k_norm, eps, self._launch.early(qkv))

    def rope_store(
        self, qkv: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        heads = attention.heads
        qkv = kernel_utils.matrix("qkv", qkv, (heads.num_q + 2 * heads.num_kv) * heads.dim)
        rope = kernel_utils.matrix("rope", rope, heads.dim, FP32)
        check_rows(rows, len(qkv), heads, cache, qkv.dtype)
        return rope_kernels.rope_store(qkv, rows, attention, rope, cache, eps, self._launch.early(qkv))

    def linear_rope_store(
        self, x: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        packed, heads, epilogue = attention.qkv, attention.heads, Epilogue.ROPE_STORE
        run_separate = partial(super().linear_rope_store, x, rows, attention, rope, cache, eps)
        norms = (attention.q_norm, attention.k_norm, attention.q_row_norm)
        needs_heads = any(norm is not None for norm in norms)
        needs_heads |= kv_format(cache.dtype) is not None  # a scale is that of a whole head
        if needs_heads or not supports_fused(packed, len(x), epilogue, heads.dim):
            return run_separate()
        x, dtype = check_input(x, packed, None)
        rope = kernel_utils.matrix("rope", rope, heads.dim, FP32)
        check_rows(rows, len(x), heads, cache, dtype)
        if packed.columns != (heads.num_q + 2 * heads.num_kv) * heads.dim:
            raise ConfigError(f"a weight of {packed.columns} columns for {heads}")
        out = self._launch.empty((len(x), heads.num_q * heads.dim), dtype)
        pdl, tile = self._launch.early(x), self.tiles.select("fused", len(x), packed)
        launch = fused.linear_rope_store
        if packed.format is not None:
            inputs = prepare_rows(x, packed, pdl)
            return quantized.linear_rope_store(inputs, packed, rows, heads, rope, cache, out, pdl, tile)
        run_fused = partial(launch, x, packed, rows, heads, rope, cache, out, pdl, tile)
        return self.selector.run_epilogue(packed, x, epilogue, heads.dim, run_fused, run_separate, pdl)

    def linear_act_mul(self, x: Tensor, packed: PackedLinear, activation: str = "silu") -> Tensor:
        run_separate, epilogue = partial(super().linear_act_mul, x, packed, activation), Epilogue.ACT_MUL
        if not supports_fused(packed, len(x), epilogue):
            return run_separate()
        x, dtype = check_input(x, packed, None)
        out = self._launch.empty((len(x), packed.columns // 2), dtype)
        pdl, tile = self._launch.early(x), self.tiles.select("fused", len(x), packed)
        if packed.format is not None:
            inputs = prepare_rows(x, packed, pdl)
            return quantized.linear_act_mul(inputs, packed, out, pdl, tile, activation)
        run_fused = partial(fused.linear_act_mul, x, packed, out, pdl, tile, activation)
        return self.selector.run_epilogue(packed, x, epilogue, 0, run_fused, run_separate, pdl)

    def check_kv_dtype(self, dtype: torch.dtype) -> None:
        if dtype == torch.float8_e4m3fn and self._launch.cuda and self._launch.chip.capability < (8, 9):
            raise ConfigError(
                "kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or newer: use 'int8' on "
                f"{self._launch.chip.name}"
            )

    def attention(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        q = kernel_utils.matrix("q", q, heads.num_q * heads.dim)
        check_rows(rows, len(q), heads, cache, q.dtype)
        out = self._launch.empty((len(q), heads.num_q * heads.out_dim), q.dtype)
        if len(q):
            self.attention_into(q, rows, heads, cache, out, sinks)
        return out

    def attention_into(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Store the result of `attention` to `out`, which may be fp32."""
        if heads.value_dim:
            check_shared_memory(q.dtype, heads, self._launch.chip)
            latent_attention(q, rows, heads, cache, out, self._partials, self._launch.early(q))
            return
        table, page_size = rows.page_table, cache.shape[2]
        num_parallel = self._splitkv.num_parallel_spans(len(q), heads, table, page_size, q.dtype)
        splits = num_parallel > 1 and not self._prefill.chunk_spans(len(q), heads, table, page_size)
        if sinks is not None:
            sinks = kernel_utils.vector("sinks", sinks, heads.num_q, FP32)
        run = self._splitkv if splits else self._prefill
        run(q, rows, heads, cache, out, self._launch.early(q), sinks)

    def fused_layers(
        self, residual: Tensor, layers: Sequence[Layer], rows: Rows, ropes: Sequence[Tensor],
        caches: Sequence[Tensor], eps: float, taps: Sequence[int], embedding: Tensor | None,
    ) -> tuple[Tensor, ...] | None:  # fmt: skip
        """Run all layers in one launch if a fused kernel supports them; see `FusedLayers`."""
        residual = kernel_utils.matrix("residual", residual)
        runs = self.one_launch and all(kv_format(cache.dtype) is None for cache in caches)
        kernels = (self._fused_moe, self._fused_dense, self._fused_layers)
        kernel = next((each for each in kernels if runs and each.supports(residual, layers)), None)
        if kernel is None:
            return None
        for layer, cache, rope in zip(layers, caches, ropes, strict=True):
            if kernel_utils.matrix("rope", rope, layer.attention.heads.dim, FP32) is not rope:
                return None  # the separate ops copy a table that is not aligned
            check_rows(rows, len(residual), layer.attention.heads, cache, residual.dtype)
        tapped = kernel(residual, layers, rows, ropes, caches, eps, taps, embedding)
        return None if tapped is None else (residual, *tapped.unbind(1))

    def embed_norm_concat(
        self, tokens: Tensor, table: Tensor, token_norm: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> Tensor:
        residual, table = kernel_utils.matrix("residual", residual), kernel_utils.matrix("embedding", table)
        width, kind = residual.shape[1], (residual.dtype,)
        norms = [kernel_utils.vector("norm", weight, width, kind) for weight in (token_norm, norm)]
        tokens = kernel_utils.vector("tokens", tokens, len(residual), INTS)
        return elementwise.joined_norms(tokens, table, residual, *norms, eps, self._launch.early(residual))
