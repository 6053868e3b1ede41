"""Configurations of the kernel for many tiles, by height of the tile and rows of the call; speed only.

`bench/micro/gpu/attention_variants.py` compares entries on a GPU, bits included.
"""

from __future__ import annotations

from typing import NamedTuple


class TileConfig(NamedTuple):
    """Configuration of the kernel for a tile; speed only."""

    height: int  # rows times heads
    warps: int
    stages: int
    max_registers: int | None = None  # of a thread; a limit raises the number of resident programs
    splits_full_blocks: bool = True  # separate loop without masks for fully visible blocks
    prefetches_pages: bool = False  # load page ids one iteration early
    span_loop: bool = False  # loop of `span_loop.py`; it splits full spans and prefetches pages
    merges_rows: bool = False  # merge of `merge.py`, of tiles in chunks
    warp_specialized: bool = False  # kernel of `warp_specialized.py` where it is usable; height 64 or 128


# Padded head dim -> configuration. TALL_TILES: prompts of large calls; SHORT_TILES: their decode rows, and
# calls up to 256 rows; SHORT_TILES_512: up to MAX_ONE_LIST_ROWS; SHORT_TILES_96: up to
# MAX_DEEP_PIPELINE_ROWS; CHUNKED_TILES: up to MAX_CHUNKED_ROWS, for the head dims that were faster with it.
TALL_TILES = {
    64: TileConfig(64, 4, 2),
    128: TileConfig(128, 8, 3, splits_full_blocks=False, prefetches_pages=True),
}
# On Hopper, for keys that are not quantised. The span loop has half the instructions a key and does not wait
# after every tensor core instruction (ptxas C7514): 0.67 of the time of TALL_TILES at 8,192 rows.
TALL_TILES_SM90 = {64: TileConfig(64, 4, 3, span_loop=True), 128: TileConfig(128, 8, 3, span_loop=True)}
SHORT_TILES_512 = {64: TileConfig(16, 4, 3, 168), 128: TileConfig(16, 4, 3, 128)}
SHORT_TILES = {64: TileConfig(16, 2, 3), 128: TileConfig(16, 2, 3)}
SHORT_TILES_96 = {
    64: TileConfig(16, 2, 3),
    128: TileConfig(16, 4, 3, splits_full_blocks=False, prefetches_pages=True),
}
CHUNKED_TILES = {128: TileConfig(16, 4, 3, splits_full_blocks=False, prefetches_pages=True, merges_rows=True)}
