"""Measured tiles on disk: the shipped file of sm_90 chips and a cache file per chip."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

from draftproof.ops.triton.gemm.tiles import (
    ANY_ROWS,
    MIN_DOT_COLUMNS,
    MIN_ONE_ROW_COLUMNS,
    ONE_ROW_KINDS,
    Tile,
    TileKey,
)

VERSION = 1
SHIPPED = Path(__file__).with_name("tiles_h200.json")
SHIPPED_CAPABILITY = (9, 0)
_KEY = re.compile(
    r"(dense|fused|experts|experts_gate_up) (\d+)x(\d+) (\w+) rows<=(\d+|any)(?: top (\d+) of (\d+))?"
)


def cache_file(chip_name: str) -> Path:
    """Return the cache file of a chip, below $DRAFTPROOF_CACHE or ~/.cache/draftproof."""
    root = Path(os.environ.get("DRAFTPROOF_CACHE") or Path.home() / ".cache" / "draftproof")
    name = re.sub(r"[^A-Za-z0-9]+", "-", chip_name).strip("-").lower() or "unknown"
    return root / "tiles" / f"{name}.json"


def load_tiles(path: Path) -> dict[TileKey, Tile]:
    """Return the tiles of a file; warn and return nothing if it is unreadable or malformed."""
    try:
        return _decode(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"ignored the GEMM tile cache {path}: {error}", stacklevel=2)
        return {}


def save_tiles(path: Path, chip_name: str, tiles: dict[TileKey, Tile]) -> None:
    """Add tiles to a cache file; an unwritable folder is not an error."""
    lines = {encode_key(key): list(tile) for key, tile in sorted({**load_tiles(path), **tiles}.items())}
    content = {"version": VERSION, "chip": chip_name, "tiles": lines}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(path)  # atomic: a concurrent reader gets the old or the new file
    except OSError as error:
        warnings.warn(f"could not write the GEMM tile cache {path}: {error}", stacklevel=2)


def initial_tiles(chip_name: str, capability: tuple[int, int]) -> dict[TileKey, Tile]:
    """Return the shipped tiles if they fit the chip, updated by the cache file."""
    shipped = load_tiles(SHIPPED) if capability == SHIPPED_CAPABILITY else {}
    return {**shipped, **load_tiles(cache_file(chip_name))}


def encode_key(key: TileKey) -> str:
    """Return the key as text, e.g. "dense 576x1536 bf16 rows<=16"; of experts with " top 8 of 128"."""
    rows = "any" if key.max_rows == ANY_ROWS else str(key.max_rows)
    experts = f" top {key.top_k} of {key.num_experts}" if key.num_experts else ""
    return f"{key.variant} {key.columns}x{key.depth} {key.kind} rows<={rows}{experts}"


def _decode(text: str) -> dict[TileKey, Tile]:
    """Parse a tile file; raise ValueError on a malformed key or tile."""
    content = json.loads(text)
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}, not {VERSION}")
    found = {}
    for name, numbers in content["tiles"].items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise ValueError(f"malformed key {name!r}")
        variant, columns, depth, kind, rows, top_k, num_experts = match.groups()
        *sizes, weight_first = numbers
        powers = all(isinstance(size, int) and size > 0 and size & (size - 1) == 0 for size in sizes[:4])
        max_rows = ANY_ROWS if rows == "any" else int(rows)
        is_one_row = kind in ONE_ROW_KINDS and max_rows == 1
        smallest = (1, MIN_ONE_ROW_COLUMNS, 16) if is_one_row else (16, MIN_DOT_COLUMNS, 16)
        if (
            len(sizes) != 5
            or not powers
            or not 1 <= int(sizes[4]) <= 8
            or any(size < least for size, least in zip(sizes, smallest, strict=False))
        ):
            raise ValueError(f"malformed tile {numbers} of {name!r}")
        key = TileKey(
            variant, int(columns), int(depth), kind, max_rows, int(num_experts or 0), int(top_k or 0)  # type: ignore[arg-type]
        )  # fmt: skip
        found[key] = Tile(*sizes, bool(weight_first))
    return found
