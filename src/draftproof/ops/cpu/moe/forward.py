"""Mixture of experts on the CPU: the GEMM kernels run over each expert's rows; other experts are not read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.types import ExpertOutputs, ExpertPart, Moe
from draftproof.ops.cpu import elementwise
from draftproof.ops.cpu.argument_checks import is_bf16
from draftproof.ops.cpu.executor import Executor
from draftproof.ops.cpu.gemm.formats import QUANTIZED_FORMATS, PackedLinear, select_gemm
from draftproof.ops.cpu.jit.compile import Kernel
from draftproof.ops.cpu.jit.program import Argument, as_word
from draftproof.ops.cpu.moe import kernels


class SortedRows:
    """Rows sorted by expert, and the calls that run a kernel for each expert over its rows."""

    def __init__(
        self, run: Executor, experts: Tensor, num_experts: int, part: ExpertPart | None = None
    ) -> None:
        """Sort the rows that selected `experts` [R, k] int64; those without an expert of `part` are last."""
        self._run, self.num_experts = run, num_experts
        self.count, self.top_k = experts.shape
        if part is not None:
            local = experts - part.first
            experts = torch.where((local >= 0) & (local < part.count), local, part.count)
            self.num_experts, num_experts = part.count, part.count + 1
        self.offsets = run.new((self.count, -(-(num_experts + 1) // self.count)), torch.int64)  # [E + 1]
        self.sources = run.new((self.count, self.top_k), torch.int64)  # [R k]
        self.places = run.new((self.count, self.top_k), torch.int64)
        outputs = [self.offsets, self.sources, self.places]
        run.call(kernels.sort_rows, self.count, outputs, [experts], [num_experts, self.top_k])

    def new(self, width: int, dtype: torch.dtype) -> Tensor:
        """Allocate sorted rows of `width` elements: [R, k width]."""
        return self._run.new((self.count, self.top_k * width), dtype)

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of x [R, D] in sorted order, [R, k D]."""
        out = self.new(x.shape[1], x.dtype)
        sizes = (x.shape[1] * x.element_size(), self.top_k)
        self._run.call(kernels.gather_rows, self.count, [out], [x, self.sources], sizes)
        return out

    def linear(self, x: Tensor, experts: Sequence[PackedLinear], out_dtype: torch.dtype) -> Tensor:
        """Multiply the sorted rows of each expert by its weight."""
        if len({(packed.format, packed.layout, packed.dtype) for packed in experts}) > 1:
            raise ConfigError("experts of one layer in different weight formats are not supported")
        inputs, out_bf16 = [x], is_bf16(out_dtype)
        if experts[0].dtype is None:
            inputs = self._quantize_rows(x, experts)
            chosen = [QUANTIZED_FORMATS[packed.format].kernel(packed, out_bf16) for packed in experts]
        else:
            chosen = [select_gemm(packed, self.count, out_bf16) for packed in experts]
        out = self.new(experts[0].columns, out_dtype)
        constants = [[p.weight, p.bias, p.columns, p.depth, *p.extra] for p in experts]
        self._each_expert(chosen, [out], inputs, constants)
        return out

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Apply the gated activation to sorted rows [R, k 2 I]: [R, k I]."""
        width = gate_up.shape[1] // self.top_k // 2
        out = self.new(width, gate_up.dtype)
        chosen = [elementwise.ACT_MUL[activation][is_bf16(gate_up.dtype)]] * self.num_experts
        self._each_expert(chosen, [out], [gate_up], [[width]] * self.num_experts)
        return out

    def _quantize_rows(self, x: Tensor, experts: Sequence[PackedLinear]) -> list[Tensor]:
        """Return the sorted rows quantised for their experts, and the scales."""
        forms = [QUANTIZED_FORMATS[packed.format] for packed in experts]
        quantized = self.new(forms[0].row_bytes(experts[0]), torch.int8)
        scales = self.new(forms[0].row_floats(experts[0]), torch.float32)
        chosen = [form.quantize_rows(packed, x.dtype) for form, packed in zip(forms, experts, strict=True)]
        self._each_expert(chosen, [quantized, scales], [x], [[packed.depth] for packed in experts])
        return [quantized, scales]

    def _each_expert(
        self,
        chosen: Sequence[Kernel],  # [E]
        outputs: Sequence[Tensor],  # sorted rows
        inputs: Sequence[Tensor],  # sorted rows
        constants: Sequence[Sequence[Argument]],  # [E]: arguments after the rows
    ) -> None:
        """Run one kernel for each expert over its sorted rows."""
        lines = torch.tensor(
            [
                [each.address, *(as_word(value) for value in own)]
                for each, own in zip(chosen, constants, strict=True)
            ],
            dtype=torch.int64,
        )
        rows = [*outputs, *inputs]
        strides = [tensor.shape[1] // self.top_k * tensor.element_size() for tensor in rows]
        arguments = [*strides, self.num_experts, lines, lines.shape[1] - 1]
        kernel = kernels.make_each_expert(len(rows))
        self._run.call(kernel, self.count, outputs, [*inputs, self.offsets], arguments)


def select_experts(run: Executor, logits: Tensor, moe: Moe) -> tuple[Tensor, Tensor]:
    """Return the experts [R, k] int64 and weights [R, k] fp32 of router logits [R, E] fp32."""
    routing, rows = moe.routing, len(logits)
    experts = run.new((rows, routing.top_k), torch.int64)
    weights = run.new((rows, routing.top_k), torch.float32)
    sizes = (routing.num_experts, routing.top_k, routing.num_groups, routing.top_groups)
    constants = (moe.correction, *sizes, int(routing.normalize), float(routing.scale))
    kernel = kernels.make_route(routing.scoring == "softmax", routing.group_score == "top2_sum")
    run.call(kernel, rows, [experts, weights], [logits], constants)
    return experts, weights


def combine(
    run: Executor,
    dtype: torch.dtype,
    found: ExpertOutputs,
    shared: Tensor | None,  # [R, hidden] fp32
    gate: Tensor | None,  # [R, 1] fp32
) -> Tensor:
    """Return the weighted sum of each row's experts and the shared expert, [R, hidden]."""
    (rows, top_k), width = found.weights.shape, found.values.shape[1]
    places = torch.arange(rows * top_k).view(rows, top_k) if found.places is None else found.places
    outputs, weights = found.values.view(rows, top_k * width), found.weights
    out = run.new((rows, width), dtype)
    optional = [tensor for tensor in (shared, gate) if tensor is not None]
    kernel = kernels.make_combine(is_bf16(dtype), shared is not None, gate is not None)
    run.call(kernel, rows, [out], [outputs, places, weights, *optional], [width, top_k])
    return out
