"""Times GEMM tiles on a GPU: candidates for the tuner (`gemm/autotune.py`) and the shipped `tiles_h200.json`.

    PYTHONPATH=src python bench/micro/gpu/gemm_tiles.py [--shapes 576x1536,4096x14336] [--rows 8,64,256]
        [--workers 12]

Workers first compile all candidates side by side; then one process times them, over rotating weights that
together exceed the L2 cache. Every tile gives the same bits.
"""

# ruff: noqa: B008, B023 - every lambda here is called before its loop goes on
from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

import torch
from op_checks import GPU, LARGE, SMALL, randn
from op_times import BF16, micros, weights

from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.gemm.tiles import Tile, default_tile, row_bucket
from draftproof.ops.triton.gemm.weight import PackedLinear

ROOM = 200 << 10  # bytes of shared memory for the stages


def candidates(rows: int, columns: int, depth: int) -> Iterator[Tile]:
    large = columns * depth > 1 << 22
    heights = (max(16, min(64, rows)),) if rows <= 64 else (64, 128)
    widths = {8: (16, 32, 64) if large else (16, 32), 64: (32, 64, 128) if large else (16, 32)}
    for bm in heights:
        for bn in widths.get(rows, (64, 128, 256) if large else (32, 64)):
            for bk in (64, 128, 256) if rows <= 64 else (64, 128):
                for stages in (3, 4, 6, 8) if rows <= 64 else (3, 4, 5):
                    for warps in (4,) if rows <= 64 and bm > 16 else (2, 4) if rows <= 16 else (4, 8):
                        if (bm + bn) * bk * stages * 2 <= ROOM and bk * (stages - 1) < depth:
                            yield Tile(bm, bn, bk, warps, stages)
    yield default_tile("dense", rows, columns, "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SMALL + LARGE))
    parser.add_argument("--rows", default="8,64,256")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--share", type=int, help="compile only, and only this worker's share")
    options = parser.parse_args()
    alone = options.share is None
    if alone:
        command = [sys.executable, *sys.argv]
        working = [subprocess.Popen([*command, "--share", str(i)]) for i in range(options.workers)]
        for worker in working:
            worker.wait()
    ops, number = TritonOps(GPU), 0
    for shape in options.shapes.split(","):
        columns, depth = map(int, shape.split("x"))
        held = weights(columns, depth) if alone else weights(columns, depth)[:1]
        for rows in map(int, options.rows.split(",")):
            x, out = randn(rows, depth, dtype=BF16), torch.empty((rows, columns), dtype=BF16, device=GPU)
            packed = [PackedLinear(w, None) for w in held]
            times = {}
            for tile in dict.fromkeys(candidates(rows, columns, depth)):
                number += 1
                calls = [
                    lambda p=packed[i % len(held)], t=tile: ops.forward.gemm(x, p, out, tile=t)
                    for i in range(max(12, len(held)))
                ]
                try:
                    if alone:
                        times[tile] = micros(calls, 3)
                    elif number % options.workers == options.share:
                        calls[0]()
                except Exception as error:  # a tile that does not fit
                    print(f"# {tile}: {type(error).__name__}", flush=True)
            if not alone:
                continue
            best = sorted(times, key=times.__getitem__)[:3]
            now = times[default_tile("dense", rows, columns, "bf16")]
            theirs = micros([lambda w=w: torch.mm(x, w.t(), out=out) for w in held], 3)
            also = "; ".join(f"{tuple(t)} {times[t]}" for t in best[1:])
            print(
                f"{columns}x{depth} rows<={row_bucket(rows)}: {best[0]}, {times[best[0]]} µs at {rows}, "
                f"now {now}, cuBLAS {theirs}; then {also}",
                flush=True,
            )


if __name__ == "__main__":
    main()
