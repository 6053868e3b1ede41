"""Which tile a matrix product takes, by rows, weight shape and dtype: a static table, no tuning at run time.

A tile decides speed, never bits: bits hang on the partition of K alone (`SPLITS`), and that is a
function of the weight's shape. Change tiles freely after a measurement (`op_times.py --sweep`);
a change of SPLITS is a change of the numbers this backend gives.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """One configuration of the GEMM kernel."""

    bm: int  # rows of the output tile
    bn: int  # columns of the output tile
    bk: int  # depth of one step
    warps: int
    stages: int
    early: bool = False  # the weight's first tile is loaded before the last kernel has ended


# (N, K) -> number of equal spans of K whose sums are added in ascending order. Absent: 1.
SPLITS: dict[tuple[int, int], int] = {}

# (N, K, largest M of the bucket) -> tile, for shapes that were measured; wins over the classes below.
MEASURED: dict[tuple[int, int, int], Tile] = {
    (576, 576, 16): Tile(16, 16, 64, 2, 6),
    (576, 576, 32): Tile(32, 16, 64, 2, 6),
    (576, 576, 64): Tile(64, 16, 64, 4, 6),
    (576, 576, 128): Tile(64, 16, 64, 4, 6),
    (576, 576, 256): Tile(64, 32, 64, 4, 5),
    (576, 576, 512): Tile(64, 32, 64, 4, 5),
    (576, 1536, 16): Tile(16, 16, 256, 2, 3),
    (576, 1536, 32): Tile(32, 16, 256, 2, 3),
    (576, 1536, 64): Tile(64, 16, 128, 4, 4),
    (576, 1536, 128): Tile(64, 16, 256, 4, 3),
    (576, 1536, 256): Tile(64, 32, 256, 4, 3),
    (576, 1536, 512): Tile(64, 32, 256, 4, 3),
    (576, 1536, 1 << 30): Tile(128, 128, 64, 8, 3),
    (4096, 4096, 16): Tile(16, 32, 512, 4, 4, early=True),
    (4096, 4096, 32): Tile(64, 32, 128, 4, 8),
    (4096, 4096, 64): Tile(64, 32, 256, 4, 4, early=True),
    (4096, 14336, 16): Tile(16, 32, 256, 2, 6),
    (4096, 14336, 32): Tile(64, 32, 128, 4, 8),
    (4096, 14336, 64): Tile(64, 32, 128, 4, 8),
    (4096, 14336, 128): Tile(64, 64, 128, 4, 5),
    (4096, 14336, 256): Tile(128, 64, 64, 4, 5),
    (49152, 576, 16): Tile(16, 32, 64, 2, 3),
    (49152, 576, 32): Tile(32, 32, 64, 2, 3),
    (49152, 576, 64): Tile(64, 128, 64, 4, 3),
}

# The same for `pair`: bn columns and as many partners.
PAIRS: dict[tuple[int, int, int], Tile] = {
    (960, 576, 16): Tile(16, 16, 64, 2, 8),
    (960, 576, 64): Tile(64, 16, 64, 4, 6),
    (960, 576, 128): Tile(64, 16, 64, 4, 6),
    (960, 576, 256): Tile(64, 16, 64, 4, 6),
    (960, 576, 512): Tile(64, 64, 64, 4, 4),
    (3072, 576, 16): Tile(16, 32, 64, 4, 6),
    (3072, 576, 64): Tile(64, 16, 64, 4, 6),
    (3072, 576, 128): Tile(64, 32, 64, 4, 4),
    (3072, 576, 256): Tile(64, 32, 64, 4, 4),
    (3072, 576, 512): Tile(64, 32, 64, 4, 4),
    (6144, 4096, 16): Tile(16, 32, 256, 4, 4, early=True),
    (6144, 4096, 32): Tile(64, 32, 128, 4, 6),
    (6144, 4096, 64): Tile(64, 32, 128, 4, 6, early=True),
    (28672, 4096, 16): Tile(16, 32, 256, 4, 3, early=True),
    (28672, 4096, 32): Tile(32, 64, 128, 4, 3),
    (28672, 4096, 64): Tile(64, 128, 64, 8, 4, early=True),
}

BUCKETS = (16, 32, 64, 128, 256, 512, 1 << 30)  # largest M of each bucket

# Largest M -> [(largest N, tile)], bf16. Few rows: many narrow tiles, so that all SMs pull weights.
_BF16: dict[int, list[tuple[int, Tile]]] = {
    16: [
        (1024, Tile(16, 16, 64, 2, 8)),
        (4096, Tile(16, 32, 64, 4, 8)),
        (8192, Tile(16, 32, 128, 4, 6)),
        (1 << 30, Tile(16, 64, 128, 4, 4)),
    ],
    32: [
        (1024, Tile(32, 16, 64, 2, 6)),
        (4096, Tile(32, 32, 64, 4, 6)),
        (8192, Tile(32, 32, 128, 4, 5)),
        (1 << 30, Tile(32, 64, 128, 4, 4)),
    ],
    64: [
        (1024, Tile(64, 16, 64, 4, 5)),
        (4096, Tile(64, 32, 64, 4, 5)),
        (8192, Tile(64, 64, 64, 4, 5)),
        (1 << 30, Tile(64, 128, 64, 4, 4)),
    ],
    128: [
        (1024, Tile(64, 32, 64, 4, 5)),
        (4096, Tile(64, 64, 64, 4, 5)),
        (8192, Tile(64, 64, 64, 4, 5)),
        (1 << 30, Tile(128, 128, 64, 8, 4)),
    ],
    256: [
        (1024, Tile(64, 32, 64, 4, 5)),
        (4096, Tile(64, 64, 64, 4, 4)),
        (8192, Tile(128, 64, 64, 4, 4)),
        (1 << 30, Tile(128, 128, 64, 8, 4)),
    ],
    512: [
        (1024, Tile(64, 64, 64, 4, 4)),
        (8192, Tile(128, 128, 64, 8, 3)),
        (1 << 30, Tile(128, 256, 64, 8, 3)),
    ],
    1 << 30: [
        (1024, Tile(128, 64, 64, 4, 4)),
        (4096, Tile(128, 128, 64, 8, 3)),
        (1 << 30, Tile(128, 256, 64, 8, 3)),
    ],
}

# fp32 runs on plain fused multiply-adds, one thread an output: no tensor core keeps all its bits.
_FP32: dict[int, list[tuple[int, Tile]]] = {
    16: [(4096, Tile(16, 32, 32, 4, 3)), (1 << 30, Tile(16, 64, 32, 4, 3))],
    64: [(1 << 30, Tile(32, 64, 32, 4, 3))],
    1 << 30: [(1 << 30, Tile(64, 64, 32, 8, 3))],
}


def bucket(rows: int) -> int:
    """The largest M of the bucket that `rows` falls in."""
    return next(limit for limit in BUCKETS if rows <= limit)


def tile_for(rows: int, columns: int, depth: int, wide: bool) -> Tile:
    """The tile for M = rows of a weight [columns, depth]; `wide` = fp32."""
    if not wide and (found := MEASURED.get((columns, depth, bucket(rows)))):
        return found
    for limit, choices in (_FP32 if wide else _BF16).items():
        if rows <= limit:
            return next(tile for most, tile in choices if columns <= most)
    raise AssertionError("the last limit holds everything")


def pair_tile_for(rows: int, columns: int, depth: int) -> Tile:
    """The tile of `pair` for a weight [columns, depth]: bn columns and as many partners; bf16."""
    found = PAIRS.get((columns, depth, bucket(rows)))
    if found is None:
        tile = tile_for(rows, columns, depth, False)
        found = tile._replace(bn=max(16, tile.bn // 2))
    return found
