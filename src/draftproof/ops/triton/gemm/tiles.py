"""Tile sizes of the GEMM kernels by rows, weight shape and format.

A tile changes speed, never bits: the bits depend on the partition of K (`SPLIT_K`), which is a function of
the weight shape only. Tiles come from measured entries (`tile_cache.py`: shipped for sm_90, measured at
warm-up by `autotune.py` for other shapes), or else from the defaults by size below. A change of SPLIT_K
changes the numbers that this backend computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from draftproof.ops.triton.gemm.weight import PackedLinear


class Tile(NamedTuple):
    """Configuration of a GEMM kernel."""

    bm: int  # rows of the output tile
    bn: int  # columns of the output tile; in a fused kernel, with as many partner columns
    bk: int  # depth of one step
    warps: int
    stages: int
    weight_first: bool = False  # load the first weight tile before the previous kernel has completed


Variant = Literal["dense", "fused"]
ANY_ROWS = 1 << 30
ROW_BUCKETS = (16, 32, 64, 128, 256, 512, ANY_ROWS)  # maximum rows of each bucket


class TileKey(NamedTuple):
    """Shape that a measured tile is valid for."""

    variant: Variant
    columns: int
    depth: int
    kind: str  # value of a WeightKind
    max_rows: int  # of the bucket


# (N, K) -> number of equal spans of K whose sums are added in ascending order. Absent: 1.
SPLIT_K: dict[tuple[int, int], int] = {}

# Maximum rows -> [(maximum N, tile)], bf16. Few rows: many narrow tiles, so that all SMs load weights.
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

# fp32 runs on fused multiply-adds, one thread per output: no tensor core keeps all fp32 bits.
_FP32: dict[int, list[tuple[int, Tile]]] = {
    16: [(4096, Tile(16, 32, 32, 4, 3)), (1 << 30, Tile(16, 64, 32, 4, 3))],
    64: [(1 << 30, Tile(32, 64, 32, 4, 3))],
    1 << 30: [(1 << 30, Tile(64, 64, 32, 8, 3))],
}


def row_bucket(rows: int) -> int:
    """Return the maximum number of rows of the bucket of `rows`."""
    return next(limit for limit in ROW_BUCKETS if rows <= limit)


def default_tile(variant: Variant, rows: int, columns: int, is_fp32: bool) -> Tile:
    """Return the tile by size classes for `rows` rows of a weight with `columns` rows."""
    choices = next(found for limit, found in (_FP32 if is_fp32 else _BF16).items() if rows <= limit)
    tile = next(tile for max_columns, tile in choices if columns <= max_columns)
    return tile if variant == "dense" else fused_form(tile)


def fused_form(tile: Tile) -> Tile:
    """Return `tile` with half of its columns, because a fused kernel adds as many partner columns."""
    return tile._replace(bn=max(16, tile.bn // 2))


class TileTable:
    """Measured tiles with the defaults behind them.

    `on_miss` is called with the key, the weight and the rows of a shape without a measured tile.
    """

    def __init__(self, measured: dict[TileKey, Tile] | None = None) -> None:
        self.measured = dict(measured or {})
        self.on_miss: Callable[[TileKey, PackedLinear, int], None] | None = None

    def select(self, variant: Variant, rows: int, packed: PackedLinear) -> Tile:
        """Return the tile for `rows` rows of `packed`."""
        columns, depth = packed.weight.shape
        assert packed.kind is not None
        key = TileKey(variant, columns, depth, packed.kind.value, row_bucket(rows))
        found = self.measured.get(key)
        if found is None and variant == "fused":  # half of the dense tile where only that was measured
            dense = self.measured.get(key._replace(variant="dense"))
            found = dense and fused_form(dense)
        if found is None:
            if self.on_miss is not None:
                self.on_miss(key, packed, rows)
            found = default_tile(variant, rows, columns, packed.kind.value == "fp32")
        return found
