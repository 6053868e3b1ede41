"""Ops of a mixture of experts; `TritonForward` adds the others."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import Moe
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

    def moe(self, x: Tensor, moe: Moe) -> Tensor:
        x = kernel_utils.matrix("x", x)
        if not len(x):
            return x.clone()
        outputs, weights = self.mixture.expert_outputs(x, moe)
        return combine(outputs, weights, *self._shared_expert(x, moe), x.dtype, self._launch.early(x))

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
        outputs, shares = self.mixture.expert_outputs(x, moe)
        shared, gate = self._shared_expert(x, moe)
        return combine_add_norm(outputs, shares, shared, gate, residual, weight, eps, self._launch.early(x))

    def _shared_expert(self, x: Tensor, moe: Moe) -> tuple[Tensor | None, Tensor | None]:
        """Return the output of the shared expert [R, hidden] fp32 and the logit of its weight [R, 1]."""
        if moe.shared is None:
            return None, None
        inner = self.linear_act_mul(x, moe.shared.gate_up, moe.shared.activation)
        output = self.linear(inner, moe.shared.down, torch.float32)
        return output, None if moe.shared_gate is None else self.router_logits(x, moe.shared_gate)
