"""The CPU backend: native kernels on a thread team, at home on AVX-512 and AMX, correct anywhere.

Every kernel gives a row the same bits whatever the other rows, the thread count and the place of the
row. Two GEMM kernels exist for bf16 (AMX tiles, fused multiply-add); a machine uses one of them for
every row count. Compiled by numba at first use, then read from its disk cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import AttentionShape, Forward, Rows

try:
    from llvmlite import binding

    from draftproof.ops.cpu import elementwise, sampling
    from draftproof.ops.cpu.attention import driver
    from draftproof.ops.cpu.attention import fma as attention_parts
    from draftproof.ops.cpu.gemm import amx as gemm_amx
    from draftproof.ops.cpu.gemm import fma as gemm_fma
    from draftproof.ops.cpu.gemm import int8 as gemm_int8
    from draftproof.ops.cpu.jit import amx as amx_tiles
    from draftproof.ops.cpu.jit.captured import Captured
    from draftproof.ops.cpu.jit.compile import Kernel
    from draftproof.ops.cpu.jit.huge_pages import WeightMemory
    from draftproof.ops.cpu.jit.program import Argument, Recorder, as_word
    from draftproof.ops.cpu.jit.thread_pool import WIDTH, Team
    from draftproof.ops.cpu.step import CpuBookkeeping
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("numba", "llvmlite"):
        raise
    raise ImportError("the cpu backend needs numba: install draftproof[cpu]") from error

import numpy as np

WORKSPACE = 4 << 20  # bytes for attention whose keys are shared out among threads
SMALL = 4096  # elements below which waking the team costs more than it saves


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed weight [columns, depth] and the kernels that read it; another format is another pair."""

    kernels: Sequence[Kernel]  # for fp32 and for bf16 output
    weight: Tensor
    bias: Tensor | None
    columns: int
    depth: int
    dtype: torch.dtype
    extra: tuple[Argument, ...] = ()  # further arguments of the kernels


class CpuOps(CpuBookkeeping):
    """See the contract. `threads` defaults to torch's number; `amx=False` takes the other kernel."""

    name = "cpu"
    default_rows = 256  # activations of more rows leave the cache: 512 took twice as long as 2 x 256

    def __init__(
        self,
        device: torch.device,
        threads: int | None = None,
        amx: bool | None = None,
        numerics: str = "exact",  # nothing here is quicker: "fast" is the same
    ) -> None:
        super().__init__(device, numerics)
        if device.type != "cpu":
            raise ConfigError(f"the cpu backend cannot run on {device}")
        self.team = Team(torch.get_num_threads() if threads is None else threads)
        # asking whether tiles may be used is also what makes the kernel allow them
        self.amx = amx is not False and amx_tiles.available()
        if amx and not self.amx:
            raise ConfigError("this machine has no AMX with bf16")
        # registers decide how many rows share a pass; bits do not depend on it
        self._at_once = 4 if binding.get_host_cpu_features().get("avx512f") else 1
        self._memory = WeightMemory()
        self._workspace = torch.zeros(WORKSPACE // 4, dtype=torch.float32)
        self.recorder: Recorder | None = None

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Torch on one thread: its OpenMP workers spin after every region, on the cores of our team."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    # --- calls ------------------------------------------------------------------------------------

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.recorder is not None:
            return self.recorder.output(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def _call(
        self,
        kernels: Kernel | Sequence[Kernel],
        rows: int,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        constants: Sequence[Argument],
        scratch: int = 0,
        small: bool = False,
    ) -> None:
        """Run or record kernels that take the same words: outputs, inputs, constants."""
        several = [kernels] if isinstance(kernels, Kernel) else kernels
        if self.recorder is not None:
            for each in several:
                self.recorder.call(each.address, outputs, inputs, constants, scratch)
            return
        if rows == 0:
            return
        words = [as_word(value) for value in (*outputs, *inputs, *constants)]
        table = np.zeros((len(several), WIDTH), dtype=np.int64)
        for line, each in zip(table, several, strict=True):
            line[0] = each.address
            line[1 : len(words) + 1] = words
        self.team.run(table, rows, scratch, alone=small)

    # --- forward pass -----------------------------------------------------------------------------

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        bias = _checked_bias(weight, bias)
        (columns, depth), dtype = weight.shape, weight.dtype
        bf16 = dtype == torch.bfloat16
        if bf16 and self.amx:
            packed = self._memory.hold(gemm_amx.pack_tiles(weight.detach()))
            return PackedLinear(gemm_amx.LINEAR_AMX, packed, bias, columns, depth, dtype)
        packed = self._memory.hold(gemm_fma.pack_panels(weight.detach()))
        return PackedLinear(gemm_fma.LINEAR[bf16], packed, bias, columns, depth, dtype, (self._at_once,))

    def pack_draft_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        if not self.amx or weight.dtype != torch.bfloat16 or not amx_tiles.takes_bytes():
            return self.pack_linear(weight, bias)
        bias = _checked_bias(weight, bias)
        packed, scales = gemm_int8.pack_bytes(weight.detach())
        kernels, held = gemm_int8.LINEAR_BYTES, self._memory.hold(packed)
        return PackedLinear(kernels, held, bias, *weight.shape, weight.dtype, (scales,))

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        x = _check("x", x, 2, packed.depth, packed.dtype)
        rows = x.shape[0]
        dtype = out_dtype or x.dtype
        out = self._new((rows, packed.columns), dtype)
        kernel = packed.kernels[_is_bf16(dtype)]
        sizes = (packed.columns, packed.depth, *packed.extra)
        small = rows * packed.columns * packed.depth < SMALL
        self._call(kernel, rows, [out], [x], [packed.weight, packed.bias, *sizes], small=small)
        return out

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        tokens, table = _ints("tokens", tokens), _check("table", table, 2)
        vocab, width = table.shape
        out = self._new((tokens.shape[0], width), table.dtype)
        sizes = (table, width * table.element_size(), vocab)
        self._call(elementwise.embed, tokens.shape[0], [out], [tokens], sizes, small=True)
        return out

    def concat_columns(self, left: Tensor, right: Tensor) -> Tensor:
        left = _check("left", left, 2)
        right = _check("right", right, 2, dtype=left.dtype)
        if left.shape[0] != right.shape[0]:
            raise ValueError(f"{left.shape[0]} rows beside {right.shape[0]}")
        rows, widths = left.shape[0], [part.shape[1] * part.element_size() for part in (left, right)]
        out = self._new((rows, left.shape[1] + right.shape[1]), left.dtype)
        self._call(elementwise.concat_columns, rows, [out], [left, right], widths, small=out.numel() < SMALL)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _check("x", x, 2)
        weight = _check("weight", weight, 1, x.shape[1], x.dtype)
        out = self._new(tuple(x.shape), x.dtype)
        kernel = elementwise.RMS_NORM[_is_bf16(x.dtype)]
        sizes = (weight, x.shape[1], float(eps))
        self._call(kernel, x.shape[0], [out], [x], sizes, small=x.numel() < SMALL)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = _check("x", x, 2)
        residual = _check("residual", residual, 2, x.shape[1], x.dtype)
        weight = _check("weight", weight, 1, x.shape[1], x.dtype)
        if residual.shape != x.shape:
            raise ValueError(f"residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
        out, total = self._new(tuple(x.shape), x.dtype), self._new(tuple(x.shape), x.dtype)
        kernel = elementwise.ADD_RMS_NORM[_is_bf16(x.dtype)]
        sizes = (weight, x.shape[1], float(eps))
        small = x.numel() < SMALL
        self._call(kernel, x.shape[0], [out, total], [x, residual], sizes, small=small)
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = _check("gate_up", gate_up, 2)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if gate_up.shape[1] != 2 * width:
            raise ValueError(f"gate_up has an odd width: {gate_up.shape[1]}")
        out = self._new((rows, width), gate_up.dtype)
        kernel = elementwise.SILU_MUL[_is_bf16(gate_up.dtype)]
        self._call(kernel, rows, [out], [gate_up], [width], small=out.numel() < SMALL)
        return out

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
        width = (heads.num_q + 2 * heads.num_kv) * heads.dim
        qkv = _check("qkv", qkv, 2, width)
        rope = _check("rope", rope, 2, heads.dim, torch.float32)
        _check_cache(cache, heads, qkv.dtype)
        for norm in (q_norm, k_norm):
            if norm is not None:
                _check("norm", norm, 1, heads.dim, qkv.dtype)
        count = qkv.shape[0]
        positions, kv_index = _row_ints(rows, count, "positions", "kv_index")
        q = self._new((count, heads.num_q * heads.dim), qkv.dtype)
        sizes = (heads.num_q, heads.num_kv, heads.dim, rope.shape[0], cache[0, :, :, 0, 0].numel())
        constants = (rope, cache, q_norm, k_norm, *sizes, float(eps))
        kernel = elementwise.ROPE_STORE[_is_bf16(qkv.dtype)]
        small = qkv.numel() < SMALL
        self._call(kernel, count, [q], [qkv, positions, kv_index], constants, small=small)
        return q

    def attention(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor) -> Tensor:
        q = _check("q", q, 2, heads.num_q * heads.dim)
        _check_cache(cache, heads, q.dtype)
        table = rows.page_table
        if table.dtype != torch.int32 or table.dim() != 2 or not table.is_contiguous():
            raise ValueError("page_table must be a contiguous int32 [slots, max_pages]")
        positions, slots = _row_ints(rows, q.shape[0], "positions", "slots")
        out = self._new(tuple(q.shape), q.dtype)
        constants: list[Argument] = [table, cache, self._workspace, WORKSPACE]
        constants += [heads.num_q, heads.num_kv, heads.dim, heads.window, table.shape[0]]
        constants += [table.shape[1], cache.shape[1], cache.shape[2], self._at_once]
        constants.append(float(heads.scale))
        bf16 = _is_bf16(q.dtype)
        attend = driver.ATTENTION_AMX if self.amx else driver.ATTENTION
        kernels = [attend[bf16], driver.ATTENTION_MERGE[bf16]]
        scratch = attention_parts.scratch_bytes(heads.num_q // heads.num_kv, heads.dim)
        self._call(kernels, q.shape[0], [out], [q, positions, slots], constants, scratch)
        return out

    def capture(self, forward: Forward, max_rows: int) -> Forward:
        return Captured(self, forward, max_rows)

    # --- sampling ---------------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        logits, rows, vocab = _logits(logits)
        out = torch.empty(rows, dtype=torch.int64)
        self._call(sampling.argmax, rows, [out], [logits], [vocab], small=rows == 1)
        return out

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        scaled, rows, vocab = _logits(scaled)
        keys = [_ints("seeds", seeds, rows), _ints("positions", positions, rows)]
        out = torch.empty(rows, dtype=torch.int64)
        sizes = (vocab, stream)
        self._call(sampling.gumbel_argmax, rows, [out], [scaled, *keys], sizes, small=rows == 1)
        return out

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        seeds = _ints("seeds", seeds)
        rows = seeds.shape[0]
        out = torch.empty(rows, dtype=torch.float64)
        inputs = [seeds, _ints("positions", positions, rows)]
        self._call(sampling.uniform, rows, [out], inputs, [stream], small=True)
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        logits, rows, vocab = _logits(logits)
        out = torch.empty(rows, dtype=torch.float32)
        self._call(sampling.logsumexp, rows, [out], [logits], [vocab], small=rows == 1)
        return out

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        logits, rows, vocab = _logits(logits)
        out = torch.empty(rows, dtype=torch.int64)
        inputs = [logits, _ints("ids", ids, rows)]
        self._call(sampling.rank, rows, [out], inputs, [vocab], small=rows == 1)
        return out

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logits, rows, vocab = _logits(logits)
        if not 0 <= k <= vocab:
            raise ValueError(f"top {k} of {vocab}")
        values = torch.empty(rows, k, dtype=torch.float32)
        ids = torch.empty(rows, k, dtype=torch.int64)
        if k:
            scratch = sampling.scratch_bytes(vocab)
            outputs = [values, ids]
            self._call(sampling.top, rows, outputs, [logits], [vocab, k], scratch, rows == 1)
        return values, ids

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        scaled, rows, vocab = _logits(scaled)
        limits = [_ints("top_k", top_k, rows), _doubles(top_p, rows), _doubles(min_p, rows)]
        out = torch.empty_like(scaled)
        scratch = sampling.scratch_bytes(vocab)
        inputs = [scaled, *limits]
        self._call(sampling.truncate, rows, [out], inputs, [vocab], scratch, rows == 1)
        return out


def _is_bf16(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the cpu backend computes in float32 or bfloat16, not {dtype}")
    return dtype == torch.bfloat16


def _check(
    name: str, x: Tensor, dims: int, width: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x, contiguous, after a look at everything that a kernel takes for granted."""
    _is_bf16(x.dtype)
    if x.dim() != dims or (width is not None and x.shape[-1] != width) or x.device.type != "cpu":
        wanted = f"{dims} dimensions" + ("" if width is None else f", the last of {width}")
        raise ValueError(f"{name} is {tuple(x.shape)} on {x.device}; wanted {wanted}, on the cpu")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}; wanted {dtype}")
    return x.contiguous()


def _ints(name: str, x: Tensor, rows: int | None = None) -> Tensor:
    if x.dim() != 1 or (rows is not None and x.shape[0] != rows) or x.device.type != "cpu":
        raise ValueError(f"{name} is {tuple(x.shape)} on {x.device}; wanted [{rows}] on the cpu")
    return x.to(torch.int64).contiguous()


def _row_ints(rows: Rows, count: int, *names: str) -> list[Tensor]:
    return [_ints(name, getattr(rows, name), count) for name in names]


def _doubles(x: Tensor, rows: int) -> Tensor:
    if x.shape != (rows,):
        raise ValueError(f"a limit is {tuple(x.shape)}; wanted [{rows}]")
    return x.to(torch.float64).contiguous()


def _checked_bias(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    _check("weight", weight, 2)
    bias = None if bias is None else bias.detach().to(weight.dtype).clone().contiguous()
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    return bias


def _check_cache(cache: Tensor, heads: AttentionShape, dtype: torch.dtype) -> None:
    if cache.dim() != 5 or cache.shape[0] != 2 or cache.shape[3:] != (heads.num_kv, heads.dim):
        raise ValueError(f"cache is {tuple(cache.shape)}; wanted [2, pages, page_size, kv, dim]")
    if cache.dtype != dtype or not cache.is_contiguous() or cache.numel() == 0:
        raise ValueError(f"cache must be contiguous and {dtype}")
    if heads.num_q % heads.num_kv or heads.dim % 2:
        raise ValueError(f"{heads} does not divide evenly")


def _logits(x: Tensor) -> tuple[Tensor, int, int]:
    if x.dim() != 2 or x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[1] == 0:
        raise ValueError(f"logits are {tuple(x.shape)} {x.dtype} on {x.device}; wanted fp32 [R, V]")
    return x.contiguous(), x.shape[0], x.shape[1]
