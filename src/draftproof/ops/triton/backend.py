"""The CUDA backend: Triton kernels whose bits for a row do not depend on the rest of the batch.

Compute capability 8.0 or newer. Every op is a launch or two without a host sync, so a forward pass can be
captured into a CUDA graph. With TRITON_INTERPRET=1 in the environment the kernels run on the CPU, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import AttentionShape, FusedLayers, Layer, Rows
from draftproof.ops.triton.draft_rounds import DraftOps
from draftproof.ops.triton.graphs import Queued

try:
    import triton  # noqa: F401

    from draftproof.ops.triton import elementwise, rope, runtime
    from draftproof.ops.triton.attention import prefill
    from draftproof.ops.triton.attention import splitkv as attention_kernels
    from draftproof.ops.triton.compile_ahead import compile_ahead
    from draftproof.ops.triton.fused import layers as fused_layers
    from draftproof.ops.triton.gemm import dense, fused
    from draftproof.ops.triton.gemm.cublas import Cublas, Mode
    from draftproof.ops.triton.sampling import kernels, topk
    from draftproof.ops.triton.sampling import top_p as top_p_kernels

    MISSING = ""
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "triton":
        raise
    MISSING = str(error)

EARLY = 256  # rows; with more of them a kernel that waits takes room from the one it waits for
INTS = (torch.int64,)
FP32 = (torch.float32,)


class TritonOps(DraftOps, Queued):
    """See the contract. `debug` waits after every op, so that a launch that fails is named by its op.

    `pdl` launches kernels of the forward pass early where rows are few (programmatic dependent launch,
    Hopper and newer).
    `cublas` says where cuBLAS may serve, see there; by default where its bits are proven to be ours, or,
    with numerics="fast", where it was measured to be quicker.
    `one_launch`: all layers in one kernel, where it takes them (few rows of a small model).
    """

    name: ClassVar[str] = "triton"
    default_seqs: ClassVar[int] = 256
    default_rows: ClassVar[int] = 8192
    fused_rows_limit: ClassVar[int] = 96
    gather_last_layer_from_rows: ClassVar[int] = 1024

    def __init__(
        self,
        device: torch.device,
        debug: bool | None = None,
        pdl: bool = True,
        cublas: Mode | None = None,
        numerics: str = "exact",
        one_launch: bool = True,
    ) -> None:
        if MISSING:
            raise ConfigError(f"cannot load the triton backend: {MISSING}")
        runtime.check_device(device)
        super().__init__(device, numerics)
        self.debug = os.environ.get("DRAFTPROOF_DEBUG", "0") == "1" if debug is None else debug
        self.cuda = not runtime.INTERPRETED
        self.pdl = pdl and self.cuda and torch.cuda.get_device_capability(device) >= (9, 0)
        self.gemm = dense.Gemm(device)
        mode: Mode = cublas or ("fast" if numerics == "fast" else "proven")
        self.cublas = Cublas(self.gemm, mode if self.cuda else "never")
        self._partials = attention_kernels.Partials(device)
        self._attention = attention_kernels.Attention(self._partials)
        self._blocks, self.one_launch = fused_layers.Blocks(device), one_launch
        self._walk = prefill.Walk(self.pdl, self._partials)
        self.open_drafts()
        self.open_queue()

    def free_memory(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0] if self.cuda else None

    def _early(self, x: Tensor) -> bool:
        """Whether kernels on these rows are launched early."""
        return self.pdl and len(x) <= EARLY

    def compile(self, functions: Sequence[Callable[[], object]], tick: Callable[[int, int], None]) -> None:
        if self.cuda:
            compile_ahead(functions, tick)

    def _done(self, op: str) -> None:
        if self.debug and self.cuda and not torch.cuda.is_current_stream_capturing():
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                raise RuntimeError(f"the device failed in or before {op}: {error}") from error

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    # --- forward pass -----------------------------------------------------------------------------

    def begin_pass(self, rows: Rows) -> None:
        self._walk.lists.begin(rows)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> dense.PackedLinear:
        return dense.pack(weight, bias)

    def linear(self, x: Tensor, packed: dense.PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        x, dtype = dense.check(x, packed, out_dtype)
        out = self._new((len(x), packed.weight.shape[0]), dtype)
        done = self.cublas.leading_rows(x, packed, out, self._early(x))
        if done < len(x):
            self.gemm(x[done:], packed, out[done:], self._early(x))
        self._done("linear")
        return out

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        tokens, table = runtime.vector("tokens", tokens, None, INTS), runtime.matrix("table", table)
        out = self._new((len(tokens), table.shape[1]), table.dtype)
        if len(tokens):
            elementwise.embed(tokens, table, out, self._early(tokens))
        self._done("embed")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = runtime.matrix("x", x)
        weight = runtime.vector("weight", weight, x.shape[1], (x.dtype,))
        out = torch.empty_like(x)
        if len(x):
            elementwise.rms_norm(x, weight, out, eps, self._early(x))
        self._done("rms_norm")
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = runtime.matrix("x", x)
        residual = runtime.matrix("residual", residual, x.shape[1], (x.dtype,))
        weight = runtime.vector("weight", weight, x.shape[1], (x.dtype,))
        if len(residual) != len(x):
            raise ConfigError(f"x has {len(x)} rows, residual {len(residual)}")
        out, total = torch.empty_like(x), torch.empty_like(x)
        if len(x):
            elementwise.add_rms_norm(x, residual, weight, out, total, eps, self._early(x))
        self._done("add_rms_norm")
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = runtime.matrix("gate_up", gate_up)
        if gate_up.shape[1] % 2:
            raise ConfigError(f"gate_up must have an even number of columns, not {gate_up.shape[1]}")
        out = self._new((len(gate_up), gate_up.shape[1] // 2), gate_up.dtype)
        if len(out):
            elementwise.silu_mul(gate_up, out, self._early(out))
        self._done("silu_mul")
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
        self,
        qkv: Tensor,
        rows: Rows,
        heads: AttentionShape,
        rope: Tensor,
        cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        qkv = runtime.matrix("qkv", qkv, (heads.num_q + 2 * heads.num_kv) * heads.dim)
        rope = runtime.matrix("rope", rope, heads.dim, FP32)
        self._check_rows(rows, len(qkv), heads, cache, qkv.dtype)
        out = self._new((len(qkv), heads.num_q * heads.dim), qkv.dtype)
        if len(qkv):
            rope_store_of(qkv, rows, heads, rope, cache, q_norm, k_norm, eps, out, self._early(qkv))
        self._done("rope_store")
        return out

    def _two_steps(
        self, x: Tensor, packed: dense.PackedLinear, one: Callable[[], Any], two: Callable[[], Any]
    ) -> bool:
        """Whether cuBLAS and a second kernel are quicker than one kernel of ours."""
        if self.cublas.mode == "fast" and packed.bias is None:
            key = ("pair", packed.weight.shape, len(x))
            return self.cublas.second_is_quicker(key, one, two, self._early(x))
        return (len(x) > dense.FEW or self.cublas.mode == "always") and self.cublas.whole(x, packed) != ""

    def linear_rope_store(
        self,
        x: Tensor,
        packed: dense.PackedLinear,
        rows: Rows,
        heads: AttentionShape,
        rope: Tensor,
        cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        two = super().linear_rope_store
        norms = (q_norm, k_norm, eps)
        if not fused.takes_heads(packed, len(x), heads) or q_norm is not None or k_norm is not None:
            return two(x, packed, rows, heads, rope, cache, *norms)
        x, _ = dense.check(x, packed, None)
        rope = runtime.matrix("rope", rope, heads.dim, FP32)
        self._check_rows(rows, len(x), heads, cache, x.dtype)
        if len(packed.weight) != (heads.num_q + 2 * heads.num_kv) * heads.dim:
            raise ConfigError(f"a weight of {len(packed.weight)} columns for {heads}")
        out = self._new((len(x), heads.num_q * heads.dim), x.dtype)

        def one() -> None:
            fused.linear_rope_store(x, packed, rows, heads, rope, cache, out, self._early(x))

        if self._two_steps(x, packed, one, lambda: two(x, packed, rows, heads, rope, cache, *norms)):
            return two(x, packed, rows, heads, rope, cache, *norms)
        one()
        self._done("linear_rope_store")
        return out

    def linear_silu_mul(self, x: Tensor, packed: dense.PackedLinear) -> Tensor:
        columns, two = len(packed.weight), super().linear_silu_mul
        if not fused.takes(packed, len(x)) or columns % 2:
            return two(x, packed)
        x, _ = dense.check(x, packed, None)
        out = self._new((len(x), columns // 2), x.dtype)

        def one() -> None:
            fused.linear_silu_mul(x, packed, out, self._early(x))

        if self._two_steps(x, packed, one, lambda: two(x, packed)):
            return two(x, packed)
        one()
        self._done("linear_silu_mul")
        return out

    def attention(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor) -> Tensor:
        q = runtime.matrix("q", q, heads.num_q * heads.dim)
        self._check_rows(rows, len(q), heads, cache, q.dtype)
        out = torch.empty_like(q)
        if len(q):
            self.attend(q, rows, heads, cache, out)
        self._done("attention")
        return out

    def attend(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor) -> None:
        """`attention` into `out`, which may be fp32."""
        size = len(q), heads, rows.page_table, cache.shape[2]
        few = self._attention.abreast(*size) > 1 and not self._walk.chunk(*size)
        (self._attention if few else self._walk)(q, rows, heads, cache, out, self._early(q))

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
        if not self.one_launch or not self._blocks.takes(residual, layers):
            return None
        for layer, cache in zip(layers, caches, strict=True):
            self._check_rows(rows, len(residual), layer.attention.heads, cache, residual.dtype)
        tapped = self._blocks(residual, layers, rows, rope, caches, eps, taps, embedding)
        if tapped is None:
            return None
        self._done("fused_layers")
        return residual, *tapped.unbind(1)

    # --- sampling ---------------------------------------------------------------------------------

    def _rows(self, logits: Tensor, *columns: Tensor) -> Any:
        """logits [R, V] fp32 and int64 columns [R], ready for a kernel."""
        logits = runtime.matrix("logits", logits, None, FP32)
        return logits, *(runtime.vector("ids, seeds or positions", c, len(logits), INTS) for c in columns)

    def argmax(self, logits: Tensor) -> Tensor:
        (logits,) = self._rows(logits)
        out = kernels.argmax(logits) if len(logits) else self._new((0,), torch.int64)
        self._done("argmax")
        return out

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        scaled, seeds, positions = self._rows(scaled, seeds, positions)
        found = len(scaled)
        out = (
            kernels.gumbel_argmax(scaled, seeds, positions, stream) if found else self._new((0,), torch.int64)
        )
        self._done("gumbel_argmax")
        return out

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        seeds = runtime.vector("seeds", seeds, None, INTS)
        positions = runtime.vector("positions", positions, len(seeds), INTS)
        out = kernels.uniform(seeds, positions, stream) if len(seeds) else self._new((0,), torch.float64)
        self._done("uniform")
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        (logits,) = self._rows(logits)
        out = kernels.logsumexp(logits) if len(logits) else self._new((0,), torch.float32)
        self._done("logsumexp")
        return out

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        logits, ids = self._rows(logits, ids)
        out = kernels.rank(logits, ids) if len(logits) else self._new((0,), torch.int64)
        self._done("rank")
        return out

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        (logits,) = self._rows(logits)
        if not 1 <= k <= logits.shape[1]:
            raise ConfigError(f"top {k} of {logits.shape[1]}")
        if len(logits):
            values, ids = topk.top(logits, k)
        else:
            values, ids = self._new((0, k), torch.float32), self._new((0, k), torch.int64)
        self._done("top")
        return values, ids

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        (scaled,) = self._rows(scaled)
        top_k = runtime.vector("top_k", top_k, len(scaled), (torch.int64, torch.int32))
        top_p = runtime.vector("top_p", top_p, len(scaled), (torch.float32, torch.float64))
        min_p = runtime.vector("min_p", min_p, len(scaled), (torch.float32, torch.float64))
        out = top_p_kernels.truncate(scaled, top_k, top_p, min_p) if len(scaled) else torch.empty_like(scaled)
        self._done("truncate")
        return out


def rope_store_of(*arguments: Any) -> None:
    """`rope.rope_store`; the method's parameter `rope` hides the module."""
    rope.rope_store(*arguments)
