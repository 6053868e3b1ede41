"""Times attention tiles on a GPU, mostly of Llama-8B heads: decode and verify rows at 16k and 64k, prefill chunks at 16k.

    PYTHONPATH=src python bench/micro/gpu/attention_variants.py [--seconds 110] [--only decode] [--variant span_loop]

Every variant must have the bits of the reference, in fp32; one that has not is reported and not timed. The tables as
they are must have them too. The reference of few and of quantised rows does not use the kernels that variants use.
The best of each case is printed, and all times as JSON on the last line. The tables to change are
`splitkv.TILES` (split), `prefill.CHUNKED_TILES` (chunked), `SHORT_TILES_96` (short), `TALL_TILES_SM90` (tall).
Times are microseconds of a call, from a graph of many calls over caches that together exceed the L2 cache.
"us" are calls alone, without programmatic dependent launch. "chain us" are chains of a GEMM of the queries, the
attention and a GEMM of its result, with it, of the cases with `few` in their name.
"""  # noqa: E501

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from common.measure import finish
from op_checks import GPU, LARGE_HEADS, PAGE, SMALL_HEADS, randn
from op_times import BF16, micros
from torch import Tensor

from draftproof.ops import AttentionShape, KVLayout, Rows
from draftproof.ops.contract.kv_layout import split_page_bytes
from draftproof.ops.triton.attention import few_rows, prefill, splitkv, warp_specialized, worklist
from draftproof.ops.triton.attention.splitkv import SplitTile
from draftproof.ops.triton.attention.tiles import TileConfig
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.compile_ahead import compile_ahead

MIN_CACHE_BYTES = 192 << 20  # of the caches that a graph rotates through
MEMORY_BYTES_PER_US = 4.3e6  # of a copy on an H200
CHAIN_WEIGHTS = 8  # of 32 MiB each: together they exceed the L2 cache
Patches = list[tuple[Any, dict[str, Any]]]  # of a variant: (module, values)


class Case(NamedTuple):
    """Rows of one call: the last `rows` positions of `slots` contexts of `context` tokens."""

    name: str
    table: str  # that serves the case
    slots: int
    rows: int
    context: int
    heads: AttentionShape = LARGE_HEADS
    kv_dtype: torch.dtype = BF16
    min_context: int = 0  # contexts are spread from it to `context`; 0: all have the same length

    @property
    def contexts(self) -> list[int]:
        """Tokens of each slot's context; most are short, as are the prompts of mixed traffic."""
        if not self.min_context:
            return [self.context] * self.slots
        steps = [(i / max(1, self.slots - 1)) ** 2 for i in range(self.slots)]
        return [round(self.min_context + step * (self.context - self.min_context)) for step in steps]

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of the cache of a layer."""
        return KVLayout(1, self.heads.num_kv, self.heads.dim, self.kv_dtype)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of all contexts."""
        return sum(self.contexts) * self.kv_layout.bytes_per_token


CASES = (
    Case("few 1x1 at 2k", "few", 1, 1, 2048 + 50),
    Case("few 1x1 at 16k", "few", 1, 1, 16384 + 50),
    Case("few 1x1 at 64k", "few", 1, 1, 65536 - 50),
    Case("few 8x1 at 16k", "few", 8, 1, 16384 + 50),
    Case("few 4x1 at 16k", "few", 4, 1, 16384 + 50),
    Case("few 2x1 at 16k", "few", 2, 1, 16384 + 50),
    Case("few 1x4 at 16k", "few", 1, 4, 16384 + 50),
    Case("few 1x8 at 16k", "few", 1, 8, 16384 + 50),
    Case("few 2x4 at 16k", "few", 2, 4, 16384 + 50),
    Case("decode 1x1 at 16k", "split", 1, 1, 16384),
    Case("decode 1x1 at 64k", "split", 1, 1, 65536),
    Case("verify 1x4 at 16k", "split", 1, 4, 16384),
    Case("verify 1x4 at 64k", "split", 1, 4, 65536),
    Case("decode 16x1 at 16k", "chunked", 16, 1, 16384),
    Case("decode 16x1 at 64k", "chunked", 16, 1, 65536),
    Case("verify 16x4 at 16k", "short", 16, 4, 16384),
    Case("prefill 8192 rows, second chunk", "tall", 1, 8192, 16384),
    Case("prefill 8192 rows, first chunk", "tall", 1, 8192, 8192),
    Case("prefill 16384 rows, one request", "tall", 1, 16384, 16384),
    Case("prefill 8192 rows, SmolLM2 heads", "tall 64", 1, 8192, 8192, SMALL_HEADS),
    *(
        Case(f"{name} {rows}", table, slots, rows_of_slot, context, kv_dtype=dtype)
        for name, dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8))
        for rows, table, slots, rows_of_slot, context in (
            ("few 1x1 at 2k", "quantized few", 1, 1, 2048 + 50),
            ("few 1x1 at 16k", "quantized few", 1, 1, 16384 + 50),
            ("few 1x1 at 64k", "quantized few", 1, 1, 65536 - 50),
            ("few 1x4 at 16k", "quantized few", 1, 4, 16384 + 50),
            ("few 8x1 at 16k", "quantized few", 8, 1, 16384 + 50),
            ("decode 16x1 at 16k", "quantized even", 16, 1, 16384),
            ("verify 16x4 at 16k", "quantized even", 16, 4, 16384),
        )
    ),
    *(
        Case(
            f"mixed {slots}x{rows}, SmolLM2 heads",
            "chunked 64",
            slots,
            rows,
            1600,
            SMALL_HEADS,
            min_context=40,
        )
        for slots, rows in ((64, 1), (64, 3), (128, 2), (256, 1))
    ),
    Case("decode 1x1 at 400", "split", 1, 1, 400),
    Case("decode 16x1 at 400", "chunked", 16, 1, 400),
)
FEW = (few_rows.CONFIG, few_rows.LONG_ROW_CONFIG)
SPLIT = (
    SplitTile(16, 8, 3, span_loop=True, merges_rows=True, max_programs=132),
    SplitTile(16, 4, 3, merges_rows=True),
    SplitTile(16, 4, 3, merges_rows=True, max_programs=264),
    *(SplitTile(16, 4, 2, span_loop=True, merges_rows=True, max_programs=n) for n in (800, 528, 264)),
    *(SplitTile(16, 4, 3, span_loop=True, merges_rows=True, max_programs=n) for n in (528, 264, 132)),
    SplitTile(16, 2, 2, span_loop=True, merges_rows=True, max_programs=264),
    SplitTile(16, 4, 2, span_loop=True, max_programs=264),
)
BLOCKS = TileConfig(16, 4, 3, splits_full_blocks=False, prefetches_pages=True)
CHUNKED = (
    *(BLOCKS._replace(merges_rows=True, specialized_stages=stages) for stages in (0, 2, 3)),
    TileConfig(16, 2, 2, span_loop=True, merges_rows=True),
)
CHUNKED_64 = (
    BLOCKS._replace(merges_rows=True),
    BLOCKS._replace(merges_rows=True, warps=2),
    TileConfig(16, 2, 2, span_loop=True, merges_rows=True),
)
SHORT = (
    *(BLOCKS._replace(specialized_stages=stages) for stages in (0, 2)),
    TileConfig(16, 4, 2, span_loop=True),
    TileConfig(16, 4, 3, span_loop=True),
)
TALL = (
    *(TileConfig(128, 8, 3, span_loop=True, specialized_stages=stages) for stages in (2, 3)),
    TileConfig(128, 8, 3, splits_full_blocks=False, prefetches_pages=True),
    TileConfig(128, 8, 3, span_loop=True),
    TileConfig(128, 8, 2, span_loop=True),
    TileConfig(64, 4, 2, span_loop=True),
)

TALL_64 = (
    TileConfig(64, 4, 2, span_loop=True),
    TileConfig(64, 4, 3, span_loop=True),
    TileConfig(128, 8, 2, span_loop=True),
)
# A variant with specialized_stages uses them at all lengths; the tables only where contexts may be long.
ANY_CONTEXT: Patches = [(warp_specialized, {"LONG_TABLE_TOKENS": 0}), (worklist, {"MIN_EVEN_SPANS": 0})]


def variants(table: str) -> Iterator[tuple[str, Patches]]:
    """Return the variants of a table: a name and values of modules."""
    if table.startswith("quantized"):
        yield "quantized rows", ANY_CONTEXT
    elif table == "few":
        for few_rows_config in FEW:
            configs = {"CONFIG": few_rows_config, "LONG_ROW_CONFIG": few_rows_config}
            yield str(few_rows_config), [(few_rows, configs), *ANY_CONTEXT]
    elif table == "split":
        for tile in SPLIT:
            limit = {"TILES": ((1 << 30, tile),), "MAX_SPLIT_PROGRAMS": tile.max_programs}
            yield str(tile), [(splitkv, limit)]
    elif table == "chunked":
        for config in CHUNKED:
            for chunks in (8,):
                tile = prefill.CHUNKED_TILES[128]._replace(config=config)
                values = {"CHUNKED_TILES": {128: tile}, "MAX_CHUNKS": chunks}
                yield (
                    f"{config}, {chunks} chunks",
                    [(prefill, values), *ANY_CONTEXT, (worklist, {"MAX_CHUNKS": chunks})],
                )
    elif table == "chunked 64":
        yield "whole tiles", [(prefill, {"CHUNKED_TILES": {}})]
        for config, spans in product(CHUNKED_64, (4, 8)):
            tile = prefill.CHUNKED_TILES[64]._replace(config=config, min_spans=spans)
            yield f"{config}, {spans} spans", [(prefill, {"CHUNKED_TILES": {64: tile}})]
    else:
        name = "SHORT_TILES_96" if table == "short" else "TALL_TILES_SM90"
        width = 64 if table == "tall 64" else 128
        for config in {"short": SHORT, "tall": TALL, "tall 64": TALL_64}[table]:
            yield str(config), [(prefill, {name: {width: config}}), *ANY_CONTEXT]


def reference(case: Case) -> Patches:
    """Return the values of modules of the reference: the tables as they are, `splitkv.py` for few rows.

    Quantised keys: without the kernel that variants use.
    """
    if case.table.startswith("quantized"):
        return [(warp_specialized, {"LONG_TABLE_TOKENS": 1 << 40})]
    return [(few_rows, {"MAX_ROWS": 0})] if case.table == "few" else []


def chosen(case: Case, part: str) -> list[tuple[str, Patches]]:
    """Return the variants of a case whose name contains `part`."""
    return [(name, patches) for name, patches in variants(case.table) if part in name]


@contextmanager
def patched(patches: Patches) -> Iterator[None]:
    """Set values of modules."""
    with ExitStack() as stack:
        for module, values in patches:
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


def random_cache(layout: KVLayout, pages: int, seed: int) -> Tensor:
    """Return a cache with random elements, and scales of quantised ones."""
    random = torch.Generator(device=GPU).manual_seed(seed)
    (cache,) = layout.allocate(pages, PAGE, GPU)
    if layout.dtype == BF16:
        return cache.normal_(generator=random)
    elements, scales = split_page_bytes(cache)
    limit = 127 if layout.dtype == torch.int8 else 448
    for plane in range(2):
        values = torch.empty(elements.shape[1:], device=GPU).normal_(std=60, generator=random)
        elements[plane] = values.clamp(-limit, limit).to(layout.dtype)
    scales.uniform_(0.005, 0.02, generator=random)
    return cache


class Inputs:
    """Caches, rows and queries of a case."""

    def __init__(self, case: Case) -> None:
        self.heads = heads = case.heads
        pages, copies = -(-case.context // PAGE), max(1, -(-MIN_CACHE_BYTES // case.cache_bytes))
        self.caches = [
            random_cache(case.kv_layout, 1 + case.slots * pages, seed) for seed in range(min(copies, 32))
        ]
        order = 1 + torch.randperm(case.slots * pages, generator=torch.Generator().manual_seed(1))
        table = order.view(case.slots, pages).to(torch.int32).to(GPU)
        slots = torch.arange(case.slots, device=GPU).repeat_interleave(case.rows)
        first = torch.tensor(case.contexts, device=GPU) - case.rows
        positions = (first[:, None] + torch.arange(case.rows, device=GPU)).flatten()
        index = table[slots, positions // PAGE].long() * PAGE + positions % PAGE
        self.rows = Rows(slots * 0, positions, slots, index, table)
        self.q = randn(len(slots), heads.num_q * heads.dim, seed=3, dtype=BF16)
        self.out = torch.empty((len(slots), heads.num_q * heads.dim), dtype=torch.float32, device=GPU)
        width = heads.num_q * heads.dim
        random = torch.Generator(device=GPU).manual_seed(5)
        self.weights = [
            torch.empty((width, width), dtype=BF16, device=GPU).normal_(std=width**-0.5, generator=random)
            for _ in range(CHAIN_WEIGHTS if case.table.endswith("few") else 0)
        ]

    def chains(self, ops: TritonOps, count: int) -> list[Callable[[], Tensor]]:
        """Return `count` chains of GEMM, attention and GEMM over rotating weights and caches."""
        packed = [ops.forward.pack_linear(weight) for weight in self.weights]

        def chain(i: int) -> Tensor:
            query = ops.forward.linear(self.q, packed[2 * i % len(packed)])
            cache = self.caches[i % len(self.caches)]
            result = ops.forward.attention(query, self.rows, self.heads, cache)
            return ops.forward.linear(result, packed[(2 * i + 1) % len(packed)])

        return [partial(chain, i) for i in range(count)]

    def chain_result(self, ops: TritonOps) -> Tensor:
        """Return the results of some chains."""
        ops.forward.begin_pass(self.rows)
        return torch.stack([chain() for chain in self.chains(ops, 4)])

    def chain_time(self, ops: TritonOps, rounds: int) -> float:
        """Return the microseconds of a chain."""
        ops.forward.begin_pass(self.rows)
        return micros(self.chains(ops, max(16, len(self.caches))), rounds)

    def calls(self, ops: TritonOps, count: int) -> list[Callable[[], None]]:
        """Return `count` launches over rotating caches."""
        caches = [self.caches[i % len(self.caches)] for i in range(count)]
        return [
            lambda cache=cache: ops.forward.attention_into(self.q, self.rows, self.heads, cache, self.out)  # type: ignore[misc]
            for cache in caches
        ]

    def result(self, ops: TritonOps) -> Tensor:
        """Return the output on the first cache; fp32, all elements written."""
        ops.forward.begin_pass(self.rows)
        self.out.fill_(float("nan"))
        self.calls(ops, 1)[0]()
        torch.cuda.synchronize()
        return self.out.clone()

    def time(self, ops: TritonOps, rounds: int) -> float:
        """Return the microseconds of a call."""
        ops.forward.begin_pass(self.rows)
        return micros(self.calls(ops, max(4 if len(self.q) > 512 else 16, len(self.caches))), rounds)


def floor_us(case: Case) -> float:
    """Return the time of reading all keys and values once, or of the products at 700 TFLOP/s if longer."""
    reads = case.cache_bytes / MEMORY_BYTES_PER_US
    keys = case.rows * (sum(case.contexts) - case.slots * (case.rows - 1) / 2)
    return round(max(reads, keys * case.heads.num_q * case.heads.dim * 4 / 700e6), 1)


def measure(ops: TritonOps, early_ops: TritonOps, case: Case, inputs: Inputs, part: str) -> dict[str, Any]:
    """Check and time the variants of a case whose name contains `part`."""
    chain_times: dict[str, float] = {}
    with patched(reference(case)):
        want = inputs.result(ops)
        assert not want.isnan().any(), "NaN in the result"
        times = {"as it is": inputs.time(ops, 5)}
        if inputs.weights:
            want_of_chain = inputs.chain_result(early_ops)
            chain_times["as it is"] = inputs.chain_time(early_ops, 9)
    wrong = []
    for name, patches in chosen(case, part):
        with patched(patches):
            try:
                found = inputs.result(ops)
                if inputs.weights and not torch.equal(inputs.chain_result(early_ops), want_of_chain):
                    wrong.append(f"{name}: other bits in a chain")
                elif torch.equal(found, want):
                    times[name] = inputs.time(ops, 5)
                    if inputs.weights:
                        chain_times[name] = inputs.chain_time(early_ops, 9)
                else:
                    error = (found - want).abs().max().item()
                    wrong.append(f"{name}: {(found != want).sum().item()} elements differ by up to {error}")
            except Exception as error:  # e.g. a tile that needs too much shared memory
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    assert torch.equal(inputs.result(ops), want), "the tables have other bits than the reference"
    best = min(times, key=times.__getitem__)
    print(f"{case.name}: floor {floor_us(case)}, as it is {times['as it is']}, best {times[best]}: {best}")
    for name, microseconds in chain_times.items():
        print(f"  chain {microseconds}, alone {times[name]}: {name}", flush=True)
    for name in wrong:
        print(f"  OTHER BITS OR FAILED: {name}", flush=True)
    report = {"floor": floor_us(case), "best": best, "us": times, "other bits or failed": wrong}
    return {**report, "chain us": chain_times} if chain_times else report


def compile_all(ops: TritonOps, early_ops: TritonOps, held: dict[Case, Inputs], part: str) -> None:
    """Compile the kernels of the variants whose name contains `part`, in parallel."""

    def launch(inputs: Inputs, patches: Patches) -> None:
        ops.forward.begin_pass(inputs.rows)
        with patched(patches):
            inputs.calls(ops, 1)[0]()
            for chain in inputs.chains(early_ops, 1) if inputs.weights else ():
                chain()

    tables = {case: [[], reference(case), *(patches for _, patches in chosen(case, part))] for case in held}
    launches = [partial(launch, held[case], patches) for case in held for patches in tables[case]]
    compile_ahead(launches, lambda done, total: None)


def main() -> None:
    """Run the cases that fit into the time."""
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110, help="start no case after it")
    parser.add_argument("--only", default="", help="part of the name of a case")
    parser.add_argument("--variant", default="", help="part of the name of a variant")
    options = parser.parse_args()
    ops = TritonOps(GPU, pdl=False)  # an op alone is timed without its neighbours
    early_ops = TritonOps(GPU, pdl=True)  # of chains
    report: dict[str, Any] = {}
    held = {case: Inputs(case) for case in CASES if options.only in case.name}
    compile_all(ops, early_ops, held, options.variant)
    report["seconds to compile"] = round(time.perf_counter() - begun, 1)
    for case, inputs in held.items():
        if time.perf_counter() - begun > options.seconds:
            report[case.name] = "no time left"
        else:
            report[case.name] = measure(ops, early_ops, case, inputs, options.variant)
    report["seconds"] = round(time.perf_counter() - begun, 1)
    finish("attention_variants", report)


if __name__ == "__main__":
    main()
