"""Tile selection, the tile cache on disk and the tuner, with a fake timer; no GPU is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import no_gpu

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from draftproof.errors import ConfigError
from draftproof.ops import AttentionShape, KVLayout, Routing, Rows
from draftproof.ops.triton import compile_ahead
from draftproof.ops.triton.attention import few_rows, splitkv
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.gemm import autotune
from draftproof.ops.triton.gemm.cublas import Cublas
from draftproof.ops.triton.gemm.select import Epilogue, GemmPath, GemmSelector, supports_fused
from draftproof.ops.triton.gemm.tile_cache import cache_file, initial_tiles, load_tiles, save_tiles
from draftproof.ops.triton.gemm.tiles import (
    ANY_ROWS,
    QUANTIZED_TILES,
    ROW_BUCKETS,
    Tile,
    TileKey,
    TileTable,
    Variant,
    default_tile,
    fit_tile,
    shared_bytes,
)
from draftproof.ops.triton.gemm.weight import PackedLinear, WeightKind
from draftproof.ops.triton.kernel_utils import Chip
from draftproof.ops.triton.latent.attention import check_shared_memory
from draftproof.ops.triton.moe.tiles import select_tile


def packed(columns: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a packed weight of zeros."""
    return PackedLinear(torch.zeros((columns, depth), dtype=dtype), None)


def test_shipped_tiles_are_selected_on_sm90_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path))
    hopper = TileTable(initial_tiles("NVIDIA H200", (9, 0)))
    assert len(hopper.measured) == 65
    assert hopper.select("dense", 7, packed(576, 1536)) == Tile(16, 16, 256, 2, 3)
    assert hopper.select("dense", 600, packed(576, 1536)) == Tile(128, 128, 64, 8, 3)
    assert hopper.select("fused", 64, packed(6144, 4096)) == Tile(64, 32, 128, 4, 6, True)
    dense = hopper.select("dense", 200, packed(4096, 14336))
    half_of_dense = dense._replace(bn=dense.bn // 2)
    assert hopper.select("fused", 200, packed(4096, 14336)) == half_of_dense
    assert initial_tiles("NVIDIA A100", (8, 0)) == {}


def test_unmeasured_shapes_get_defaults_and_are_reported() -> None:
    table, missed = TileTable(), []
    table.on_miss = lambda key, weight, rows: missed.append((key, rows))
    assert table.select("dense", 5, packed(2048, 1024)) == Tile(16, 32, 64, 4, 8)
    assert table.select("fused", 40, packed(2048, 1024)) == Tile(64, 16, 64, 4, 5)
    assert table.select("dense", 5, packed(2048, 1024, torch.float32)) == Tile(16, 32, 32, 4, 3)
    assert [(key.variant, key.kind, key.max_rows, rows) for key, rows in missed] == [
        ("dense", "bf16", 16, 5),
        ("fused", "bf16", 64, 40),
        ("dense", "fp32", 16, 5),
    ]


@pytest.mark.parametrize("max_shared_bytes", [99 << 10, 163 << 10, 227 << 10])
def test_default_tiles_fit_into_the_shared_memory(max_shared_bytes: int) -> None:
    variants: tuple[tuple[Variant, int], ...] = (
        ("dense", 0),
        ("fused", 0),
        ("experts", 8),
        ("experts_gate_up", 8),
    )
    kinds = ("bf16", "fp32", *QUANTIZED_TILES)
    for variant, top_k in variants:
        for kind, columns, rows in product(kinds, (512, 4096, 8192, 1 << 20), ROW_BUCKETS):
            key = TileKey(variant, columns, 4096, kind, rows, 16 * top_k, top_k)
            tiles = autotune.candidate_tiles(key, max_shared_bytes)
            assert max(shared_bytes(tile, variant, kind) for tile in tiles) <= max_shared_bytes
    large = default_tile("dense", 600, 8192, "bf16")
    assert fit_tile(large, "dense", "bf16", 227 << 10) == large
    assert fit_tile(large, "dense", "bf16", 99 << 10) == large._replace(stages=2)
    assert fit_tile(large._replace(bn=512), "dense", "bf16", 99 << 10) == large._replace(stages=2)


def test_measured_tile_of_experts_with_another_height_is_measured_again() -> None:
    weight, routing = packed(8 * 32, 64), Routing(num_experts=8, top_k=2)
    missed: list[TileKey] = []
    table = TileTable({})
    table.on_miss = lambda key, *_: missed.append(key)
    default = select_tile(table, 16, weight, routing, is_gate_up=False)
    (key,) = missed
    for tile, is_used in ((default._replace(bn=2 * default.bn), True), (default._replace(bm=128), False)):
        table.measured[key] = tile
        missed.clear()
        assert select_tile(table, 16, weight, routing, is_gate_up=False) == (tile if is_used else default)
        assert missed == ([] if is_used else [key])


def test_span_loop_is_used_where_the_shared_memory_has_room_for_it() -> None:
    bf16, partials = torch.bfloat16, splitkv.PartialBuffers(torch.device("cpu"))
    large, small = (splitkv.SplitKVAttention(partials, size) for size in (227 << 10, 99 << 10))
    assert large.tile(1, 128, bf16).span_loop and large.tile(8, 128, bf16).span_loop
    assert small.tile(1, 64, bf16).span_loop
    for tile in (small.tile(1, 128, bf16), large.tile(1, 128, torch.float32), large.tile(1, 256, bf16)):
        assert not tile.span_loop and tile.max_programs == splitkv.MAX_SPLIT_PROGRAMS


FEW = ["few_rows_kernel", "merge_spans_kernel"]
CHUNKS = ["chunk_list_kernel", "prefill_attention_kernel"]
LISTS = ["chunk_list_kernel", "chunk_list_kernel", "choose_list_kernel"]
EVEN = [*LISTS, "warp_specialized_kernel", "prefill_attention_kernel"]
QUANTIZED_FEW = ["quantized_rows_kernel", "merge_spans_kernel"]
QUANTIZED_EVEN = [*LISTS, "quantized_rows_kernel", "prefill_attention_kernel"]
LLAMA = AttentionShape(num_q=32, num_kv=8, dim=128, scale=0.1, window=0)


@pytest.mark.parametrize(
    ("count", "tokens", "changes", "expected"),
    [
        (16, 16384, {}, EVEN),
        (64, 16384, {}, EVEN),
        (2048, 16384, {}, ["tile_lists_kernel", "warp_specialized_kernel", "prefill_attention_kernel"]),
        (1, 16384, {}, FEW),
        (8, 16384, {}, FEW),
        (9, 16384, {}, ["splitkv_attention_kernel"]),
        (1, 16383, {}, ["splitkv_attention_kernel"]),
        (1, 16384, {"window": 4096}, ["splitkv_attention_kernel"]),
        (8, 16384, {"sinks": True}, ["splitkv_attention_kernel"]),
        (1, 16384, {"capability": (10, 0)}, ["splitkv_attention_kernel"]),
        (1, 2048, {"dim": 256}, ["preloaded_attention_kernel"]),
        (2, 2048, {"dim": 256}, ["splitkv_attention_kernel"]),
        (1, 2048, {"dim": 256, "cache": torch.int8}, ["splitkv_attention_kernel"]),
        (16, 16383, {}, CHUNKS),
        (97, 16384, {}, CHUNKS),
        (2047, 16384, {}, ["tile_lists_kernel", "prefill_attention_kernel", "prefill_attention_kernel"]),
        (16, 16384, {"window": 4096}, CHUNKS),
        (64, 16384, {"dim": 64}, CHUNKS),
        (16, 16384, {"num_q": 24}, CHUNKS),
        (16, 16384, {"sinks": True}, CHUNKS),
        *(
            (count, 16384, {"cache": dtype}, expected)
            for dtype in (torch.int8, torch.float8_e4m3fn)
            for count, expected in (
                (1, QUANTIZED_FEW),
                (8, QUANTIZED_FEW),
                (16, QUANTIZED_EVEN),
                (64, QUANTIZED_EVEN),
                (97, CHUNKS),
            )
        ),
        (1, 16383, {"cache": torch.int8}, ["splitkv_attention_kernel"]),
        (1, 16384, {"cache": torch.int8, "sinks": True}, ["splitkv_attention_kernel"]),
        (1, 16384, {"cache": torch.int8, "window": 4096}, ["splitkv_attention_kernel"]),
        (1, 16384, {"cache": torch.int8, "num_q": 24}, ["splitkv_attention_kernel"]),
        (64, 16384, {"cache": torch.int8, "dim": 64}, CHUNKS),
        (16, 16384, {"cache": torch.int8, "capability": (10, 0)}, CHUNKS),
        (
            2048,
            16384,
            {"cache": torch.int8},
            ["tile_lists_kernel", "prefill_attention_kernel", "prefill_attention_kernel"],
        ),
        (16, 16384, {"capability": (10, 0)}, CHUNKS),
        (16, 16384, {"capability": (8, 0)}, CHUNKS),
    ],
)
def test_kernels_of_hopper_are_used_at_long_page_tables(
    count: int, tokens: int, changes: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, _ = no_gpu.simulate_gpu(monkeypatch)
    changes = dict(changes)
    capability = changes.pop("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sinks = torch.zeros(LLAMA.num_q) if changes.pop("sinks", False) else None
    dtype = changes.pop("cache", torch.bfloat16)
    heads = replace(LLAMA, **changes)
    ops = TritonOps(torch.device("cpu"), pdl=True)
    (cache,) = KVLayout(1, heads.num_kv, heads.dim, dtype).allocate(8, 16, torch.device("cpu"))
    column, table = torch.zeros(count, dtype=torch.int64), torch.zeros((4, tokens // 16), dtype=torch.int32)
    q = torch.empty((count, heads.num_q * heads.dim), dtype=torch.bfloat16)
    kernels.clear()
    ops.forward.attention(q, Rows(column, column, column, column, table), heads, cache, sinks)
    assert kernels == expected


def test_registers_of_few_rows_depend_on_rows_and_page_table_alone() -> None:
    cases = product((1, 2, 8), (16384, 32767, 32768, 131072))
    long_rows = {case for case in cases if few_rows.few_rows_config(*case) == few_rows.LONG_ROW_CONFIG}
    assert long_rows == {(1, 32768), (1, 131072)}


def test_latent_attention_in_fp32_is_refused_by_small_chips() -> None:
    heads = AttentionShape(num_q=16, num_kv=1, dim=576, scale=0.1, window=0, value_dim=512)
    small = Chip("RTX 4090", (8, 9), 128, shared_per_program=99 << 10)
    check_shared_memory(torch.bfloat16, heads, small)
    check_shared_memory(torch.float32, heads, replace(small, shared_per_program=163 << 10))
    with pytest.raises(ConfigError, match="RTX 4090 has 101376: use dtype='bfloat16'"):
        check_shared_memory(torch.float32, heads, small)


def test_saved_tiles_are_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path))
    path = cache_file("NVIDIA GeForce RTX 4090")
    assert path == tmp_path / "tiles" / "nvidia-geforce-rtx-4090.json"
    first = {TileKey("dense", 64, 128, "bf16", 16): Tile(16, 16, 64, 2, 3)}
    second = {TileKey("fused", 64, 128, "bf16", ANY_ROWS): Tile(64, 16, 64, 4, 4, True)}
    second[TileKey("experts_gate_up", 64, 128, "bf16", 32, 128, 8)] = Tile(16, 32, 128, 4, 4)
    save_tiles(path, "NVIDIA GeForce RTX 4090", first)
    save_tiles(path, "NVIDIA GeForce RTX 4090", second)
    assert load_tiles(path) == first | second == initial_tiles("NVIDIA GeForce RTX 4090", (8, 9))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


BROKEN = {
    "cut": '{"version": 1, "tiles": {"dense 64x1',
    "version": json.dumps({"version": 2, "tiles": {}}),
    "list": "[]",
    "key": json.dumps({"version": 1, "tiles": {"dense 64 bf16": [16, 16, 64, 2, 3, False]}}),
    "sizes": json.dumps({"version": 1, "tiles": {"dense 64x64 bf16 rows<=16": [16, 24, 64, 2, 3, False]}}),
    "short": json.dumps({"version": 1, "tiles": {"dense 64x64 bf16 rows<=16": [16, 16]}}),
    "height": json.dumps({"version": 1, "tiles": {"dense 64x64 w8a8 rows<=16": [1, 16, 64, 2, 3, False]}}),
    "stages": json.dumps({"version": 1, "tiles": {"dense 64x64 bf16 rows<=16": [16, 16, 64, 2, 99, False]}}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_corrupted_cache_file_is_ignored_with_a_warning(content: str, tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_text(content)
    with pytest.warns(UserWarning, match="ignored the GEMM tile cache"):
        assert load_tiles(path) == {}
    assert load_tiles(tmp_path / "absent.json") == {}


def test_unwritable_cache_folder_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not write"):
        save_tiles(tmp_path / "file" / "chip.json", "chip", {})


def tuner_of(cost: Callable[[Any], float], clock: Callable[[], float] = lambda: 0.0) -> tuple[Any, Any, list]:
    """Return a tuner whose launches are their tiles, its table and what it saved."""

    def make_call(key: Any, weight: Any, rows: int, tile: Any) -> Callable[[], Any]:
        return lambda: tile

    def timer(calls: Sequence[Callable[[], Any]]) -> float:
        return cost(calls[0]())

    table, saved = TileTable(), []
    return autotune.TileTuner(table, make_call, timer, saved.append, clock), table, saved


def collect(table: Any, *shapes: tuple[int, int, int]) -> None:
    """Select tiles of (rows, columns, depth) as a warm-up does."""
    compile_ahead._thread_state.compiling = True
    try:
        for rows, columns, depth in shapes:
            table.select("dense", rows, packed(columns, depth))
    finally:
        compile_ahead._thread_state.compiling = False


def test_fastest_tile_is_stored_and_selected() -> None:
    best = Tile(16, 32, 256, 4, 8, True)
    tuner, table, saved = tuner_of(lambda tile: 1.0 if tile == best else 2.0)
    compiled: list[int] = []
    collect(table, (3, 2048, 1024), (9, 2048, 1024))
    found = tuner.tune(lambda calls, report: compiled.append(len(calls)), lambda *_: None)
    tiles = autotune.candidate_tiles(TileKey("dense", 2048, 1024, "bf16", 16))
    assert list(found.values()) == [best] and saved == [found] and compiled == [len(tiles)]
    assert table.select("dense", 12, packed(2048, 1024)) == best
    assert tuner.tune(lambda *_: compiled.append(0), lambda *_: None) == {} and compiled == [len(tiles)]


@pytest.mark.parametrize(
    "failure", [None, RuntimeError("no such binary"), OutOfResources(232448, 101376, "shared memory")]
)
def test_default_stays_if_candidates_are_hardly_faster_or_fail(failure: Exception | None) -> None:
    default = default_tile("dense", 16, 2048, "bf16")

    def cost(tile: Any) -> float:
        if failure is not None and tile != default:
            raise failure
        return 1.0 if tile == default else 0.98

    tuner, table, _ = tuner_of(cost)
    collect(table, (3, 2048, 1024))
    assert list(tuner.tune(lambda *_: None, lambda *_: None).values()) == [default]


def test_measurement_ends_at_its_time_limit() -> None:
    times = iter([0.0, 0.0, autotune.MAX_TUNING_SECONDS + 1])
    tuner, table, saved = tuner_of(lambda tile: 1.0, lambda: next(times))
    collect(table, (3, 2048, 1024), (3, 4096, 1024), (3, 8192, 1024))
    assert len(tuner.tune(lambda *_: None, lambda *_: None)) == 1 and len(saved[0]) == 1


def test_shapes_outside_a_warm_up_are_not_collected() -> None:
    tuner, table, saved = tuner_of(lambda tile: 1.0)
    table.select("dense", 3, packed(2048, 1024))
    assert tuner.tune(lambda *_: None, lambda *_: None) == {} and saved == []


def test_candidates_fit_and_are_few() -> None:
    for variant in ("dense", "fused"):
        for rows in ROW_BUCKETS:
            for columns in (64, 1024, 5000, 151936):
                tiles = autotune.candidate_tiles(TileKey(variant, columns, 64, "bf16", rows))  # type: ignore[arg-type]
                assert 1 <= len(tiles) == len(set(tiles)) <= 6
        assert len(autotune.candidate_tiles(TileKey(variant, 64, 64, "fp32", 16))) == 1  # type: ignore[arg-type]


def test_tuning_is_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autotune.is_tuning_enabled()
    monkeypatch.setenv("DRAFTPROOF_TUNE_TILES", "0")
    assert not autotune.is_tuning_enabled()


def test_kernel_is_selected_only_for_listed_weight_formats() -> None:
    selector = GemmSelector(None, Cublas(None, "never"))  # type: ignore[arg-type]
    x = torch.zeros((4, 64), dtype=torch.bfloat16)
    bf16, fp32 = packed(128, 64), packed(128, 64, torch.float32)
    assert bf16.kind is WeightKind.BF16 and fp32.kind is WeightKind.FP32
    assert selector.select_gemm(bf16, x) is GemmPath.TRITON
    assert selector.select_gemm(bf16, x, Epilogue.ACT_MUL) is GemmPath.TRITON_FUSED
    assert selector.select_gemm(fp32, x.float(), Epilogue.ACT_MUL) is GemmPath.TRITON
    assert not supports_fused(bf16, 4, Epilogue.ROPE_STORE, head_dim=24)
    assert not supports_fused(bf16, 513, Epilogue.ACT_MUL)
    unknown = PackedLinear(torch.zeros((128, 64), dtype=torch.int8), None)
    assert not any(supports_fused(unknown, 4, epilogue, 64) for epilogue in Epilogue)
    with pytest.raises(ConfigError, match="no GEMM kernel reads"):
        selector.select_gemm(unknown, x)
