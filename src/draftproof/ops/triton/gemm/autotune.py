"""Selection of GEMM tiles by measurement, once per chip, weight shape, row bucket and format.

While the warm-up compiles kernels, the tile table reports every shape without a measured tile. The tuner then
compiles the candidates of these shapes in parallel, measures them on the weights of the model and stores the
fastest in the tile table and in the cache file. Tiles change speed, never bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from draftproof.ops.triton.compile_ahead import is_compiling
from draftproof.ops.triton.gemm import dense, fused
from draftproof.ops.triton.gemm.tile_cache import cache_file, save_tiles
from draftproof.ops.triton.gemm.tiles import (
    BF16_TILES,
    UNLIMITED_SHARED_BYTES,
    Tile,
    TileKey,
    TileTable,
    default_tile,
    fit_tile,
    fused_form,
    shared_bytes,
    tile_choices,
)
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import LaunchContext
from draftproof.ops.triton.moe.tiles import tiles_of_key
from draftproof.ops.triton.moe.tuning_launches import ExpertCalls
from draftproof.ops.triton.quantized import gemm as quantized
from draftproof.ops.triton.quantized.row_quantization import prepare_rows

MAX_TUNING_SECONDS = 10.0  # of measurements in one warm-up; later shapes keep the defaults
LAUNCHES = 20  # of one measurement
MIN_GAIN = 0.03  # share by which a candidate must beat the default
MAX_WEIGHT_BYTES = 128 << 20  # of weights that a measurement rotates through: more than the L2 cache

# Maximum rows of a bucket -> tiles to measure beside the default tiles of its rows; other buckets: none.
EXTRA_CANDIDATES: dict[int, tuple[Tile, ...]] = {
    16: (Tile(16, 16, 256, 2, 6, True), Tile(16, 32, 256, 4, 8, True), Tile(16, 64, 256, 4, 4, True)),
    32: (Tile(64, 32, 128, 4, 8),),
    64: (Tile(64, 64, 128, 4, 6), Tile(64, 32, 256, 4, 4)),
    128: (Tile(64, 16, 64, 4, 6), Tile(64, 64, 128, 4, 5)),
    256: (Tile(128, 64, 64, 4, 5),),
}

# Launch of a variant: (weight, rows, tile) -> a call that launches the kernel.
MakeCall = Callable[[TileKey, PackedLinear, int, Tile], Callable[[], Any]]
Timer = Callable[[Sequence[Callable[[], Any]]], float]
Compile = Callable[[Sequence[Callable[[], object]], Callable[[int, int], None]], None]


def is_tuning_enabled() -> bool:
    """Return whether DRAFTPROOF_TUNE_TILES permits measurements (default: yes)."""
    return os.environ.get("DRAFTPROOF_TUNE_TILES", "1") != "0"


def candidate_tiles(key: TileKey, max_shared_bytes: int = UNLIMITED_SHARED_BYTES) -> list[Tile]:
    """Return the default tile of `key` and the tiles to compare with it that fit into the shared memory."""
    if key.num_experts:
        return tiles_of_key(key, max_shared_bytes)
    default = default_tile(key.variant, key.max_rows, key.columns, key.kind)
    found = [fit_tile(default, key.variant, key.kind, max_shared_bytes)]
    extra = EXTRA_CANDIDATES.get(key.max_rows, ()) if key.kind == "bf16" else ()
    others = (*BF16_TILES[key.max_rows], *extra) if extra else tile_choices(key.kind, key.max_rows)
    for tile in others:
        tile = fused_form(tile) if key.variant == "fused" else tile
        fits = shared_bytes(tile, key.variant, key.kind) <= max_shared_bytes
        if fits and tile.bk <= key.depth and tile not in found:
            found.append(tile)
    return found


def graph_milliseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the device time of one replay of a graph of `calls`.

    Single launches of short kernels would measure the host.
    """
    calls[0]()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for call in calls:
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


class TileTuner:
    """Collector of shapes without a measured tile, and their measurement.

    `make_call` returns a launch, `timer` the duration of a sequence of launches, `save` stores results.
    """

    def __init__(
        self, table: TileTable, make_call: MakeCall, timer: Timer,
        save: Callable[[dict[TileKey, Tile]], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._table, self._make_call, self._timer = table, make_call, timer
        self._save, self._clock = save, clock
        self._missing: dict[TileKey, tuple[int, list[PackedLinear]]] = {}  # maximum rows seen, weights
        table.on_miss = self.collect

    def collect(self, key: TileKey, packed: PackedLinear, rows: int) -> None:
        """Remember a shape that the warm-up uses; launches outside a warm-up are not collected."""
        if not is_compiling() or len(self._candidates(key)) < 2:
            return
        seen, weights = self._missing.get(key, (0, []))
        size = sum(other.weight.numel() * other.weight.element_size() for other in weights)
        if size < MAX_WEIGHT_BYTES and all(other.weight is not packed.weight for other in weights):
            weights.append(packed)
        self._missing[key] = (max(seen, rows), weights)

    def tune(self, compile_calls: Compile, report: Callable[[int, int], None]) -> dict[TileKey, Tile]:
        """Measure the collected shapes, store the fastest tiles and return them."""
        missing, self._missing = self._missing, {}
        if not missing:
            return {}
        first = [
            self._make_call(key, weights[0], rows, tile)
            for key, (rows, weights) in missing.items()
            for tile in self._candidates(key)
        ]
        compile_calls(first, report)
        deadline, found = self._clock() + MAX_TUNING_SECONDS, {}
        for key, (rows, weights) in missing.items():
            if self._clock() > deadline:
                break
            found[key] = self._fastest(key, rows, weights)
        self._table.measured.update(found)
        self._save(found)
        return found

    def _candidates(self, key: TileKey) -> list[Tile]:
        """Return the tiles to measure on this chip."""
        return candidate_tiles(key, self._table.max_shared_bytes)

    def _fastest(self, key: TileKey, rows: int, weights: list[PackedLinear]) -> Tile:
        """Return the fastest candidate; the default unless another tile is clearly faster."""
        default, *others = self._candidates(key)
        best, limit = default, self._measure(key, rows, weights, default) * (1 - MIN_GAIN)
        for tile in others:
            duration = self._measure(key, rows, weights, tile)
            if duration < limit:
                best, limit = tile, duration
        return best

    def _measure(self, key: TileKey, rows: int, weights: list[PackedLinear], tile: Tile) -> float:
        """Return the duration of LAUNCHES launches over rotating weights; infinity if a launch fails."""
        calls = [self._make_call(key, weights[i % len(weights)], rows, tile) for i in range(LAUNCHES)]
        try:
            return self._timer(calls)
        except (RuntimeError, OutOfResources):  # e.g. a tile that needs too much shared memory
            return float("inf")


def create_tuner(launch: LaunchContext, gemm: dense.Gemm) -> TileTuner | None:
    """Return the tuner of a backend; None on the interpreter or where tuning is disabled."""
    if not launch.cuda or not is_tuning_enabled():
        return None
    buffers: dict[tuple[int, int], Tensor] = {}  # all calls share them: memory may be short
    expert_calls = ExpertCalls(launch)

    def make_call(key: TileKey, packed: PackedLinear, rows: int, tile: Tile) -> Callable[[], Any]:
        if key.num_experts:
            return expert_calls.make(key, packed, rows, tile)
        columns = key.columns if key.variant == "dense" else key.columns // 2
        dtype = torch.bfloat16 if packed.format else packed.weight.dtype
        for shape in ((rows, key.depth), (rows, columns)):
            if shape not in buffers:
                buffers[shape] = torch.randn(shape, device=launch.device).to(dtype)
        x, out = buffers[rows, key.depth], buffers[rows, columns]
        if key.depth == columns:
            out = torch.empty_like(x)
        early = launch.early(x)
        if packed.format:
            if key.variant == "dense":
                inputs = prepare_rows(x, packed, early, tile)
                return lambda: quantized.linear(inputs, packed, out, early, tile)
            inputs = prepare_rows(x, packed, early)
            return lambda: quantized.linear_act_mul(inputs, packed, out, early, tile)
        if key.variant == "dense":
            return lambda: gemm(x, packed, out, early, tile)
        return lambda: fused.linear_act_mul(x, packed, out, early, tile)

    def save(tiles: dict[TileKey, Tile]) -> None:
        buffers.clear()
        expert_calls.clear()
        save_tiles(cache_file(launch.chip.name), launch.chip.name, tiles)

    return TileTuner(gemm.tiles, make_call, graph_milliseconds, save)
