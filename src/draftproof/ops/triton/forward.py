"""Forward ops on the GPU: checks, kernel selection, launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import Attention, AttentionShape, FusedLayers, Layer
from draftproof.ops.triton import elementwise, runtime
from draftproof.ops.triton import rope as rope_kernels
from draftproof.ops.triton.attention import prefill, splitkv
from draftproof.ops.triton.fused import layers as fused_kernel
from draftproof.ops.triton.gemm import dense, fused
from draftproof.ops.triton.gemm.autotune import TileTuner, is_tuning_enabled
from draftproof.ops.triton.gemm.cublas import Cublas, Mode
from draftproof.ops.triton.gemm.select import Epilogue, GemmPath, GemmSelector, supports_fused
from draftproof.ops.triton.gemm.tile_cache import cache_file, initial_tiles, save_tiles
from draftproof.ops.triton.gemm.tiles import Tile, TileKey, TileTable
from draftproof.ops.triton.gemm.timing import graph_milliseconds
from draftproof.ops.triton.gemm.weight import PackedLinear, check_input, pack
from draftproof.ops.triton.launch import FP32, INTS, LaunchContext
from draftproof.types import Rows


class TritonForward(ForwardOps):
    """Forward ops.

    `cublas`: where cuBLAS may be used; see `gemm/cublas`.
    `one_launch`: run all layers in one kernel where it supports them (few rows of a small model).
    """

    fused_rows_limit: ClassVar[int] = 96
    gather_last_layer_from_rows: ClassVar[int] = 1024

    def __init__(self, launch: LaunchContext, cublas: Mode, one_launch: bool) -> None:
        self._launch, self.one_launch = launch, one_launch
        self.tiles = TileTable(
            initial_tiles(launch.chip.name, launch.chip.capability) if launch.cuda else None
        )
        self.gemm = dense.Gemm(launch.device, self.tiles)
        self.cublas = Cublas(self.gemm, cublas)
        self.selector = GemmSelector(self.gemm, self.cublas)
        self._partials = splitkv.PartialBuffers(launch.device)
        self._splitkv = splitkv.SplitKVAttention(self._partials)
        self._prefill = prefill.PrefillAttention(launch.pdl, self._partials)
        self._fused_layers = fused_kernel.FusedLayersKernel(launch.device, launch.chip)
        self._tuning_buffers: dict[tuple[int, int], Tensor] = {}
        self.tuner: TileTuner | None = None
        if launch.cuda and is_tuning_enabled():
            self.tuner = TileTuner(self.tiles, self._tuning_call, graph_milliseconds, self._save_tiles)

    def begin_pass(self, rows: Rows) -> None:
        self._prefill.worklists.begin(rows)

    def _tuning_call(self, key: TileKey, packed: PackedLinear, rows: int, tile: Tile) -> Callable[[], None]:
        """Return a launch of a GEMM kernel with `tile`, for the tuner."""
        columns = key.columns if key.variant == "dense" else key.columns // 2
        for width in (key.depth, columns):  # all calls share the buffers: memory may be short
            if (rows, width) not in self._tuning_buffers:
                buffer = torch.randn((rows, width), device=self._launch.device).to(packed.weight.dtype)
                self._tuning_buffers[rows, width] = buffer
        x, out = self._tuning_buffers[rows, key.depth], self._tuning_buffers[rows, columns]
        if key.depth == columns:
            out = torch.empty_like(x)
        pdl = self._launch.early(x)
        if key.variant == "dense":
            return lambda: self.gemm(x, packed, out, pdl, tile)
        return lambda: fused.linear_silu_mul(x, packed, out, pdl, tile)

    def _save_tiles(self, tiles: dict[TileKey, Tile]) -> None:
        """Add measured tiles to the cache file of this chip and free the buffers of the measurement."""
        self._tuning_buffers.clear()
        save_tiles(cache_file(self._launch.chip.name), self._launch.chip.name, tiles)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return pack(weight, bias)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        x, dtype = check_input(x, packed, out_dtype)
        out = self._launch.empty((len(x), packed.weight.shape[0]), dtype)
        self.selector.linear(x, packed, out, self._launch.early(x))
        self._launch.done("linear")
        return out

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        tokens, table = runtime.vector("tokens", tokens, None, INTS), runtime.matrix("table", table)
        out = self._launch.empty((len(tokens), table.shape[1]), table.dtype)
        if len(tokens):
            elementwise.embed(tokens, table, out, self._launch.early(tokens))
        self._launch.done("embed")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = runtime.matrix("x", x)
        weight = runtime.vector("weight", weight, x.shape[1], (x.dtype,))
        out = torch.empty_like(x)
        if len(x):
            elementwise.rms_norm(x, weight, out, eps, self._launch.early(x))
        self._launch.done("rms_norm")
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = runtime.matrix("x", x)
        residual = runtime.matrix("residual", residual, x.shape[1], (x.dtype,))
        weight = runtime.vector("weight", weight, x.shape[1], (x.dtype,))
        if len(residual) != len(x):
            raise ConfigError(f"x has {len(x)} rows, residual {len(residual)}")
        out, total = torch.empty_like(x), torch.empty_like(x)
        if len(x):
            elementwise.add_rms_norm(x, residual, weight, out, total, eps, self._launch.early(x))
        self._launch.done("add_rms_norm")
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = runtime.matrix("gate_up", gate_up)
        if gate_up.shape[1] % 2:
            raise ConfigError(f"gate_up must have an even number of columns, not {gate_up.shape[1]}")
        out = self._launch.empty((len(gate_up), gate_up.shape[1] // 2), gate_up.dtype)
        if len(out):
            elementwise.silu_mul(gate_up, out, self._launch.early(out))
        self._launch.done("silu_mul")
        return out

    def _check_rows(
        self, rows: Rows, count: int, heads: AttentionShape, cache: Tensor, dtype: torch.dtype
    ) -> None:
        for name in ("positions", "slots", "kv_index"):
            column = getattr(rows, name)
            if column.shape != (count,) or column.dtype != torch.int64 or not column.is_contiguous():
                raise ConfigError(
                    f"rows.{name} must be [{count}] int64, not {list(column.shape)} {column.dtype}"
                )
        table = rows.page_table
        if table.ndim != 2 or table.dtype != torch.int32 or not table.is_contiguous():
            raise ConfigError(
                f"page_table must be [slots, pages] int32, not {list(table.shape)} {table.dtype}"
            )
        shape = (2, cache.shape[1], cache.shape[2], heads.num_kv, heads.dim)
        if cache.shape != shape or cache.dtype != dtype or not cache.is_contiguous():
            raise ConfigError(f"cache must be {list(shape)} {dtype}, not {list(cache.shape)} {cache.dtype}")

    def rope_store(
        self, qkv: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        heads, norms = attention.heads, (attention.q_norm, attention.k_norm)
        qkv = runtime.matrix("qkv", qkv, (heads.num_q + 2 * heads.num_kv) * heads.dim)
        rope = runtime.matrix("rope", rope, heads.dim, FP32)
        self._check_rows(rows, len(qkv), heads, cache, qkv.dtype)
        out = self._launch.empty((len(qkv), heads.num_q * heads.dim), qkv.dtype)
        if len(qkv):
            rope_kernels.rope_store(qkv, rows, heads, rope, cache, *norms, eps, out, self._launch.early(qkv))
        self._launch.done("rope_store")
        return out

    def linear_rope_store(
        self, x: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        separate, packed, heads = super().linear_rope_store, attention.qkv, attention.heads
        epilogue = Epilogue.ROPE_STORE
        has_norms = attention.q_norm is not None or attention.k_norm is not None
        if has_norms or not supports_fused(packed, len(x), epilogue, heads.dim):
            return separate(x, rows, attention, rope, cache, eps)
        x, _ = check_input(x, packed, None)
        rope = runtime.matrix("rope", rope, heads.dim, FP32)
        self._check_rows(rows, len(x), heads, cache, x.dtype)
        if len(packed.weight) != (heads.num_q + 2 * heads.num_kv) * heads.dim:
            raise ConfigError(f"a weight of {len(packed.weight)} columns for {heads}")
        out = self._launch.empty((len(x), heads.num_q * heads.dim), x.dtype)

        pdl, tile = self._launch.early(x), self.tiles.select("fused", len(x), packed)

        def run_fused() -> None:
            fused.linear_rope_store(x, packed, rows, heads, rope, cache, out, pdl, tile)

        def run_separate() -> Tensor:
            return separate(x, rows, attention, rope, cache, eps)

        path = self.selector.select_gemm(packed, x, epilogue, heads.dim, run_fused, run_separate, pdl)
        if path is GemmPath.CUBLAS:
            return run_separate()
        run_fused()
        self._launch.done("linear_rope_store")
        return out

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        separate = super().linear_silu_mul
        if not supports_fused(packed, len(x), Epilogue.SILU_MUL):
            return separate(x, packed)
        x, _ = check_input(x, packed, None)
        out = self._launch.empty((len(x), len(packed.weight) // 2), x.dtype)
        pdl, tile = self._launch.early(x), self.tiles.select("fused", len(x), packed)

        def run_fused() -> None:
            fused.linear_silu_mul(x, packed, out, pdl, tile)

        def run_separate() -> Tensor:
            return separate(x, packed)

        path = self.selector.select_gemm(
            packed, x, Epilogue.SILU_MUL, 0, run_fused=run_fused, run_separate=run_separate, pdl=pdl
        )
        if path is GemmPath.CUBLAS:
            return run_separate()
        run_fused()
        self._launch.done("linear_silu_mul")
        return out

    def attention(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor) -> Tensor:
        q = runtime.matrix("q", q, heads.num_q * heads.dim)
        self._check_rows(rows, len(q), heads, cache, q.dtype)
        out = torch.empty_like(q)
        if len(q):
            self.attention_into(q, rows, heads, cache, out)
        self._launch.done("attention")
        return out

    def attention_into(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor
    ) -> None:
        """Store the result of `attention` to `out`, which may be fp32."""
        size = len(q), heads, rows.page_table, cache.shape[2]
        splits = self._splitkv.num_parallel_spans(*size) > 1 and not self._prefill.chunk_spans(*size)
        (self._splitkv if splits else self._prefill)(q, rows, heads, cache, out, self._launch.early(q))

    @property
    def fused_layers(self) -> FusedLayers:
        return self._run_fused_layers

    def _run_fused_layers(
        self,
        residual: Tensor,
        layers: Sequence[Layer],
        rows: Rows,
        rope: Tensor,
        caches: Sequence[Tensor],
        eps: float,
        taps: Sequence[int],
        embedding: Tensor | None,
    ) -> tuple[Tensor, ...] | None:
        """Run all layers in one launch if the fused kernel supports them; see `FusedLayers`."""
        residual = runtime.matrix("residual", residual)
        rope = runtime.matrix("rope", rope, None, FP32)
        if not self.one_launch or not self._fused_layers.supports(residual, layers):
            return None
        for layer, cache in zip(layers, caches, strict=True):
            self._check_rows(rows, len(residual), layer.attention.heads, cache, residual.dtype)
        tapped = self._fused_layers(residual, layers, rows, rope, caches, eps, taps, embedding)
        if tapped is None:
            return None
        self._launch.done("fused_layers")
        return residual, *tapped.unbind(1)

    def embed_norm_concat(
        self,
        tokens: Tensor,
        table: Tensor,
        token_norm: Tensor,
        residual: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        if not len(residual):
            return super().embed_norm_concat(tokens, table, token_norm, residual, norm, eps)
        residual, table = runtime.matrix("residual", residual), runtime.matrix("embedding", table)
        wide, kind = residual.shape[1], (residual.dtype,)
        norms = [runtime.vector("norm", weight, wide, kind) for weight in (token_norm, norm)]
        tokens = runtime.vector("tokens", tokens, len(residual), INTS)
        out = torch.empty((len(residual), 2 * wide), dtype=residual.dtype, device=residual.device)
        elementwise.joined_norms(tokens, table, residual, *norms, out, eps, self._launch.early(residual))
        self._launch.done("embed_norm_concat")
        return out
