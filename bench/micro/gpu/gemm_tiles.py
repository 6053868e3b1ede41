"""Times GEMM tiles on a GPU and prints the fastest as entries of the shipped `tiles_h200.json`.

    PYTHONPATH=src python bench/micro/gpu/gemm_tiles.py --kind w8a8 --shapes dense:4096x14336,fused:28672x4096
        [--rows 1,8,64] [--workers 14] [--seconds 60]

Workers first compile all candidates side by side; then one process times them, over rotating weights that
together exceed the L2 cache. Every tile gives the same bits. An entry is printed where a tile is at least 3 %
faster than the one that is used now. The last line of stdout is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/

import argparse
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from common.measure import finish
from op_checks import GPU, randn
from op_times import BF16, L2, micros
from torch import Tensor

from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.gemm import fused
from draftproof.ops.triton.gemm.tile_cache import encode_key
from draftproof.ops.triton.gemm.tiles import Tile, TileKey, row_bucket
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.quantized import gemm as quantized
from draftproof.ops.triton.quantized.row_quantization import prepare_rows

SHARED_BYTES = 210 << 10  # for the stages
MIN_GAIN = 0.03
VARIANTS = ("dense", "fused")
MIN_BYTES_IN_FLIGHT = 20 << 10  # of the weight, per program with few rows
ONE_ROW_TILES = (
    (8, 2048, 4),
    (8, 1024, 4),
    (16, 1024, 4),
    (4, 4096, 4),
    (4, 2048, 4),
    (16, 2048, 8),
    (8, 1024, 2),
)


def heights(kind: str, rows: int) -> tuple[int, ...]:
    """Return rows of a tile to try."""
    if kind in ("fp8", "w4a16"):
        return (64,) if rows <= 64 else (64, 128)
    vector = (rows,) if kind == "w8a8" and rows == 1 else ()
    if rows <= 64:
        return (*vector, 16) if rows <= 16 else (min(64, rows),)
    return (64, 128) if rows <= 512 else (128, 256)


def candidates(kind: str, rows: int, columns: int, depth: int, pairs: int) -> Iterator[Tile]:
    """Return tiles to time; `pairs` 2: a fused kernel, whose tile has as many partner columns."""
    size = 2 if kind == "bf16" else 1
    for bm in heights(kind, rows):
        if bm < 16:
            for bn, bk, warps in ONE_ROW_TILES:
                if bk <= depth and bm * bn * bk // 4 // (32 * warps) <= 128:
                    yield Tile(bm, max(4, bn // pairs), bk, warps, 1, True)
            continue
        depths = {"fp8": (128,), "w4a16": (256,)}.get(kind, (128, 256, 512) if rows <= 64 else (64, 128))
        widths = (16, 32, 64) if rows <= 32 else (32, 64, 128) if rows <= 64 else (64, 128, 256)
        for bn, bk, stages in product(widths, depths, (4, 6, 8) if rows <= 64 else (3, 4, 5)):
            warps = (2,) if bn == 16 and bm == 16 else (4,) if rows <= 64 else (4, 8)
            used = (bm * (2 if kind in ("bf16", "w4a16") else 1) + bn * size) * bk * stages
            is_deep = bk * size * bn * (stages - 1) >= MIN_BYTES_IN_FLIGHT or rows > 64
            if used <= SHARED_BYTES and bk * (stages - 1) < depth and is_deep:
                for count in warps:
                    yield Tile(bm, max(16, bn // pairs), bk, count, stages, rows <= 16)


def pack_random(ops: TritonOps, kind: str, columns: int, depth: int, seed: int) -> PackedLinear:
    """Return a random weight in a format."""
    weight = randn(columns, depth, seed=seed, dtype=BF16) / depth**0.5
    if kind == "bf16":
        return PackedLinear(weight, None)
    scales = weight.abs().amax(1).float() / (127 if kind == "w8a8" else 448)
    if kind == "w4a16":
        groups = torch.ones((columns, depth // 128), dtype=BF16, device=GPU)
        data = torch.randint(0, 255, (columns, depth // 2), dtype=torch.uint8, device=GPU)
        return ops.forward.pack_quantized(kind, data, groups, None)
    scaled = weight / scales[:, None]
    data = scaled.round().to(torch.int8) if kind == "w8a8" else scaled.to(torch.float8_e4m3fn)
    return ops.forward.pack_quantized(kind, data, scales, None)


def linear_of_row(x: Tensor, packed: PackedLinear, out: Tensor, tile: Tile) -> None:
    """Multiply one row in bf16, with the kernel that quantises it where the tile needs that."""
    quantized.linear(prepare_rows(x, packed, True, tile), packed, out, True, tile)


def make_call(
    ops: TritonOps, variant: str, rows: int, packed: PackedLinear
) -> Callable[[Tile], Callable[[], Any]]:
    """Return a function of a tile that returns a launch."""
    x = randn(rows, packed.depth, dtype=BF16)
    columns = packed.columns if variant == "dense" else packed.columns // 2
    out = torch.empty((rows, columns), dtype=BF16, device=GPU)
    if packed.format is not None:
        if packed.format == "w8a8" and variant == "dense" and rows == 1:
            return lambda tile: partial(linear_of_row, x, packed, out, tile)
        run = quantized.linear if variant == "dense" else quantized.linear_act_mul
        inputs = prepare_rows(x, packed, False)
        return lambda tile: partial(run, inputs, packed, out, True, tile)
    if variant == "dense":
        return lambda tile: partial(ops.forward.gemm, x, packed, out, True, tile)
    return lambda tile: partial(fused.linear_act_mul, x, packed, out, True, tile)


def main() -> None:
    """Compile, time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kind", default="bf16", choices=("bf16", "w8a8", "fp8", "w4a16"))
    parser.add_argument("--shapes", required=True, help="variant:columns x depth, by commas")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=60, help="no new shape after this")
    parser.add_argument("--share", type=int, help="compile only, and only this worker's share")
    options = parser.parse_args()
    alone, begin = options.share is None, time.monotonic()
    if alone:
        command = [sys.executable, *sys.argv]
        working = [subprocess.Popen([*command, "--share", str(i)]) for i in range(options.workers)]
        for worker in working:
            worker.wait()
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    ops, number, found, measured = TritonOps(GPU), 0, {}, {}
    for shape in options.shapes.split(","):
        variant, _, sizes = shape.partition(":")
        if variant not in VARIANTS:
            parser.error(f"{shape}: the variant is one of {', '.join(VARIANTS)}")
        columns, depth = map(int, sizes.split("x"))
        copies = max(2, min(24, -(-L2 // (columns * depth)))) if alone else 1
        packed = [pack_random(ops, options.kind, columns, depth, seed) for seed in range(copies)]
        for rows in map(int, options.rows.split(",")):
            if time.monotonic() - begin > options.seconds:
                break
            now = ops.forward.tiles.select(variant, rows, packed[0])  # type: ignore[arg-type]
            makers = [make_call(ops, variant, rows, one) for one in packed]
            times: dict[Tile, float] = {}
            pairs = 2 if variant == "fused" else 1
            for tile in dict.fromkeys((now, *candidates(options.kind, rows, columns, depth, pairs))):
                number += 1
                try:
                    if alone:
                        calls = [makers[i % copies](tile) for i in range(max(12, copies))]
                        times[tile] = micros(calls, 3)
                    elif number % options.workers == options.share:
                        makers[0](tile)()
                except Exception as error:  # a tile that does not fit
                    print(f"# {tile}: {type(error).__name__}", flush=True)
            if not alone:
                continue
            best = sorted(times, key=times.__getitem__)[:4]
            bucket = row_bucket(rows, options.kind, depth)
            key = encode_key(TileKey(variant, columns, depth, options.kind, bucket))  # type: ignore[arg-type]
            if times[best[0]] < (1 - MIN_GAIN) * times[now]:
                found[key] = [*best[0][:5], bool(best[0][5])]
            size = packed[0].weight.numel() * packed[0].weight.element_size()
            measured[key] = {
                "floor us": round(size / 4.8e6, 1),
                "used now": [list(now), times[now]],
                "fastest": [[list(tile), times[tile]] for tile in best],
            }
            line = "; ".join(f"{tuple(tile)} {times[tile]}" for tile in best)
            print(f"{key}: floor {size / 4.8e6:.1f}, now {tuple(now)} {times[now]}; {line}", flush=True)
    if alone:
        finish("gemm_tiles", {"kind": options.kind, "tiles": found, "us": measured})


if __name__ == "__main__":
    main()
