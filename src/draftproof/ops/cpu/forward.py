"""Forward ops on the CPU: checks, then one or two kernel calls each."""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.types import (
    Attention,
    AttentionShape,
    ExpertOutputs,
    Moe,
    PackedState,
    QuantizedTable,
)
from draftproof.ops.cpu import elementwise
from draftproof.ops.cpu.argument_checks import (
    check_cache,
    check_ints,
    check_norm,
    check_rows,
    check_tensor,
    is_bf16,
)
from draftproof.ops.cpu.attention import driver
from draftproof.ops.cpu.attention import fma as attention_parts
from draftproof.ops.cpu.attention.kv import KV_FORMS
from draftproof.ops.cpu.executor import SINGLE_THREAD_ELEMENTS, Executor
from draftproof.ops.cpu.gemm.formats import (
    QUANTIZED_FORMATS,
    CpuFeatures,
    PackedLinear,
    pack,
    pack_quantized,
    packed_version,
    select_gemm,
)
from draftproof.ops.cpu.gemm.int8 import quantize_columns
from draftproof.ops.cpu.jit.huge_pages import WeightMemory
from draftproof.ops.cpu.jit.program import Argument
from draftproof.ops.cpu.jit.thread_pool import aligned_bytes
from draftproof.ops.cpu.latent import CpuLatent
from draftproof.ops.cpu.moe import forward as mixture
from draftproof.ops.cpu.moe.kernels import widen
from draftproof.types import Rows

WORKSPACE_BYTES = 4 << 20  # for attention whose keys are split between threads


class CpuForward(CpuLatent):
    """Forward ops; every kernel gives a row the same bits whatever the other rows and the thread count."""

    weight_formats: ClassVar[frozenset[str]] = frozenset(QUANTIZED_FORMATS)
    table_formats: ClassVar[frozenset[str]] = frozenset(
        name for name, form in QUANTIZED_FORMATS.items() if form.embed is not None
    )

    def __init__(self, run: Executor, features: CpuFeatures) -> None:
        self._run, self._features = run, features
        self._memory = WeightMemory()
        self.packed_version = packed_version(features)
        # pages of memory are mapped when they are written
        self._workspace = torch.from_numpy(aligned_bytes(WORKSPACE_BYTES)).view(torch.float32)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self._pack(weight, bias, draft=False)

    def pack_draft_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        if weight.dtype == torch.bfloat16 and not self._features.amx_int8:  # half the bytes of bf16
            bias = _checked_bias(weight, bias)
            return self.pack_quantized("w8a8", *quantize_columns(weight.detach()), bias)
        return self._pack(weight, bias, draft=True)

    def _pack(self, weight: Tensor, bias: Tensor | None, draft: bool) -> PackedLinear:
        bias = _checked_bias(weight, bias)
        return pack(weight.detach(), bias, self._features, self._memory.hold, draft)

    def pack_quantized(
        self,
        weight_format: str,
        data: Tensor,
        scales: Tensor | None,
        bias: Tensor | None = None,
        zeros: Tensor | None = None,
    ) -> PackedLinear:
        assert scales is not None
        return pack_quantized(weight_format, data.detach(), scales, bias, zeros, self._memory.hold)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        x = check_tensor("x", x, 2, packed.depth, packed.dtype)
        rows = x.shape[0]
        dtype = out_dtype or x.dtype
        out = self._run.new((rows, packed.columns), dtype)
        sizes = (packed.columns, packed.depth, *packed.extra)
        small = rows * packed.columns * packed.depth < SINGLE_THREAD_ELEMENTS
        inputs = [x]
        if packed.dtype is None:
            inputs = self._quantize_rows(x, packed)
            kernel = QUANTIZED_FORMATS[packed.format].kernel(packed, is_bf16(dtype))
        else:
            kernel = select_gemm(packed, rows, is_bf16(dtype))
        self._run.call(kernel, rows, [out], inputs, [packed.weight, packed.bias, *sizes], small=small)
        return out

    def _quantize_rows(self, x: Tensor, packed: PackedLinear) -> list[Tensor]:
        """Return the rows of x in int8 and their scales."""
        form = QUANTIZED_FORMATS[packed.format]
        quantized = self._run.new((len(x), form.row_bytes(packed)), torch.int8)
        scales = self._run.new((len(x), form.row_floats(packed)), torch.float32)
        kernel, small = form.quantize_rows(packed, x.dtype), x.numel() < SINGLE_THREAD_ELEMENTS
        self._run.call(kernel, len(x), [quantized, scales], [x], [packed.depth], small=small)
        return [quantized, scales]

    def packed_state(self, weight_format: str, data: Tensor, scales: Tensor) -> PackedState:
        packed = pack_quantized(weight_format, data, scales, None, None, hold=lambda tensor: tensor)
        layout = {} if packed.layout is None else asdict(packed.layout)
        values = {"format": packed.format, "depth": packed.depth, "layout": layout}
        return PackedState(packed.weight, packed.columns, values)

    def restore_packed(self, state: PackedState, bias: Tensor | None) -> PackedLinear:
        name, bias = state.values["format"], None if bias is None else bias.float()
        layout = QUANTIZED_FORMATS[name].layout(**state.values["layout"])
        return PackedLinear(
            name, state.weight, bias, state.columns, state.values["depth"], None, layout=layout
        )

    def embed(self, tokens: Tensor, table: Tensor | QuantizedTable) -> Tensor:
        tokens = check_ints("tokens", tokens)
        if isinstance(table, QuantizedTable):
            packed, out = table.packed, self._run.new((tokens.shape[0], table.shape[1]), table.dtype)
            form = QUANTIZED_FORMATS[packed.format]
            make = form.embed
            assert make is not None
            if table.lm_head_dtype is not None and self._run.recorder is not None:  # logits follow the pass
                self._run.later |= {
                    form.kernel(packed, False),
                    form.quantize_rows(packed, table.lm_head_dtype),
                }
            sizes = (packed.weight, packed.columns, packed.depth)
            self._run.call(make(packed, table.dtype), tokens.shape[0], [out], [tokens], sizes, small=True)
            return out
        table = check_tensor("table", table, 2)
        vocab, width = table.shape
        out = self._run.new((tokens.shape[0], width), table.dtype)
        sizes = (table, width * table.element_size(), vocab)
        self._run.call(elementwise.embed, tokens.shape[0], [out], [tokens], sizes, small=True)
        return out

    def concat_columns(self, left: Tensor, right: Tensor) -> Tensor:
        left = check_tensor("left", left, 2)
        right = check_tensor("right", right, 2, dtype=left.dtype)
        if left.shape[0] != right.shape[0]:
            raise ValueError(f"{left.shape[0]} rows beside {right.shape[0]}")
        rows, widths = left.shape[0], [part.shape[1] * part.element_size() for part in (left, right)]
        out = self._run.new((rows, left.shape[1] + right.shape[1]), left.dtype)
        small = out.numel() < SINGLE_THREAD_ELEMENTS
        self._run.call(elementwise.concat_columns, rows, [out], [left, right], widths, small=small)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, width = check_tensor("x", x, 2), len(weight)
        if width and x.shape[1] % width:
            raise ValueError(f"rows of {x.shape[1]} are not made of vectors of {width}")
        weight = check_norm(weight, x, width)
        out = self._run.new(tuple(x.shape), weight.dtype)
        kernel = elementwise.RMS_NORM[is_bf16(x.dtype), is_bf16(weight.dtype)]
        sizes = (weight, width, x.shape[1] // width, float(eps))
        self._run.call(kernel, x.shape[0], [out], [x], sizes, small=x.numel() < SINGLE_THREAD_ELEMENTS)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = check_tensor("x", x, 2)
        residual = check_tensor("residual", residual, 2, x.shape[1])
        weight = check_tensor("weight", check_norm(weight, residual, x.shape[1]), 1, dtype=x.dtype)
        if residual.shape != x.shape:
            raise ValueError(f"residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
        out, total = self._run.new(tuple(x.shape), x.dtype), self._run.new(tuple(x.shape), residual.dtype)
        kernel = elementwise.ADD_RMS_NORM[is_bf16(residual.dtype), is_bf16(x.dtype)]
        sizes = (weight, x.shape[1], float(eps))
        small = x.numel() < SINGLE_THREAD_ELEMENTS
        self._run.call(kernel, x.shape[0], [out, total], [x, residual], sizes, small=small)
        return out, total

    def act_mul(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        gate_up = check_tensor("gate_up", gate_up, 2)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if gate_up.shape[1] != 2 * width:
            raise ValueError(f"gate_up has an odd width: {gate_up.shape[1]}")
        out = self._run.new((rows, width), gate_up.dtype)
        kernel = elementwise.ACT_MUL[activation][is_bf16(gate_up.dtype)]
        self._run.call(kernel, rows, [out], [gate_up], [width], small=out.numel() < SINGLE_THREAD_ELEMENTS)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        x = check_tensor("x", x, 2)
        residual = check_tensor("residual", residual, 2, x.shape[1], x.dtype)
        if residual.shape != x.shape:
            raise ValueError(f"residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
        out, kernel = self._run.new(tuple(x.shape), x.dtype), elementwise.ADD[is_bf16(x.dtype)]
        small = x.numel() < SINGLE_THREAD_ELEMENTS
        self._run.call(kernel, x.shape[0], [out], [x, residual], [x.shape[1]], small=small)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        x = check_tensor("x", x, 2)
        out, kernel = self._run.new(tuple(x.shape), x.dtype), elementwise.SCALE[is_bf16(x.dtype)]
        sizes, small = (x.shape[1], float(factor)), x.numel() < SINGLE_THREAD_ELEMENTS
        self._run.call(kernel, x.shape[0], [out], [x], sizes, small=small)
        return out

    def row_norms(self, qkv: Tensor, attention: Attention, eps: float) -> Tensor:
        widths = [n * attention.heads.dim for n in (attention.heads.num_q, attention.heads.num_kv)]
        qkv = check_tensor("qkv", qkv, 2, widths[0] + 2 * widths[1])
        assert attention.q_row_norm is not None and attention.k_row_norm is not None
        weights = (attention.q_row_norm, attention.k_row_norm)
        for weight, width in zip(weights, widths, strict=True):
            check_tensor("norm", weight, 1, width, qkv.dtype)
        out, kernel = self._run.new(tuple(qkv.shape), qkv.dtype), elementwise.ROW_NORMS[is_bf16(qkv.dtype)]
        constants, small = (*weights, *widths, float(eps)), qkv.numel() < SINGLE_THREAD_ELEMENTS
        self._run.call(kernel, qkv.shape[0], [out], [qkv], constants, small=small)
        return out

    def expert_outputs(self, x: Tensor, moe: Moe) -> ExpertOutputs:
        x = check_tensor("x", x, 2, moe.gate_up[0].depth, moe.gate_up[0].dtype)
        experts, weights = mixture.select_experts(self._run, self.router_logits(x, moe.router), moe)
        sorted_rows = mixture.SortedRows(self._run, experts, moe.routing.num_experts, moe.part)
        gate_up = sorted_rows.linear(sorted_rows.gather(x), moe.gate_up, x.dtype)
        outputs = sorted_rows.linear(sorted_rows.act_mul(gate_up, moe.activation), moe.down, torch.float32)
        return ExpertOutputs(outputs.view(experts.numel(), -1), experts, weights, sorted_rows.places)

    def combine_experts(
        self, found: ExpertOutputs, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return mixture.combine(self._run, dtype, found, shared, gate)

    def router_logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if x.dtype == torch.float32:
            return self.linear(x, packed)
        wide = self._run.new(tuple(x.shape), torch.float32)
        self._run.call(widen, len(x), [wide], [x], [x.shape[1]])
        return self.linear(wide, packed)

    def rope_store(
        self, qkv: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        heads = attention.heads
        qkv = check_tensor("qkv", qkv, 2, (heads.num_q + 2 * heads.num_kv) * heads.dim)
        rope = check_tensor("rope", rope, 2, heads.dim, torch.float32)
        check_cache(cache, heads, qkv.dtype)
        for norm in (attention.q_norm, attention.k_norm):
            if norm is not None:
                check_tensor("norm", norm, 1, heads.dim, qkv.dtype)
        count = qkv.shape[0]
        positions, kv_index = check_rows(rows, count, "positions", "kv_index")
        q = self._run.new((count, heads.num_q * heads.dim), qkv.dtype)
        places = cache.shape[1] * cache.shape[2]
        sizes = (heads.num_q, heads.num_kv, heads.dim, rope.shape[0], cache.shape[2], places)
        constants = (rope, cache, attention.q_norm, attention.k_norm, *sizes, float(eps))
        kernel = elementwise.ROPE_STORE[KV_FORMS[cache.dtype]][is_bf16(qkv.dtype)]
        small = qkv.numel() < SINGLE_THREAD_ELEMENTS
        self._run.call(kernel, count, [q], [qkv, positions, kv_index], constants, small=small)
        return q

    def attention(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        q = check_tensor("q", q, 2, heads.num_q * heads.dim)
        check_cache(cache, heads, q.dtype)
        table = rows.page_table
        if table.dtype != torch.int32 or table.dim() != 2 or not table.is_contiguous():
            raise ValueError("page_table must be a contiguous int32 [slots, max_pages]")
        positions, slots = check_rows(rows, q.shape[0], "positions", "slots")
        out = self._run.new((q.shape[0], heads.num_q * heads.out_dim), q.dtype)
        constants: list[Argument] = [table, cache, self._workspace, WORKSPACE_BYTES]
        constants += [heads.num_q, heads.num_kv, heads.dim, heads.window, *table.shape, *cache.shape[1:3]]
        if sinks is not None:
            check_tensor("sinks", sinks, 1, heads.num_q, torch.float32)
        constants += [float(heads.scale), heads.out_dim, cache[-1], sinks]
        bf16 = is_bf16(q.dtype)
        # the tiles read keys and values of one width
        amx = self._features.amx and not heads.value_dim
        kernels = driver.select_attention(bf16, KV_FORMS[cache.dtype], amx, heads.dim, cache.shape[2])
        scratch = attention_parts.scratch_bytes(heads.num_q // heads.num_kv, heads.dim)
        self._run.call(kernels, q.shape[0], [out], [q, positions, slots], constants, scratch)
        return out


def _checked_bias(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return a copy of the bias in the dtype of the weight, or raise if it does not fit."""
    check_tensor("weight", weight, 2)
    if bias is None:
        return None
    if bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    return bias.detach().to(weight.dtype).clone().contiguous()
