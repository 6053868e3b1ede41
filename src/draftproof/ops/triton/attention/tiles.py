"""Configurations of the kernel for many tiles, by height of the tile and rows of the call; speed only.

`bench/micro/gpu/attention_variants.py` compares entries on a GPU, bits included.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from draftproof.ops import AttentionShape
from draftproof.ops.triton.kernel_utils import next_power_of_two

MIN_CHUNK_GRID = 528  # programs of a launch with chunks: four per SM of an H200


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
    specialized_stages: int = 0  # spans in the rings of `warp_specialized.py` where selected; 0: never


class ChunkedTile(NamedTuple):
    """Tile in chunks of spans, and the calls that use it; speed only."""

    config: TileConfig
    max_rows: int  # of a call
    rows_per_span: int  # rows of the call per span of a chunk: fewer tiles have shorter chunks
    min_spans: int = 1  # of a chunk
    max_programs: int = 1 << 30  # rows times KV heads of a call

    def chunk_spans(self, num_rows: int, num_kv: int) -> int:
        """Return the spans of a chunk; 0: tiles of such a call are not divided."""
        if num_rows > self.max_rows or num_rows * num_kv > self.max_programs:
            return 0
        return max(num_rows // self.rows_per_span, self.min_spans)


# Padded head dim -> configuration. TALL_TILES: prompts of large calls; SHORT_TILES: their decode rows, and
# calls up to 256 rows; SHORT_TILES_512: up to MAX_ONE_LIST_ROWS; SHORT_TILES_96: up to
# MAX_DEEP_PIPELINE_ROWS; CHUNKED_TILES: calls whose longest tile would finish long after the others.
TALL_TILES = {
    64: TileConfig(64, 4, 2),
    128: TileConfig(128, 8, 3, splits_full_blocks=False, prefetches_pages=True),
}
# On Hopper. The span loop has half the instructions a key and does not wait after every tensor core
# instruction (ptxas C7514): 0.67 of the time of TALL_TILES at 8,192 rows.
TALL_TILES_SM90 = {
    64: TileConfig(64, 4, 3, span_loop=True),
    128: TileConfig(128, 8, 3, span_loop=True, specialized_stages=2),
}
SHORT_TILES_512 = {64: TileConfig(16, 4, 3, 168), 128: TileConfig(16, 4, 3, 128)}
SHORT_TILES = {64: TileConfig(16, 2, 3), 128: TileConfig(16, 2, 3)}
SHORT_TILES_96 = {
    64: TileConfig(16, 2, 3),
    128: TileConfig(16, 4, 3, splits_full_blocks=False, prefetches_pages=True, specialized_stages=2),
}
# SmolLM2 heads, contexts of 40 to 1,600 tokens: 64 requests with 2 drafts 38 to 23 µs, 256 requests 49 to 43.
# With more rows the list of chunks takes longer to sort than the chunks gain.
CHUNKED_TILES = {
    64: ChunkedTile(
        TileConfig(16, 4, 3, splits_full_blocks=False, prefetches_pages=True, merges_rows=True),
        max_rows=256, rows_per_span=32, min_spans=4, max_programs=768,
    ),
    128: ChunkedTile(SHORT_TILES_96[128]._replace(merges_rows=True), max_rows=48, rows_per_span=8),
}  # fmt: skip


def chunk_programs(num_rows: int, heads: AttentionShape) -> int:
    """Return the programs of a KV head for tiles in chunks; with more chunks some programs take several."""
    return max(num_rows + num_rows // 2, triton.cdiv(MIN_CHUNK_GRID, heads.num_kv))


def tile_config(configs: dict[int, TileConfig], width: int, is_fp32: bool, group: int) -> TileConfig:
    """Return the configuration for heads of `width` of which `group` share keys."""
    config = configs.get(width, TileConfig(16, 4, 2))
    if is_fp32:  # one thread per output: taller tiles would not fit into registers
        config = TileConfig(16, 4 if width <= 128 else 8, 2)
    return config._replace(height=max(config.height, next_power_of_two(group)))
