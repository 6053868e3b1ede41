"""Tile sizes of the GEMM kernels by rows, weight shape and format.

A tile changes speed, never bits. Tiles come from measured entries (`tile_cache.py`: shipped for sm_90,
measured at warm-up by `autotune.py` for other shapes), or else from the defaults by size below.
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


Variant = Literal["dense", "fused", "experts", "experts_gate_up"]
ANY_ROWS = 1 << 30
UNLIMITED_SHARED_BYTES = 1 << 30
# Bytes of an element of x and of the weight; other formats: 1.
ELEMENT_BYTES = {"bf16": (2, 2), "fp32": (4, 4), "w4a16": (2, 1), "mxfp4": (2, 1)}
MXFP4_DEPTH = 128  # of a step of mxfp4
ROW_BUCKETS = (16, 32, 64, 128, 256, 512, ANY_ROWS)  # maximum rows of each bucket
ONE_ROW_KINDS = frozenset({"w8a8"})  # formats with tiles of one row, which do without the tensor core
ONE_ROW_DEPTH = 16  # bytes that divide the depth of their weights: one load of a thread
MIN_DOT_COLUMNS, MIN_ONE_ROW_COLUMNS = 16, 4  # of a tile: with the tensor core, and without


class TileKey(NamedTuple):
    """Shape that a measured tile is valid for."""

    variant: Variant
    columns: int
    depth: int
    kind: str  # `PackedLinear.kind_name`
    max_rows: int  # of the bucket
    num_experts: int = 0  # of a grouped GEMM, whose columns are those of one expert
    top_k: int = 0  # experts of a row


# Tiles of bf16 weights: maximum rows -> one tile for each of MAX_COLUMNS. Few rows have many narrow tiles, so
# that all SMs load weights.
MAX_COLUMNS = (1024, 4096, 8192, 1 << 30)
BF16_TILES = {
    16: (Tile(16, 16, 64, 2, 8), Tile(16, 32, 64, 4, 8), Tile(16, 32, 128, 4, 6), Tile(16, 64, 128, 4, 4)),
    32: (Tile(32, 16, 64, 2, 6), Tile(32, 32, 64, 4, 6), Tile(32, 32, 128, 4, 5), Tile(32, 64, 128, 4, 4)),
    64: (Tile(64, 16, 64, 4, 5), Tile(64, 32, 64, 4, 5), Tile(64, 64, 64, 4, 5), Tile(64, 128, 64, 4, 4)),
    128: (Tile(64, 32, 64, 4, 5), Tile(64, 64, 64, 4, 5), Tile(64, 64, 64, 4, 5), Tile(128, 128, 64, 8, 4)),
    256: (Tile(64, 32, 64, 4, 5), Tile(64, 64, 64, 4, 4), Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 8, 4)),
    512: (Tile(64, 64, 64, 4, 4), *[Tile(128, 128, 64, 8, 3)] * 2, Tile(128, 256, 64, 8, 3)),
    ANY_ROWS: (Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 8, 3), *[Tile(128, 256, 64, 8, 3)] * 2),
}
# fp32 runs on fused multiply-adds, one thread per output: no tensor core keeps all fp32 bits.
FP32_TILES = {
    16: (*[Tile(16, 32, 32, 4, 3)] * 2, *[Tile(16, 64, 32, 4, 3)] * 2),
    64: (Tile(32, 64, 32, 4, 3),) * 4,
    ANY_ROWS: (Tile(64, 64, 32, 8, 3),) * 4,
}


# Tiles of quantised weights: maximum rows -> the default, then tiles to measure. e4m3 and 4-bit tiles have
# at least 64 rows, so that one tensor core instruction serves every number of rows. In smaller 4-bit tiles
# Triton permutes K, because the weight is loaded as bytes, and the sum has other bits. The depth of a step is
# that of a chunk (e4m3) or of the layout (4 bits).
QUANTIZED_TILES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "w8a8": {
        1: (Tile(1, 8, 1024, 4, 1, True), Tile(1, 8, 2048, 4, 1, True), Tile(1, 16, 1024, 4, 1, True)),
        16: (
            Tile(16, 32, 512, 4, 6, True), Tile(16, 16, 512, 2, 6, True), Tile(16, 64, 256, 4, 6, True),
            Tile(16, 32, 512, 2, 4, True), Tile(16, 64, 128, 4, 5),
        ),
        32: (Tile(32, 32, 256, 4, 5, True), Tile(32, 64, 256, 4, 4, True), Tile(32, 64, 128, 4, 5)),
        64: (
            Tile(64, 64, 256, 4, 4), Tile(64, 32, 256, 4, 6), Tile(64, 32, 512, 4, 4),
            Tile(64, 64, 256, 4, 6), Tile(64, 128, 128, 4, 4),
        ),
        128: (
            Tile(64, 64, 128, 4, 5), Tile(128, 64, 128, 4, 5), Tile(64, 128, 128, 4, 4),
            Tile(128, 128, 128, 4, 3),
        ),
        256: (Tile(64, 64, 128, 4, 5), Tile(128, 128, 128, 4, 3), Tile(128, 64, 128, 8, 5)),
        512: (Tile(128, 64, 128, 4, 4), Tile(128, 128, 128, 4, 3), Tile(128, 64, 128, 8, 3)),
        ANY_ROWS: (Tile(128, 128, 128, 4, 3), Tile(128, 256, 128, 8, 3), Tile(128, 128, 128, 8, 4)),
    },
    "fp8": {
        64: (
            Tile(64, 32, 128, 4, 7, True), Tile(64, 64, 128, 4, 6, True), Tile(64, 16, 128, 4, 8, True),
            Tile(64, 128, 128, 4, 4),
        ),
        128: (Tile(64, 64, 128, 4, 6), Tile(128, 64, 128, 4, 5), Tile(128, 128, 128, 8, 4)),
        512: (Tile(128, 128, 128, 8, 4), Tile(128, 64, 128, 4, 5), Tile(64, 128, 128, 4, 4)),
        ANY_ROWS: (Tile(128, 128, 128, 8, 4), Tile(128, 256, 128, 8, 3)),
    },
    "w4a16": {
        64: (
            Tile(64, 32, 256, 4, 4, True), Tile(64, 16, 256, 4, 5, True), Tile(64, 64, 256, 4, 3, True),
            Tile(64, 32, 256, 4, 3),
        ),
        ANY_ROWS: (Tile(64, 128, 256, 8, 2), Tile(64, 64, 256, 4, 3)),
    },
}  # fmt: skip
QUANTIZED_TILES["fp8_block"] = QUANTIZED_TILES["fp8"]
QUANTIZED_TILES["mxfp4"] = {
    rows: tuple(tile._replace(bk=MXFP4_DEPTH) for tile in tiles)
    for rows, tiles in QUANTIZED_TILES["w4a16"].items()
}


def row_bucket(rows: int, kind: str, depth: int) -> int:
    """Return the maximum number of rows of the bucket of `rows`."""
    if rows == 1 and kind in ONE_ROW_KINDS and depth % ONE_ROW_DEPTH == 0:
        return 1
    return next(limit for limit in ROW_BUCKETS if rows <= limit)


def tile_choices(kind: str, max_rows: int) -> tuple[Tile, ...]:
    """Return the tiles of a quantised format for up to `max_rows` rows, the default first; others: none."""
    by_rows = QUANTIZED_TILES.get(kind, {ANY_ROWS: ()})
    return next(found for limit, found in by_rows.items() if max_rows <= limit)


def default_tile(variant: Variant, rows: int, columns: int, kind: str) -> Tile:
    """Return the tile by size classes for `rows` rows of a weight with `columns` rows."""
    if kind in QUANTIZED_TILES:
        tile = tile_choices(kind, rows)[0]
    else:
        by_rows = FP32_TILES if kind == "fp32" else BF16_TILES
        choices = next(found for limit, found in by_rows.items() if rows <= limit)
        tile = next(tile for limit, tile in zip(MAX_COLUMNS, choices, strict=True) if columns <= limit)
    return tile if variant == "dense" else fused_form(tile)


def fused_form(tile: Tile) -> Tile:
    """Return `tile` with half of its columns, because a fused kernel adds as many partner columns."""
    smallest = MIN_DOT_COLUMNS if tile.bm >= MIN_DOT_COLUMNS else MIN_ONE_ROW_COLUMNS
    return tile._replace(bn=max(smallest, tile.bn // 2))


def shared_bytes(tile: Tile, variant: Variant, kind: str) -> int:
    """Return the shared memory of the pipeline of `tile`, or more: some targets use one buffer less."""
    x_bytes, weight_bytes = ELEMENT_BYTES.get(kind, (1, 1))
    pairs = 2 if variant in ("fused", "experts_gate_up") else 1
    return (tile.bm * x_bytes + pairs * tile.bn * weight_bytes) * tile.bk * tile.stages


def fit_tile(tile: Tile, variant: Variant, kind: str, max_shared_bytes: int) -> Tile:
    """Return `tile` with as many stages, and then as many columns, as fit into the shared memory."""
    while tile.stages > 2 and shared_bytes(tile, variant, kind) > max_shared_bytes:
        tile = tile._replace(stages=tile.stages - 1)
    while tile.bn > MIN_DOT_COLUMNS and shared_bytes(tile, variant, kind) > max_shared_bytes:
        tile = tile._replace(bn=tile.bn // 2)
    return tile


class TileTable:
    """Measured tiles with the defaults behind them.

    `on_miss` is called with the key, the weight and the rows of a shape without a measured tile.
    `max_shared_bytes`: shared memory of a program on the chip.
    """

    def __init__(
        self, measured: dict[TileKey, Tile] | None = None, max_shared_bytes: int = UNLIMITED_SHARED_BYTES
    ) -> None:
        self.measured, self.max_shared_bytes = dict(measured or {}), max_shared_bytes
        self.on_miss: Callable[[TileKey, PackedLinear, int], None] | None = None

    def select(self, variant: Variant, rows: int, packed: PackedLinear) -> Tile:
        """Return the tile for `rows` rows of `packed`."""
        columns, kind = packed.columns, packed.kind_name
        key = TileKey(variant, columns, packed.depth, kind, row_bucket(rows, kind, packed.depth))
        found = self.measured.get(key)
        if found is None and variant == "fused":  # half of the dense tile where only that was measured
            dense = self.measured.get(key._replace(variant="dense"))
            found = dense and fused_form(dense)
        if found is None:
            if self.on_miss is not None:
                self.on_miss(key, packed, rows)
            found = default_tile(variant, key.max_rows, columns, kind)
            found = fit_tile(found, variant, kind, self.max_shared_bytes)
        return found
