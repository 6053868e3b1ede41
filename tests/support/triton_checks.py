"""Checks of the triton backend under Triton's interpreter; `test_ops_triton` runs this file as a process.

The interpreter has to be enabled before the kernels are imported. numpy has no bf16, and its matrix product
sums in an order that depends on the shape. So the tensor core of `triton_interpreter` sums in fp64 and
rounds once. The checks cover indexing, masks, ties, noise, and that rows do not depend on other rows. The
bits of a GPU are checked by `bench/micro/gpu/op_times.py`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import triton_interpreter  # noqa: F401  # before the kernels
from draftproof.models.weight_formats import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4GroupWeight,
    W8A8Weight,
    WeightTensor,
)
from draftproof.ops import Attention, AttentionShape, Rows, resolve
from draftproof.ops.reference.backend import ReferenceOps
from draftproof.ops.triton import graphs, kl_grad
from draftproof.ops.triton.attention import merge, prefill, preloaded, worklist
from draftproof.ops.triton.attention import splitkv as attention_kernels
from draftproof.ops.triton.attention.tiles import ChunkedTile, TileConfig
from draftproof.ops.triton.gemm import dense, fused
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.gemm.weight import FOUR_BITS
from draftproof.ops.triton.quantized import gemm as quantized
from draftproof.ops.triton.quantized.row_quantization import QuantizedRows, prepare_rows
from draftproof.ops.triton.sampling import topk, topk_topp
from draftproof.train.model import loss
from merge_kernels import merge_rows_kernel
from opcheck import Paged, assert_close, bits
from quantized_files import MXFP4_GROUP, mxfp4_weight

torch.set_num_threads(1)
CPU = torch.device("cpu")
INF = float("inf")
DTYPES = (torch.float32, torch.bfloat16)

ops, ref = resolve("triton", CPU), ReferenceOps(CPU)
split_kv = attention_kernels.SplitKVAttention(attention_kernels.PartialBuffers(CPU), 1 << 30)
CHECKS: dict[str, dict[str, Callable[[], None]]] = defaultdict(dict)  # module -> name -> check


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check under its module and the name of its function."""
    CHECKS[function.__module__][function.__name__] = function
    return function


def run_modules(modules: Iterable[str]) -> None:
    """Import the modules one after another; print the failure of each check as JSON on the last line."""
    found = {}
    for module in modules:
        import_module(module)
        found[module] = failures_of(CHECKS[module])
    print(json.dumps(found))


def run_checks(checks: dict[str, Callable[[], None]], only: Iterable[str] = ()) -> None:
    """Print the failure of each check as JSON on the last line."""
    print(json.dumps(failures_of(checks, only)))


def failures_of(checks: dict[str, Callable[[], None]], only: Iterable[str] = ()) -> dict[str, str]:
    """Return the failure of each check, "" if there is none."""
    gc.freeze()
    gc.set_threshold(50_000)  # the interpreter makes many objects, and few cycles
    results = {}
    for name in only or checks:
        start, results[name] = time.perf_counter(), ""
        try:
            checks[name]()
        except Exception:
            results[name] = traceback.format_exc()
        print(f"{name} {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return results


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_batch_invariant(call: Callable[[list[int]], Tensor], pool: int, batches: list[list[int]]) -> None:
    """Check that each row has the same bits in a call of its own and in every batch."""
    single = {i: bits(call([i])) for i in range(pool)}
    for batch in batches:
        out = call(batch)
        for place, row in enumerate(batch):
            assert bits(out[place]) == single[row], f"row {row} at {place} of {len(batch)}"


# --- forward pass -----------------------------------------------------------------------------------------


@check
def linear() -> None:
    for dtype in DTYPES:
        for columns, depth in ((53, 72), (97, 200), (1, 16)):
            weight = (randn(columns, depth, seed=1) / depth**0.5).to(dtype)
            for bias in (None, randn(columns, seed=2, dtype=dtype)):
                packed, want = ops.forward.pack_linear(weight, bias), ref.forward.pack_linear(weight, bias)
                for rows in (0, 1, 17):
                    x = randn(rows, depth, seed=rows, dtype=dtype)
                    assert_close(ops.forward.linear(x, packed), ref.forward.linear(x, want), dtype)
                    wide = ops.forward.linear(x, packed, torch.float32)
                    assert_close(wide, ref.forward.linear(x, want, torch.float32), torch.float32)


def quantized_weights(columns: int, depth: int) -> Iterable[WeightTensor]:
    """Return a weight of each format, some with zero points."""
    matrix = randn(columns, depth, seed=3) / 16
    yield W8A8Weight.quantize(matrix)
    yield Fp8Weight.quantize(matrix)
    yield Fp8BlockWeight.quantize(matrix)
    yield Fp8BlockWeight.cat([Fp8BlockWeight.quantize(matrix)] * 2)
    groups = Int4GroupWeight.quantize(matrix)
    yield groups
    assert groups.scales is not None
    zeros = torch.arange(groups.scales.numel()).view_as(groups.scales) % 16
    yield Int4GroupWeight.create(groups.integers(), groups.scales.float(), zeros)
    if depth % MXFP4_GROUP == 0:
        yield mxfp4_weight(matrix)


def pack_stored(ops: Any, weight: WeightTensor, bias: Tensor | None) -> Any:
    """Pack a quantised weight in its own format, also one that engines refuse."""
    return ops.forward.pack_quantized(weight.format, weight.data, weight.scales, bias, weight.zeros)


@check
def quantized_linear_has_the_bits_of_the_reference() -> None:
    """Compare bits, since the tensor core of the interpreter sums without rounding, as the reference does."""
    for (columns, depth), dtype in product(((53, 72), (20, 320)), DTYPES):
        for weight in quantized_weights(columns, depth):
            for bias in (None, randn(weight.shape[0], seed=2)):
                packed, want = (pack_stored(o, weight, bias) for o in (ops, ref))
                for rows in (0, 3):
                    x = randn(rows, depth, seed=rows, dtype=dtype)
                    x[1:2] = 0
                    got, defined = ops.forward.linear(x, packed), ref.forward.linear(x, want)
                    if weight.format in FOUR_BITS:  # summed in pieces
                        assert_close(got, defined, dtype)
                    else:
                        assert torch.equal(got, defined), weight.format


@check
def quantized_linear_with_an_epilogue_has_the_bits_of_two_ops() -> None:
    heads, dtype, rows = AttentionShape(num_q=2, num_kv=1, dim=32, scale=0.2, window=0), torch.bfloat16, 3
    rope, x, norm = (
        randn(64, 32, seed=5),
        randn(rows, 160, seed=1, dtype=dtype),
        randn(160, seed=9, dtype=dtype),
    )
    for weight in quantized_weights(128, 160):
        packed = pack_stored(ops, weight, randn(weight.shape[0], seed=2))
        normed, total = ops.forward.add_rms_norm(x, x, norm, 1e-6)
        given, same = ops.forward.add_rms_norm_input(x, x, norm, 1e-6, packed)
        plain = ops.forward.linear(normed, packed)
        assert torch.equal(total, same) and torch.equal(ops.forward.linear(given, packed), plain)
        alone = ops.forward.linear(ops.forward.rms_norm_input(x, norm, 1e-6, packed), packed)
        assert torch.equal(alone, ops.forward.linear(ops.forward.rms_norm(x, norm, 1e-6), packed))
        before = ops.forward.rms_norm(x, norm, 1e-6)
        want = ops.forward.add_rms_norm(before, x, norm, 1e-6)
        got = ops.forward.norm_add_rms_norm(x, norm, x, norm, 1e-6, packed)
        assert torch.equal(ops.forward.linear(got[0], packed), ops.forward.linear(want[0], packed))
        assert torch.equal(got[1], want[1])
        assert torch.equal(ops.forward.linear_act_mul(given, packed), ops.forward.act_mul(plain))
        if packed.columns != (heads.num_q + 2 * heads.num_kv) * heads.dim:
            continue
        attention, paged = Attention(heads, packed, None), [Paged(heads, [40], dtype) for _ in range(2)]
        lines = [one.rows([(0, i) for i in range(rows)]) for one in paged]
        got = ops.forward.linear_rope_store(given, lines[0], attention, rope, paged[0].cache, 1e-6)
        want = ops.forward.rope_store(plain, lines[1], attention, rope, paged[1].cache, 1e-6)
        assert bits(got) == bits(want) and bits(paged[0].cache) == bits(paged[1].cache)


@check
def linear_is_batch_invariant() -> None:
    packed = ops.forward.pack_linear(randn(70, 136, seed=1), randn(70, seed=2))
    x = randn(70, 136, seed=3)
    x[5], x[6, 3] = torch.nan, INF
    batches = [list(range(20)), list(range(19, 2, -1))]
    assert_batch_invariant(lambda at: ops.forward.linear(x[at], packed), 20, batches)


@check
def tile_does_not_change_bits_of_linear() -> None:
    x, packed = randn(80, 512, seed=2), ops.forward.pack_linear(randn(40, 512, seed=1))
    few, many = torch.empty(6, 40), torch.empty(80, 40)
    ops.forward.gemm(x[:6], packed, few, tile=Tile(16, 16, 64, 4, 2))
    ops.forward.gemm(x, packed, many, tile=Tile(32, 32, 64, 4, 2))
    assert torch.equal(few, many[:6])


@check
def weight_loaded_first_does_not_change_bits() -> None:
    tile, dtype = Tile(16, 16, 64, 4, 2), torch.bfloat16
    for depth in (64, 320):
        x = randn(5, depth, seed=1, dtype=dtype)
        packed = ops.forward.pack_linear(randn(40, depth, seed=2, dtype=dtype))
        found = []
        for first in (False, True):
            patch = {"loads_weight_first": lambda *_, first=first: first}
            with mock.patch.multiple(dense, **patch), mock.patch.multiple(fused, **patch):
                out = torch.empty(5, 40, dtype=dtype)
                ops.forward.gemm(x, packed, out, tile=tile)
                gated = fused.linear_act_mul(x, packed, torch.empty(5, 20, dtype=dtype), False, tile)
                found.append((bits(out), bits(gated)))
        assert found[0] == found[1], depth


@check
def one_row_tile_does_not_change_bits_of_w8a8() -> None:
    random = torch.Generator().manual_seed(1)
    for depth in (128, 208, 320):  # one iteration, an incomplete second one, an incomplete third one
        data = torch.randint(-127, 128, (40, depth), generator=random).to(torch.int8)
        packed = ops.forward.pack_quantized("w8a8", data, randn(40, seed=2).abs())
        rows = prepare_rows(randn(3, depth, seed=3, dtype=torch.bfloat16), packed, False)
        want, got = torch.empty(3, 40), torch.empty(1, 40)
        quantized.linear(rows, packed, want, False, Tile(16, 16, 64, 4, 2))
        for at in range(3):
            row = QuantizedRows(rows.values[at : at + 1], rows.scales[at : at + 1], rows.dtype)
            quantized.linear(row, packed, got, False, Tile(1, 8, 128, 4, 1))
            assert torch.equal(got[0], want[at]), (depth, at)


@check
def row_quantised_by_the_gemm_has_the_bits_of_separate_kernels() -> None:
    """Compare depths of one block and of two, and rows with NaN, infinity or zeros."""
    tile = Tile(1, 8, 128, 1, 1)
    for depth, numbers in ((208, (None, torch.nan, INF, 0.0)), (2320, (None, torch.nan))):
        x = randn(1, depth, seed=3)
        x[0, -1] = -9.0  # the largest magnitude is the last
        data = torch.randint(-127, 128, (24, depth), generator=torch.Generator().manual_seed(1))
        scales, bias = randn(24, seed=2).abs(), randn(24, seed=4)
        packed = ops.forward.pack_quantized("w8a8", data.to(torch.int8), scales, bias)
        for number in numbers:
            row, found = x.bfloat16(), []
            if number is not None:
                row[0, 2 if number else slice(None)] = number  # in the other half of a word
            separate = prepare_rows(row, packed, False)
            assert isinstance(separate, QuantizedRows)
            assert prepare_rows(row, packed, False, tile) is row
            for given in (row, separate):
                out = torch.empty(1, 24)
                quantized.linear(given, packed, out, False, tile)
                found.append(out)
            assert bits(found[0]) == bits(found[1]), (depth, number)
            assert bool(out.isfinite().all()) == bool(row.isfinite().all())
        with mock.patch.object(quantized, "quantized_linear_kernel") as kernel:
            ops.forward.linear(x.bfloat16(), packed)
            ops.forward.linear(x.bfloat16().repeat(2, 1), packed)
        launches = kernel.__getitem__.return_value.call_args_list
        assert [launch.kwargs["X_BLOCK"] > 0 for launch in launches] == [True, False]


@check
def row_buckets_are_monotonic() -> None:
    sizes = [graphs.bucket_of(rows) for rows in range(1, 3001)]
    assert all(size >= rows for rows, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [*graphs.CAPTURED_ROWS, 1024, 1536, 2048, 2560, 3072]


@check
def elementwise() -> None:
    for dtype in DTYPES:
        for width in (8, 45, 576):
            weight, x = randn(width, seed=1, dtype=dtype), 3 * randn(5, width, seed=2, dtype=dtype)
            residual = randn(5, width, seed=3, dtype=dtype)
            assert_close(ops.forward.rms_norm(x, weight, 1e-6), ref.forward.rms_norm(x, weight, 1e-6), dtype)
            got, want = (each.forward.add_rms_norm(x, residual, weight, 1e-5) for each in (ops, ref))
            assert_close(got[0], want[0], dtype)
            assert torch.equal(got[1], want[1])
            sums = x.float() * 1.001  # fp32 sums are rounded before they are added
            rounded = ops.forward.add_rms_norm(sums.to(dtype), residual, weight, 1e-5)
            assert all(map(torch.equal, ops.forward.add_rms_norm(sums, residual, weight, 1e-5), rounded))
            both = 4 * randn(5, 2 * width, seed=4, dtype=dtype)
            assert_close(ops.forward.act_mul(both), ref.forward.act_mul(both), dtype)
            assert torch.equal(ops.forward.embed(torch.tensor([4, 0, 4]), x), x[[4, 0, 4]])
            assert not len(ops.forward.rms_norm(x[:0], weight, 1e-6))
            assert not len(ops.forward.act_mul(both[:0])) + len(ops.forward.embed(torch.arange(0), x))
            for tokens in (torch.tensor([0, 7, 30, 63, 64]), torch.arange(300) % 65, torch.arange(0)):
                found, want = (one.forward.vocab_places(tokens, 22, 1, 3) for one in (ops, ref))
                assert all(map(torch.equal, found, want))
            joined = (torch.arange(0), x, weight, x[:0], weight, 1e-6)
            assert ops.forward.embed_norm_concat(*joined).shape == (0, 2 * width)
    gate = torch.tensor([-1e4, -88.0, -0.0, 0.0, 88.0, 1e4, 1.0, -1.0])
    both = torch.cat([gate, torch.ones(8)])[None]
    assert_close(ops.forward.act_mul(both), ref.forward.act_mul(both), torch.float32)
    x, weight = randn(9, 45), randn(45, seed=1)
    batches = [list(range(9)), [7, 3]]
    assert_batch_invariant(lambda at: ops.forward.rms_norm(x[at], weight, 1e-6), 9, batches)


HEADS = {
    "grouped": AttentionShape(num_q=6, num_kv=2, dim=16, scale=0.25, window=0),
    "one_kv": AttentionShape(num_q=3, num_kv=1, dim=8, scale=0.4, window=0),
    "window": AttentionShape(num_q=4, num_kv=2, dim=8, scale=0.35, window=9),
    "long_window": AttentionShape(num_q=2, num_kv=1, dim=24, scale=0.25, window=70),
}
LENGTHS = [1, 5, 33, 132, 64, 65]


@check
def rope_store() -> None:
    where = [(0, 0), (3, 17), (3, 18), (3, 19), (4, 63), (5, 2)]
    for dtype in DTYPES:
        for heads in (HEADS["grouped"], HEADS["long_window"]):
            angles = torch.arange(160)[:, None] / 10.0 ** torch.arange(heads.dim // 2)[None]
            rope = torch.cat([angles.cos(), angles.sin()], dim=1)
            qkv = randn(6, (heads.num_q + 2 * heads.num_kv) * heads.dim, seed=3, dtype=dtype)
            for norms in ([None, None], [randn(heads.dim, seed=i, dtype=dtype) for i in (1, 2)]):
                paged = [Paged(heads, LENGTHS, dtype) for _ in range(2)]
                attention = Attention(heads, None, None, *norms)
                q = [
                    backend.forward.rope_store(qkv, p.rows(where), attention, rope, p.cache.zero_(), 1e-6)
                    for backend, p in zip((ops, ref), paged, strict=True)
                ]
                assert_close(q[0], q[1], dtype)
                assert_close(paged[0].cache, paged[1].cache, dtype)
                assert torch.equal(paged[0].cache[1], paged[1].cache[1])
    rows = paged[0].rows(where)
    rows.slots[2:4] = -1  # padding stores nothing
    cache = torch.full_like(paged[0].cache, 7.0)
    ops.forward.rope_store(qkv, rows, Attention(heads, None, None), rope, cache, 1e-6)
    flat = cache.view(2, -1, heads.num_kv, heads.dim)
    assert bool((flat[:, rows.kv_index[2:4]] == 7).all()) and bool((flat[:, rows.kv_index[:2]] != 7).any())


def attend(heads: AttentionShape, paged: Paged, q: dict, where: list) -> Tensor:
    x = torch.stack([q[at] for at in where])
    return ops.forward.attention(x, paged.rows(where), heads, paged.cache)


@check
def attention() -> None:
    """Cover slots of unequal length, shuffled pages, NaN in memory that no row may read, all head shapes."""
    for name, heads in HEADS.items():
        for dtype in DTYPES if name == "grouped" else DTYPES[:1]:
            paged = Paged(heads, LENGTHS, dtype)
            for where in (
                [(3, 131)],
                [(5, 64), (1, 4), *((3, p) for p in range(122, 132)), (0, 0)],
                [(4, p) for p in range(40, 64)],
            ):
                x = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype)
                arguments = x, paged.rows(where), heads, paged.cache
                assert_close(ops.forward.attention(*arguments), ref.forward.attention(*arguments), dtype)
    assert len(ops.forward.attention(x[:0], paged.rows([]), heads, paged.cache)) == 0


@check
def prefill_attention_has_the_bits_of_split_kv() -> None:
    """Compare the loop over tiles with parallel spans: few rows, many rows, padding."""
    for name, dtype in (("grouped", DTYPES[1]), ("grouped", DTYPES[0]), ("long_window", DTYPES[0])):
        heads = HEADS[name]
        paged = Paged(heads, [270, 5, 70, 1], dtype)
        where = [(0, p) for p in range(262, 270)] + [(1, 4), *((2, p) for p in range(62, 70)), (3, 0)]
        x, rows = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype), paged.rows(where)
        rows.slots[-1] = -1
        plain = ops.forward.attention(x, rows, heads, paged.cache)[:-1]
        config = TileConfig(16, 2, 3)
        ahead = {32: config._replace(splits_full_blocks=False, prefetches_pages=True)}
        tables = {"SHORT_TILES_96": ahead, "TALL_TILES": ahead}
        for few, cut in ((1000, 1000), (1000, 0), (0, 0)):
            chunked = ChunkedTile(config._replace(splits_full_blocks=False), max_rows=cut, rows_per_span=8)
            limits = {"MAX_ONE_LIST_ROWS": few, "MIN_CHUNKED_PROGRAMS": 1, "CHUNKED_TILES": {32: chunked}}
            with (
                mock.patch.multiple(prefill, **limits, **tables),
                mock.patch.object(worklist, "BLOCK", 16),
                mock.patch.object(attention_kernels, "MAX_SPLIT_PROGRAMS", 1),
            ):
                ops.forward.begin_pass(rows)
                got = ops.forward.attention(x, rows, heads, paged.cache)
                assert bits(got[:-1]) == bits(plain), (name, dtype, few, cut)
                part = paged.rows(where[8:-1])  # not the rows of `begin_pass`
                got = ops.forward.attention(x[8:-1], part, heads, paged.cache)
                assert bits(got) == bits(plain[8:]), (name, dtype, few, cut)
                assert not ops.forward._partials.counters.any()
        want = ref.forward.attention(x[:-1], paged.rows(where[:-1]), heads, paged.cache)
        assert_close(plain, want, dtype)


@check
def span_loaded_early_does_not_change_bits_of_attention() -> None:
    """Compare decode rows, drafts, padding and one or several spans a program, with windows and sinks."""
    row, drafts = [(0, 299)], [(0, 255 + i) for i in range(3)] + [(1, 4), (2, 140), (1, 0)]
    wide = AttentionShape(num_q=2, num_kv=1, dim=136, scale=0.1, window=0)
    for heads in (wide, replace(wide, window=200), replace(wide, num_q=6, num_kv=2)):
        paged = Paged(heads, [300, 5, 150], torch.bfloat16)
        for lines, sinks, programs in product((row, drafts), (None, randn(heads.num_q)), (1, 800)):
            q = randn(len(lines), heads.num_q * heads.dim, seed=1, dtype=torch.bfloat16)
            rows, found = paged.rows(lines), []
            rows.slots[1:][-1:] = -1  # padding
            tile = attention_kernels.SplitTile(16, 4, 3, True, True, max_programs=programs)
            for limit in (8, 0):
                out = torch.zeros_like(q)
                with (
                    mock.patch.object(attention_kernels.SplitKVAttention, "tile", lambda *_, tile=tile: tile),
                    mock.patch.object(preloaded, "MAX_SELECTED_ROWS", limit),
                ):
                    split_kv(q, rows, heads, paged.cache, out, False, sinks)
                found.append(bits(out))
            assert found[0] == found[1], (heads, lines, programs)
            assert not split_kv._partials.counters.any()


@check
def attention_tile_options_do_not_change_bits() -> None:
    """Compare the loop over spans and the merge by rows with the plain kernels: three launches, odd pages."""
    cases = (("grouped", DTYPES[1], DTYPES[1], 8), ("long_window", DTYPES[0], DTYPES[0], 8))
    for name, dtype, kv_dtype, page in (*cases, ("grouped", DTYPES[1], torch.int8, 128)):
        heads = HEADS[name]
        paged = Paged(heads, [645, 5, 128], kv_dtype, page_size=page)
        where = [(0, p) for p in range(638, 642)] + [(1, 4), (2, 127), (2, 126)]
        x, rows = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype), paged.rows(where)
        rows.slots[-1] = -1
        plain = ops.forward.attention(x, rows, heads, paged.cache)[:-1]
        tile = TileConfig(16, 1, 2, span_loop=True, merges_rows=True)
        split = attention_kernels.SplitTile(16, 1, 2, span_loop=True, merges_rows=True, max_programs=32)
        with (
            mock.patch.object(attention_kernels, "TILES", ((1 << 30, split),)),
            mock.patch.object(merge, "MAX_SPANS_IN_FLIGHT", 4),
        ):
            got = ops.forward.attention(x, rows, heads, paged.cache)[:-1]
            assert bits(got) == bits(plain), (name, kv_dtype)
            for max_rows in (1000, 0):
                chunked = ChunkedTile(tile, max_rows=max_rows, rows_per_span=8)
                tables = {"TALL_TILES": {32: tile}, "CHUNKED_TILES": {32: chunked}}
                with (
                    mock.patch.multiple(prefill, MAX_ONE_LIST_ROWS=0, MIN_CHUNKED_PROGRAMS=1, **tables),
                    mock.patch.object(attention_kernels, "MAX_SPLIT_PROGRAMS", 1),
                ):
                    got = ops.forward.attention(x, rows, heads, paged.cache)[:-1]
                    assert bits(got) == bits(plain), (name, kv_dtype, max_rows)
        assert not ops.forward._partials.counters.any()


@check
def work_lists_hold_short_and_tall_tiles() -> None:
    """Check that rows of a slot are divided into tiles by height and that padding has no tile."""
    slots = torch.tensor([4] * 8 + [2] + [3] * 3 + [4] * 2 + [-1] * 3)
    rows = Rows(slots, slots, slots, slots, torch.zeros((5, 1), dtype=torch.int32))
    for block in (2, 8, 1024):
        with mock.patch.object(worklist, "BLOCK", block):
            short, tall = worklist.WorkLists().short_and_tall(rows, 2, 5)
        assert short[: 1 + short[0]].tolist() == [2, 8, 12], block
        assert tall[: 1 + tall[0]].tolist() == [3, 0, 5, 9], block


@check
def work_lists_sort_tiles_by_keys() -> None:
    """Check the order, most keys last, of whole tiles, of chunks, and of tiles with a sliding window."""
    span, chunks = attention_kernels.SPAN, worklist.MAX_CHUNKS
    slots = torch.tensor([4] * 3 + [2] + [3] * 2 + [-1] * 2)
    positions = torch.tensor([7, 8, 9, 5 * span, span - 1, span, 0, 0])
    rows = Rows(slots, positions, slots, slots, torch.zeros((5, 1), dtype=torch.int32))
    listed = worklist.WorkLists().by_keys
    whole = listed(rows, 2, 0, 0)
    assert whole[: 1 + whole[0]].tolist() == [4, 0, 2, 4, 3]  # 9, 10, 129 and 641 keys
    cut = listed(rows, 2, 2, 0)  # two spans a chunk: slot 2 has six spans, slot 3 two
    want = [(0, 0), (2, 0), (3, 2), (4, 0), (3, 0), (3, 1)]
    assert cut[1 : 1 + cut[0]].tolist() == [row * chunks + part for row, part in want]
    near = listed(rows, 2, 2, span)  # slot 2 sees spans 4 and 5: its first key is in span 4
    want = [(0, 0), (2, 0), (3, 0), (4, 0)]
    assert near[1 : 1 + near[0]].tolist() == [row * chunks + part for row, part in want]


@check
def merge_by_columns_has_the_bits_of_the_merge_by_rows() -> None:
    """Merge partial results of 1 to 100 spans; the last ones may be invisible, and memory behind them NaN."""
    heads, dim, stride = 2, 64, 101
    for count, visible in ((1, 1), (31, 31), (32, 30), (33, 32), (64, 64), (65, 65), (100, 97)):
        parts = randn(heads * stride, dim, seed=count, dtype=torch.float32).view(heads, stride, dim)
        stats = randn(heads * stride, 2, seed=1, dtype=torch.float32).view(heads, stride, 2) * 4
        stats[..., 1].abs_()
        stats[:, visible:, 0], stats[:, visible:, 1], parts[:, visible:] = -torch.inf, 0, 0
        stats[:, count:], parts[:, count:] = torch.nan, torch.nan
        want, got = torch.empty((1, heads * dim)), torch.full((2, heads * dim), torch.nan)
        merge_rows_kernel[(1,)](parts, stats, want, stride, count, HEADS=heads, D=dim)
        slots, positions = torch.tensor([0, -1]), torch.tensor([count, 9]) * attention_kernels.SPAN - 1
        merge.merge_spans_kernel[(2, heads, dim // merge.MERGE_COLUMNS)](
            slots, positions, parts, stats, got, stride,
            HEADS=heads, D=dim, COLUMNS=merge.MERGE_COLUMNS, SPAN=attention_kernels.SPAN, PDL=False,
        )  # fmt: skip
        assert bits(got[:1]) == bits(want), count
        assert got[1].isnan().all()  # padding


@check
def work_lists_choose_whole_tiles_where_they_are_long_and_even() -> None:
    """Check which list is empty: even tiles, one longer tile, a wave with one tile, short tiles, padding."""
    span, per_wave, long = attention_kernels.SPAN, 4, worklist.MIN_EVEN_SPANS
    cases = (
        ([64] * 4, True),
        ([80] + [80, 80, 80], True),
        ([64, 63, 60, 50], True),
        ([512, 64, 64, 64], False),
        ([64] * 5, False),
        ([long] * 4, True),
        ([long - 1] * 4, False),
        ([64] * 8 + [0], True),
        ([64] * 7, True),
    )
    for lengths, is_even in cases:
        slots = torch.tensor([slot if n else -1 for slot, n in enumerate(lengths)])
        positions = torch.tensor([max(n * span - 1, 0) for n in lengths])
        rows = Rows(slots, positions, slots, slots, torch.zeros((len(lengths), 1), dtype=torch.int32))
        for chunk in (0, 16):
            want = is_even and (chunk > 0 or len(lengths) <= per_wave)
            lists = worklist.WorkLists()
            lists.begin(rows)
            expected = worklist.WorkLists().by_keys(rows, 2, chunk, 0)
            even, others = lists.even_or_others(rows, 16, 2, chunk, per_wave)
            assert (even[0] > 0, others[0] > 0) == (want, not want), lengths
            if want:
                assert sorted(even[1 : 1 + even[0]].tolist()) == [i for i, n in enumerate(lengths) if n]
            else:
                count = expected[0]
                assert torch.equal(others[: 1 + count], expected[: 1 + count]), lengths


def spans(heads: AttentionShape) -> tuple[Paged, dict, list]:
    paged = Paged(heads, [150, 20], torch.float32)
    watched = [(0, p) for p in (3, 63, 64, 127, 128, 149)] + [(1, 19)]
    return paged, {at: randn(heads.num_q * heads.dim, seed=i) for i, at in enumerate(paged.pool)}, watched


@check
def attention_is_batch_invariant() -> None:
    """Compare single rows in parallel spans of 64 tokens with verify rows and with a loop over spans."""
    batches = [[(0, 149)], [(0, p) for p in range(120, 150)] + [(1, p) for p in range(15, 20)]]
    verify = [(0, p) for p in range(124, 130)] + [(1, 19)]
    for name in ("grouped", "long_window"):
        heads = HEADS[name]
        with mock.patch.object(attention_kernels, "SPAN", 64):
            paged, q, watched = spans(heads)
            single = {at: bits(attend(heads, paged, q, [at])[0]) for at in watched}
            want = ref.forward.attention(q[0, 149][None], paged.rows([(0, 149)]), heads, paged.cache)
            assert_close(attend(heads, paged, q, [(0, 149)]), want, torch.float32)
            assert not ops.forward._partials.counters.any()
            with mock.patch.object(attention_kernels, "MAX_SPLIT_PROGRAMS", 1):  # one program for all spans
                results = [(batch, attend(heads, paged, q, batch)) for batch in batches]
            for batch, out in (*results, (verify, attend(heads, paged, q, verify))):
                for at, row in zip(batch, out, strict=True):
                    assert at not in single or bits(row) == single[at], (name, at, len(batch))


@check
def fused_gemm_has_the_bits_of_separate_ops() -> None:
    for heads in (AttentionShape(4, 2, 32, 0.2, 0), AttentionShape(3, 1, 64, 0.1, 0)):
        width = (heads.num_q + 2 * heads.num_kv) * heads.dim
        paged = Paged(heads, [40, 7, 19], dtype=torch.bfloat16)
        rows = paged.rows([(0, p) for p in range(20, 39)] + [(1, 6), (2, 3)])
        rows.slots[-1] = -1  # padding: nothing is stored
        rope = randn(64, heads.dim, seed=5)
        for bias in (None, randn(width, seed=4, dtype=torch.bfloat16)):
            x, weight = (randn(n, 136, seed=n, dtype=torch.bfloat16) for n in (21, width))
            packed = ops.forward.pack_linear(weight, bias)
            caches = [paged.cache.clone(), paged.cache.clone()]
            attention = Attention(heads, packed, None)
            got = ops.forward.linear_rope_store(x, rows, attention, rope, caches[0], 1e-6)
            product = ops.forward.linear(x, packed)
            want = ops.forward.rope_store(product, rows, attention, rope, caches[1], 1e-6)
            assert bits(got) == bits(want) and bits(caches[0]) == bits(caches[1])
            want = ops.forward.act_mul(ops.forward.linear(x, packed))
            assert bits(ops.forward.linear_act_mul(x, packed)) == bits(want)


@check
def padding_does_not_change_attention() -> None:
    heads = HEADS["grouped"]
    paged, q, _ = spans(heads)
    where = [(1, 18), (1, 19)]
    plain = attend(heads, paged, q, where)
    rows = paged.rows(where)
    pads = ((rows.tokens, 0), (rows.positions, 0), (rows.slots, -1), (rows.kv_index, 0))
    padded = Rows(*(torch.cat([x, torch.full((3,), value)]) for x, value in pads), rows.page_table)
    x = torch.cat([torch.stack([q[at] for at in where]), torch.full((3, heads.num_q * heads.dim), torch.nan)])
    assert torch.equal(ops.forward.attention(x, padded, heads, paged.cache)[:2], plain)


# --- sampling ---------------------------------------------------------------------------------------------


def rows_of(count: int, vocab: int, seed: int = 0) -> Tensor:
    """Return random rows; some with ties, some flat, some with -inf."""
    random = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn((count, vocab), generator=random)
    x[1::5] = x[1::5].round()
    x[2::5] = 0.0
    x[2::5, ::3] = -0.0
    x[3::5] = torch.where(torch.rand((len(x[3::5]), vocab), generator=random) < 0.7, -INF, x[3::5])
    x[3::5, vocab // 2] = 1.0
    x[4::5] = -x[4::5].abs() - 50
    return x


def keys(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    seeds = torch.randint(0, 2**63 - 1, (count,), generator=random)
    seeds[:2] = torch.tensor([0, 2**63 - 1])[:count]
    return seeds, torch.randint(0, 1 << 20, (count,), generator=random)


@check
def uniform() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    assert float(ops.sampling.uniform(zero, zero, 0)[0]) == (0x6627E8D5 + 0.5) * 2.0**-32
    seeds, positions = keys(300)
    for stream in range(4):
        got, want = (each.sampling.uniform(seeds, positions, stream) for each in (ops, ref))
        assert torch.equal(got, want)
    assert len(ops.sampling.uniform(seeds[:0], positions[:0], 0)) == 0


@check
def gumbel_argmax() -> None:
    for vocab, count in ((3, 5), (61, 12), (4099, 4)):
        scaled, (seeds, positions) = rows_of(count, vocab), keys(count)
        for stream in (0, 2):
            got = ops.sampling.gumbel_argmax(scaled, seeds, positions, stream)
            assert torch.equal(got, ref.sampling.gumbel_argmax(scaled, seeds, positions, stream)), vocab
    far = torch.full((8, 61), -27.0)
    far[:, 17] = 0.0
    assert set(ops.sampling.gumbel_argmax(far, *keys(8), 0).tolist()) == {17}
    assert ops.sampling.gumbel_argmax(torch.full((1, 5), -INF), *keys(1), 0).tolist() == [0]
    assert len(ops.sampling.gumbel_argmax(far[:0], *keys(0), 0)) == 0


@check
def order() -> None:
    for vocab in (1, 3, 61, 4099):
        logits = rows_of(10, vocab)
        assert torch.equal(ops.sampling.argmax(logits), ref.sampling.argmax(logits))
        for shift in range(2):
            ids = (torch.arange(10) * 7 + shift) % vocab
            assert torch.equal(ops.sampling.rank(logits, ids), ref.sampling.rank(logits, ids))
    assert ops.sampling.argmax(logits[:0]).shape == (0,)
    assert ops.sampling.top(logits[:0], 2)[1].shape == (0, 2)


@check
def top() -> None:
    """Check both stages with small chunks, because the interpreter sorts slowly, and the path by sort keys.

    The last rows have more candidates than fit into the buffer, or ties at the k-th value.
    """
    small = {"CHUNK": 32, "GROUP": 8, "MAX_MEMBERS": 64}
    for vocab, k in ((61, 5), (61, 61), (3, 1), (200, 100), (400, 8)):
        logits = rows_of(5, vocab)
        if vocab == 400:
            logits[3] = -1.0
            logits[4] = (torch.arange(vocab) * 37 % 41 > 37).float()
        with mock.patch.multiple(topk, **small):
            got = ops.sampling.top(logits, k)
        want = ref.sampling.top(logits, k)
        assert torch.equal(got[1], want[1]) and bits(got[0]) == bits(want[0]), (vocab, k)
    # as `compile_ahead`: kernels do not run, and what they would write is zero
    skipped = mock.patch.multiple(topk, key_kernel=mock.MagicMock(), is_compiling=lambda: True)
    with skipped, mock.patch.object(torch, "empty", torch.zeros):
        assert topk.top(rows_of(2, 200), 100)[1].max() < 200


@check
def top_of_a_large_vocabulary() -> None:
    """Check the vocabulary of Gemma 3, which has one group of 64 ids more than one program sorts."""
    vocab, k = 262_208, 8
    assert topk.group_size(vocab - 64) == 64 and topk.group_size(vocab) == 128
    assert all(topk.is_two_stage(*at) for at in ((vocab - 64, 64), (vocab, 32), (524_288, 1)))
    assert not any(topk.is_two_stage(*beyond) for beyond in ((vocab - 64, 65), (vocab, 33), (524_289, 1)))
    logits = rows_of(1, vocab)
    logits[0, [7, 100, 127, 128, 262_143, 262_144, 262_207]] = 100.0  # ties within groups and in the last one
    rows, tokens = torch.zeros(1, dtype=torch.int64), torch.tensor([262_144])
    with mock.patch.object(topk, "key_kernel"):  # of the path by sort keys
        got = ops.sampling.top(logits, k)
        scored = ops.sampling.logprobs(logits, rows, tokens, k)
        assert not topk.key_kernel.mock_calls
    want = ref.sampling.top(logits, k)
    assert torch.equal(got[1], want[1]) and bits(got[0]) == bits(want[0])
    assert torch.equal(scored.ids, want[1]) and scored.ranks.tolist() == [6]


@check
def logsumexp() -> None:
    for vocab in (1, 61, 4099):
        logits = rows_of(10, vocab)
        assert_close(ops.sampling.logsumexp(logits), ref.sampling.logsumexp(logits), torch.float32)
        batches = [list(range(10)), [7, 3]]
        assert_batch_invariant(lambda at, x=logits: ops.sampling.logsumexp(x[at]), 10, batches)
    assert ops.sampling.logsumexp(torch.full((1, 5), -INF)).tolist() == [-INF]


@check
def truncate() -> None:
    topk_topp.BLOCK, topk_topp.GROUP, topk_topp.TOP_P_MIN = 128, 8, 6  # two blocks a row
    choices = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (9, 0.8, 0.02), (1, 1.0, 0.0)]
    choices += [(200, 0.5, 0.0), (0, 0.999, 0.0), (3, 0.99, 0.0), (0, 1e-9, 0.0), (70, 0.9, 0.0)]
    choices += [(149, 1.0, 0.0)]
    for vocab in (3, 150):
        scaled = rows_of(12, vocab)
        picked = list(choices)
        for turn in range(3):
            topk_topp.MAX_KEYS = 2048 if turn == 1 else 16  # bisection, or bins and digits for many ties
            picked = picked[turn:] + picked[:turn]
            k, p, m = (torch.tensor(list(column)) for column in zip(*picked, strict=True))
            got, want = ops.sampling.truncate(scaled, k, p, m), ref.sampling.truncate(scaled, k, p, m)
            wrong = (got != want).any(1).nonzero()[:, 0].tolist()
            kept = [(picked[r], (got[r] > -INF).sum(), (want[r] > -INF).sum()) for r in wrong]
            assert not wrong, (vocab, kept)
    flat = torch.zeros(2, 64)
    half = ops.sampling.truncate(flat, torch.tensor([0, 7]), torch.tensor([0.5, 1.0]), torch.zeros(2))
    assert (half > -INF).sum(1).tolist() == [32, 7] and bool((half[:, :7] == 0).all())


@check
def kl_grad_equals_the_eager_gradient() -> None:
    share, hard = randn(9, seed=3).abs(), torch.tensor([0.3] * 5 + [0.0] * 4)
    for dtype in DTYPES:
        for vocab in (11, 1024):
            logits, target = (3 * randn(n, vocab, seed=i, dtype=dtype) for n, i in ((9, 1), (12, 2)))
            row = torch.randint(12, (9,), generator=torch.Generator().manual_seed(4))
            want = loss._gradient_eager(logits, target, row, hard, share, 1.7, True)
            value = kl_grad.kl_grad_in_place(logits, target, row, hard, share, 1.7, True)
            assert_close(logits, want[0], dtype)
            torch.testing.assert_close(value, want[1])


@check
def wrong_arguments_raise() -> None:
    weight, x = ops.forward.pack_linear(randn(4, 16)), randn(3, 16)
    for call in (
        lambda: ops.forward.linear(x[:, :8], weight),
        lambda: ops.forward.linear(x.double(), weight),
        lambda: ops.forward.linear(x, weight, torch.float64),
        lambda: ops.forward.rms_norm(x, torch.ones(7), 1e-6),
        lambda: ops.forward.act_mul(x[:, :15]),
        lambda: ops.sampling.top(x, 17),
        lambda: ops.sampling.rank(x, torch.zeros(2, dtype=torch.int64)),
        lambda: ops.sampling.argmax(x.half()),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("no error was raised")


def main(only: list[str]) -> None:
    """Run the checks of this file."""
    run_checks(CHECKS[__name__], only)


if __name__ == "__main__":
    main(sys.argv[1:])
