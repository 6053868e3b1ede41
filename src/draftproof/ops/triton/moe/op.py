"""Mixture of experts on the GPU: checks and the sequence of launches, without a wait for the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.types import ExpertOutputs, ExpertPart, Moe, Routing
from draftproof.ops.triton.gemm.tiles import QUANTIZED_TILES, TileTable
from draftproof.ops.triton.gemm.weight import PackedLinear, pack
from draftproof.ops.triton.kernel_utils import LaunchContext
from draftproof.ops.triton.moe.experts import expert_linear
from draftproof.ops.triton.moe.routing import make_counters, route
from draftproof.ops.triton.moe.tiles import FEW_ROWS, select_tile
from draftproof.ops.triton.quantized.row_quantization import prepare_rows

KINDS = ("bf16", "fp32", *QUANTIZED_TILES)  # weight formats of experts


@dataclass(frozen=True, slots=True)
class PackedRouter:
    """Weight of a router and the counters of its kernel, which belong to one layer."""

    linear: PackedLinear  # [E, hidden]
    counters: Tensor

    def in_dtype(self, dtype: torch.dtype) -> PackedLinear:
        """Return the weight as the rows of `dtype` need it: in their dtype if that is exact, else in fp32."""
        weight = self.linear.weight
        if weight.dtype == dtype:
            return self.linear
        return PackedLinear(weight.float(), self.linear.bias)


def pack_router(weight: Tensor, bias: Tensor | None) -> PackedRouter:
    """Pack a router [E, hidden] without rounding; an fp32 weight whose values are bf16 is stored as bf16."""
    if weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight):
        weight = weight.bfloat16()
    return PackedRouter(pack(weight, bias), make_counters(len(weight), weight.device))


class MixtureOfExperts:
    """Launcher of the kernels of a mixture of experts; `few_rows`: rows up to which no work list is made."""

    def __init__(self, launch: LaunchContext, tiles: TileTable) -> None:
        self._launch, self._tiles = launch, tiles
        self.few_rows = FEW_ROWS

    def expert_outputs(self, x: Tensor, moe: Moe) -> ExpertOutputs:
        """Return the outputs of the experts of rows x [R, hidden]."""
        routing, gate_up, down, part = moe.routing, moe.gate_up, moe.down, moe.part
        own = routing if part is None else _own_routing(routing, part)
        _check(x, moe, own.num_experts)
        rows, pdl = len(x), self._launch.early(x)
        router = moe.router.in_dtype(x.dtype)
        tile = select_tile(self._tiles, rows, gate_up, own, is_gate_up=True)
        tile_rows = 0 if rows <= self.few_rows else tile.bm
        routed_x = x if router.weight.dtype == x.dtype else x.float()
        found = route(routed_x, router, routing, moe.correction, moe.router.counters, tile_rows, pdl)
        count, inputs = own.num_experts, prepare_rows(x, gate_up, pdl)
        inner = expert_linear(inputs, gate_up, found, count, moe.activation, x.dtype, pdl, tile, part)
        tile = select_tile(self._tiles, rows, down, own, is_gate_up=False)
        inputs = prepare_rows(inner, down, pdl)
        values = expert_linear(inputs, down, found, count, None, torch.float32, pdl, tile, part)
        return ExpertOutputs(values, found.experts, found.weights)


def _own_routing(routing: Routing, part: ExpertPart) -> Routing:
    """Return a routing over the experts of a part with as many pairs for each, which tiles are chosen by."""
    top_k = max(1, routing.top_k * part.count // routing.num_experts)
    return replace(routing, num_experts=part.count, top_k=top_k)


def _check(x: Tensor, moe: Moe, count: int) -> None:
    """Raise ConfigError unless the kernels can multiply rows x by the weights of `count` experts."""
    for name, packed in (("gate_up", moe.gate_up), ("down", moe.down)):
        if not isinstance(packed, PackedLinear) or packed.kind_name not in KINDS:
            found = packed.kind_name if isinstance(packed, PackedLinear) else type(packed).__name__
            raise ConfigError(f"experts of format {found} are not supported: {', '.join(KINDS)} are")
        if packed.format is None and packed.weight.dtype != x.dtype:
            raise ConfigError(f"{name} of the experts is {packed.weight.dtype}, the rows are {x.dtype}")
        if packed.columns % count or (packed.block_rows and packed.columns // count % packed.block_rows):
            raise ConfigError(f"{name}: {packed.columns} columns are not {count} experts of equal size")
    inner, width = moe.gate_up.columns // count // 2, moe.down.columns // count
    if moe.gate_up.depth != x.shape[1] or moe.down.depth != inner or width != x.shape[1]:
        raise ConfigError(f"the weights of the experts do not fit rows of {x.shape[1]} columns")
