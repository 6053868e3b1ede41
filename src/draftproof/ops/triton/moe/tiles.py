"""Tiles of the grouped GEMM; both of its GEMMs share the work list, and so the rows of a tile."""

from __future__ import annotations

from draftproof.ops.contract.types import Routing
from draftproof.ops.triton.gemm.tiles import (
    ANY_ROWS,
    MXFP4_DEPTH,
    UNLIMITED_SHARED_BYTES,
    Tile,
    TileKey,
    TileTable,
    Variant,
    fit_tile,
    shared_bytes,
)
from draftproof.ops.triton.gemm.weight import FOUR_BITS, PackedLinear
from draftproof.ops.triton.kernel_utils import next_power_of_two

MIN_BUCKET_ROWS, MAX_BUCKET_ROWS = 16, 4096  # tiles are selected for powers of two between them
FEW_ROWS = 4  # up to it every pair of row and expert is a tile: no work list
# Mean number of pairs of an expert -> rows of a tile. Experts of real text have very different numbers of
# pairs; a tile with room for several times the mean reads the weight of most of them once.
TILE_ROWS = {3: 16, 6: 32, 64: 64, ANY_ROWS: 128}
MIN_TILE_ROWS = {"fp8": 64, "fp8_block": 64}  # one tensor core instruction for every number of rows

# Rows of a tile -> tiles to measure, the default first; the columns of a gate and up GEMM count twice.
GATE_UP_TILES: dict[int, tuple[Tile, ...]] = {
    16: (
        Tile(16, 16, 128, 4, 5), Tile(16, 16, 256, 4, 4), Tile(16, 32, 128, 4, 4), Tile(16, 32, 256, 4, 3),
        Tile(16, 64, 128, 4, 4), Tile(16, 16, 256, 2, 4),
    ),
    32: (
        Tile(32, 32, 128, 4, 4), Tile(32, 16, 128, 4, 5), Tile(32, 32, 256, 4, 3), Tile(32, 64, 128, 4, 3),
        Tile(32, 64, 64, 4, 5),
    ),
    64: (
        Tile(64, 64, 64, 4, 4), Tile(64, 32, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(64, 128, 64, 8, 4),
        Tile(64, 32, 64, 4, 5),
    ),
    128: (Tile(128, 64, 64, 8, 4), Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 4)),
}  # fmt: skip
DOWN_TILES: dict[int, tuple[Tile, ...]] = {
    16: (
        Tile(16, 64, 128, 4, 4), Tile(16, 32, 128, 4, 5), Tile(16, 32, 256, 4, 3), Tile(16, 64, 256, 4, 3),
        Tile(16, 128, 128, 4, 4), Tile(16, 128, 64, 4, 5),
    ),
    32: (
        Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 3), Tile(32, 64, 256, 4, 3), Tile(32, 128, 64, 4, 4),
        Tile(32, 32, 128, 4, 5),
    ),
    64: (
        Tile(64, 128, 64, 4, 4), Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 3), Tile(64, 256, 64, 8, 3),
        Tile(64, 64, 64, 4, 5),
    ),
    128: (Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 4)),
}  # fmt: skip
# Tiles of 4-bit formats: mean number of pairs of an expert -> tiles, the default first; `gemm/tiles.py` gives
# the reason for 64 rows. The depth of a step is that of the layout.
FOUR_BIT_TILES: dict[Variant, dict[int, tuple[Tile, ...]]] = {
    "experts_gate_up": {
        64: (
            Tile(64, 16, 256, 4, 4), Tile(64, 32, 256, 4, 3), Tile(64, 16, 256, 4, 3),
            Tile(64, 32, 256, 4, 4),
        ),
        ANY_ROWS: (Tile(64, 64, 256, 8, 2), Tile(64, 32, 256, 4, 3), Tile(64, 64, 256, 8, 3)),
    },
    "experts": {
        64: (
            Tile(64, 32, 256, 4, 4), Tile(64, 64, 256, 4, 3), Tile(64, 32, 256, 4, 3),
            Tile(64, 64, 256, 4, 4),
        ),
        ANY_ROWS: (Tile(64, 128, 256, 8, 2), Tile(64, 64, 256, 4, 3), Tile(64, 128, 256, 8, 3)),
    },
}  # fmt: skip
FP32_TILE = Tile(16, 32, 32, 4, 3)


def rows_of_tile(rows: int, top_k: int, num_experts: int, kind: str) -> int:
    """Return the rows of a tile for `rows` rows that each select `top_k` experts."""
    if kind == "fp32":
        return FP32_TILE.bm
    mean = rows * top_k / num_experts
    found = next(size for limit, size in TILE_ROWS.items() if mean <= limit)
    return max(found, MIN_TILE_ROWS.get(kind, 0))


def expert_tiles(kind: str, tile_rows: int, is_gate_up: bool, depth: int) -> list[Tile]:
    """Return the tiles of a grouped GEMM to choose from, the default first."""
    if kind == "fp32":
        return [FP32_TILE]
    found = (GATE_UP_TILES if is_gate_up else DOWN_TILES)[tile_rows]
    if kind.startswith("fp8"):  # a step has the depth of a chunk
        found = tuple(dict.fromkeys(tile._replace(bk=128) for tile in found))
    return [tile for tile in found if tile.bk <= depth] or [found[0]._replace(bk=64)]


def four_bit_tiles(key: TileKey) -> list[Tile]:
    """Return the tiles of a grouped GEMM with 4-bit weights to choose from, the default first."""
    mean = key.max_rows * key.top_k / key.num_experts
    found = next(tiles for limit, tiles in FOUR_BIT_TILES[key.variant].items() if mean <= limit)
    return [tile._replace(bk=MXFP4_DEPTH) for tile in found] if key.kind == "mxfp4" else list(found)


def rows_bucket(rows: int) -> int:
    """Return the maximum number of rows of the bucket of `rows`: a power of two, or any number."""
    bucket = max(MIN_BUCKET_ROWS, next_power_of_two(rows))
    return bucket if bucket <= MAX_BUCKET_ROWS else ANY_ROWS


def tiles_of_key(key: TileKey, max_shared_bytes: int = UNLIMITED_SHARED_BYTES) -> list[Tile]:
    """Return the tiles to measure for a key, the default first, that fit into the shared memory."""
    if key.kind in FOUR_BITS:
        default, *others = four_bit_tiles(key)
    else:
        tile_rows = rows_of_tile(key.max_rows, key.top_k, key.num_experts, key.kind)
        default, *others = expert_tiles(key.kind, tile_rows, key.variant == "experts_gate_up", key.depth)
    others = [tile for tile in others if shared_bytes(tile, key.variant, key.kind) <= max_shared_bytes]
    return [fit_tile(default, key.variant, key.kind, max_shared_bytes), *others]


def select_tile(
    table: TileTable, rows: int, packed: PackedLinear, routing: Routing, is_gate_up: bool
) -> Tile:
    """Return the tile of a grouped GEMM for `rows` rows: measured or the default."""
    columns = packed.columns // routing.num_experts
    variant: Variant = "experts_gate_up" if is_gate_up else "experts"
    key = TileKey(
        variant, columns, packed.depth, packed.kind_name, rows_bucket(rows), routing.num_experts,
        routing.top_k,
    )  # fmt: skip
    default = tiles_of_key(key, table.max_shared_bytes)[0]
    found = table.measured.get(key)
    if found is None or found.bm != default.bm:  # a cache file may be older than `TILE_ROWS`
        if table.on_miss is not None:
            table.on_miss(key, packed, rows)
        return default
    return found
