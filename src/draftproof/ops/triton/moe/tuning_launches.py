"""Launches of the grouped GEMM on random rows and experts, to measure tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftproof.ops.triton.gemm.tiles import Tile, TileKey
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import LaunchContext
from draftproof.ops.triton.moe.experts import expert_linear
from draftproof.ops.triton.moe.routing import MAX_EXPERT_TILES, Assignment, max_tiles
from draftproof.ops.triton.moe.tiles import FEW_ROWS
from draftproof.ops.triton.quantized.row_quantization import QuantizedRows, prepare_rows


def random_experts(rows: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    """Return distinct random experts [rows, top_k] int32, the same for the same arguments."""
    random = torch.Generator().manual_seed(rows)
    scores = torch.rand((rows, num_experts), generator=random)
    return scores.topk(top_k, 1).indices.to(device=device, dtype=torch.int32)


def assignment_of(experts: Tensor, num_experts: int, tile_rows: int) -> Assignment:
    """Return the assignment of rows to `experts` [R, top_k] with equal weights, by torch ops.

    `tile_rows` 0: without a work list.
    """
    rows, top_k = experts.shape
    weights = torch.full((rows, top_k), 1 / top_k, device=experts.device)
    if tile_rows == 0:
        return Assignment(experts, weights)
    flat = experts.flatten().long()
    counts = torch.bincount(flat, minlength=num_experts)
    by_expert = flat.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(flat), device=flat.device) - starts[flat[by_expert]]
    order = torch.zeros((num_experts, rows), dtype=torch.int32, device=flat.device)
    order[flat[by_expert], place] = by_expert.int()
    tiles = -(-counts // tile_rows)
    expert = torch.arange(num_experts, device=flat.device).repeat_interleave(tiles)
    tile = torch.arange(len(expert), device=flat.device) - (tiles.cumsum(0) - tiles)[expert]
    items = torch.zeros(1 + max_tiles(rows, top_k, num_experts, tile_rows), dtype=torch.int32)
    items[0] = len(expert)
    items[1 : 1 + len(expert)] = (expert * MAX_EXPERT_TILES.value + tile).cpu()
    return Assignment(experts, weights, order, counts.int(), items.to(flat.device))


class ExpertCalls:
    """Launches of the grouped GEMM; all launches of a size share their rows, because memory may be short."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch
        self._assignments: dict[tuple[int, ...], Assignment] = {}
        self._inputs: dict[tuple[object, ...], Tensor | QuantizedRows] = {}

    def clear(self) -> None:
        """Free the shared tensors."""
        self._assignments.clear()
        self._inputs.clear()

    def make(self, key: TileKey, packed: PackedLinear, rows: int, tile: Tile) -> Callable[[], Any]:
        """Return a launch of the grouped GEMM of `key` on random rows and experts."""
        is_gate_up, count = key.variant == "experts_gate_up", key.num_experts
        tile_rows = 0 if rows <= FEW_ROWS else tile.bm
        size = (rows, key.top_k, count, tile_rows)
        if size not in self._assignments:
            experts = random_experts(rows, key.top_k, count, self._launch.device)
            self._assignments[size] = assignment_of(experts, count, tile_rows)
        found = self._assignments[size]
        dtype = torch.bfloat16 if packed.format else packed.weight.dtype
        pdl = self._launch.early(found.experts)
        shape = (rows if is_gate_up else rows * key.top_k, key.depth)
        if (*shape, key.kind) not in self._inputs:
            x = torch.randn(shape, device=self._launch.device, dtype=dtype)
            self._inputs[*shape, key.kind] = prepare_rows(x, packed, pdl)
        inputs = self._inputs[*shape, key.kind]
        activation, out_dtype = ("silu", dtype) if is_gate_up else (None, torch.float32)
        return lambda: expert_linear(inputs, packed, found, count, activation, out_dtype, pdl, tile)
