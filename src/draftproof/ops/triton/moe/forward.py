"""Ops of a mixture of experts; `TritonForward` adds the others."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import ExpertOutputs, Moe
from draftproof.ops.triton import kernel_utils
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import LaunchContext
from draftproof.ops.triton.moe.combine import combine, combine_add_norm
from draftproof.ops.triton.moe.op import MixtureOfExperts, PackedRouter, pack_router


class TritonMoe(ForwardOps):
    """Forward ops of a mixture of experts."""

    stacks_experts: ClassVar[bool] = True
    mixture: MixtureOfExperts
    _launch: LaunchContext

    def pack_router(self, weight: Tensor, bias: Tensor | None = None) -> PackedRouter:
        return pack_router(weight, bias)

    def router_logits(self, x: Tensor, packed: PackedRouter) -> Tensor:
        router = packed.in_dtype(x.dtype)
        return self.linear(x.to(router.weight.dtype), router, torch.float32)

    def expert_outputs(self, x: Tensor, moe: Moe) -> ExpertOutputs:
        return self.mixture.expert_outputs(kernel_utils.matrix("x", x), moe)

    def combine_experts(
        self, found: ExpertOutputs, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        early = self._launch.early(found.values)
        return combine(found.values, found.weights, shared, gate, dtype, early)

    def moe_add_rms_norm(
        self, x: Tensor, moe: Moe, residual: Tensor, weight: Tensor, eps: float,
        reader: PackedLinear | None = None,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        if not len(x) or (reader is not None and reader.quantizes_rows):
            return super().moe_add_rms_norm(x, moe, residual, weight, eps, reader)
        x = kernel_utils.matrix("x", x)
        residual = kernel_utils.matrix("residual", residual, x.shape[1], (x.dtype,))
        weight = kernel_utils.vector("weight", weight, x.shape[1], (x.dtype,))
        if len(residual) != len(x):
            raise ConfigError(f"x has {len(x)} rows, residual {len(residual)}")
        found, early = self.expert_outputs(x, moe), self._launch.early(x)
        shared, gate = self.shared_expert(x, moe)
        return combine_add_norm(found.values, found.weights, shared, gate, residual, weight, eps, early)
