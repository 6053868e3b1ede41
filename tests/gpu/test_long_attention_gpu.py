"""Attention kernels of Hopper have the bits of the other kernels, at short and long contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from draftproof.ops import Attention, AttentionShape, KVLayout, Rows
from draftproof.ops.contract.kv_layout import KV_FORMATS, kv_format, split_page_bytes
from draftproof.ops.triton.attention import (
    few_rows,
    prefill,
    preloaded,
    splitkv,
    tiles,
    warp_specialized,
    worklist,
)
from draftproof.ops.triton.attention.quantized import decode_kernel as quantized_decode
from draftproof.ops.triton.backend import TritonOps


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = pytest.mark.skipif(not has_hopper(), reason="no GPU of compute capability 9.0")
CUDA, BF16, POOL_TOKENS = torch.device("cuda"), torch.bfloat16, 32768
NAN_BYTE = 0x7F  # of fp8; 127 of int8
LLAMA = AttentionShape(num_q=32, num_kv=8, dim=128, scale=128**-0.5, window=0)
GROUP_OF_EIGHT = AttentionShape(num_q=64, num_kv=8, dim=128, scale=128**-0.5, window=0)
GROUP_OF_ONE = AttentionShape(num_q=8, num_kv=8, dim=128, scale=128**-0.5, window=0)
GROUP_OF_SIXTEEN = AttentionShape(num_q=128, num_kv=8, dim=128, scale=128**-0.5, window=0)
WIDE = AttentionShape(num_q=8, num_kv=4, dim=256, scale=256**-0.5, window=0)
SLIDING = AttentionShape(num_q=8, num_kv=4, dim=256, scale=256**-0.5, window=200)
KV_DTYPES = {"bf16": BF16, **{name: KV_FORMATS[name].dtype for name in ("fp8", "int8")}}
Windows = list[tuple[int, int]]  # of each slot: its context, and rows at the end of it

FEW: dict[str, Windows] = {
    "one key": [(1, 1)],
    "one span": [(128, 1)],
    "a row at 2k": [(2100, 1)],
    "a row at 16k": [(16384, 1)],
    "a row, one key of a span": [(16385, 1)],
    "a row at 64k": [(65536, 1)],
    "a draft at 16k": [(16500, 5)],
    "a draft across a span": [(16386, 8)],
    "a prompt of eight": [(8, 8)],
    "8 rows around a span": [(n, 1) for n in (1, 127, 128, 129, 255, 256, 257, 1000)],
    "8 rows at 16k": [(16384 + 77 * n, 1) for n in range(8)],
    "drafts and padding": [(4098, 3), (0, 1), (16390, 2), (129, 2)],
    "one at 64k and 7 short": [(65536, 1), *[(20 + n, 1) for n in range(7)]],
}
DECODE: dict[str, Windows] = {
    "16 rows of one span": [(100 + n, 1) for n in range(16)],
    "16 rows, one key of a span": [(16257, 1)] * 16,
    "16 rows around a span": [(n, 1) for n in (1, 127, 128, 129, 255, 256, 257, 1000) * 2],
    "16 rows at 1k": [(1024 + n, 1) for n in range(16)],
    "16 rows at 16k": [(16384, 1)] * 16,
    "16 rows, one at 64k": [(65536, 1), *[(1000, 1)] * 15],
    "20 uneven rows and padding": [(1 + 800 * n, 1) for n in range(19)] + [(0, 1)],
    "48 uneven rows": [(1 + 300 * n, 1) for n in range(48)],
    "16 drafts at 16k": [(16384 + 7 * n, 4) for n in range(16)],
    "drafts across a span and padding": [(16386, 5), (0, 1), (130, 5)] * 3 + [(4000, 6)],
    "30 uneven drafts": [(20 + 211 * n, 3) for n in range(30)],
    "one at 64k and 200 short": [(65536, 1), *[(300, 1)] * 200],
}
PROMPTS: dict[str, Windows] = {
    "several tall tiles per program": [(40 + n % 200, 6) for n in range(400)],
    "second chunk": [(6144, 3072)],
    "first chunk, odd": [(2049, 2049)],
    "prompts, drafts, decode rows and padding": [
        (3000, 1500),
        (17, 17),
        (9000, 700),
        (4000, 4),
        (0, 1),
        (1, 1),
    ],
}


def fill_cache(cache: Tensor, random: torch.Generator) -> None:
    """Store random elements; quantised ones have scales around 0.01, no NaN, and some rows the scale 0."""
    if kv_format(cache.dtype) is None:
        cache.normal_(generator=random)
        return
    elements, scales = split_page_bytes(cache)
    values = torch.empty(elements.shape, dtype=torch.float32, device=CUDA).normal_(std=60, generator=random)
    limit = 127 if cache.dtype == torch.int8 else 448
    elements.copy_(values.clamp(-limit, limit).to(cache.dtype))
    scales.uniform_(0.005, 0.02, generator=random)
    scales[:, ::97] = 0.0


class Inputs:
    """Queries and rows on random pages; memory that no row may read holds NaN."""

    def __init__(self, windows: Windows, heads: AttentionShape, page: int = 16, kv: str = "bf16") -> None:
        self.heads, kv_dtype = heads, KV_DTYPES[kv]
        random = torch.Generator(device=CUDA).manual_seed(1)
        count = len(windows)
        pool_pages = POOL_TOKENS // page + count
        (self.cache,) = KVLayout(1, heads.num_kv, heads.dim, kv_dtype).allocate(pool_pages, page, CUDA)
        fill_cache(self.cache, random)
        elements = self.cache
        if kv_format(kv_dtype) is not None:
            elements, scales = split_page_bytes(self.cache)
            elements = elements.view(torch.uint8)
            scales[:, 0] = torch.nan
        unread = torch.nan if kv_dtype == BF16 else NAN_BYTE
        elements[:, 0] = unread
        max_pages = max(-(-max(n for n, _ in windows) // page), 16384 // page)
        table = torch.randint(1 + count, pool_pages, (count, max_pages), generator=random, device=CUDA)
        slots, positions = [], []
        for slot, (context, rows) in enumerate(windows):
            used = -(-context // page)
            table[slot, used:] = 0
            if context:
                table[slot, used - 1] = 1 + slot
                elements[:, 1 + slot, (context - 1) % page + 1 :] = unread
                if kv_format(kv_dtype) is not None:
                    scales[:, 1 + slot, :, (context - 1) % page + 1 :] = torch.nan
            slots += [slot if context else -1] * rows
            positions += [max(p, 0) for p in range(context - rows, context)]
        places = torch.tensor(positions, device=CUDA)
        owners = torch.tensor(slots, device=CUDA)
        kv_index = table[owners.clamp(min=0), places // page] * page + places % page
        kv_index = torch.where(owners < 0, 0, kv_index)
        self.rows = Rows(torch.zeros_like(owners), places, owners, kv_index, table.int())
        shape = (len(slots), heads.num_q * heads.dim)
        self.q = torch.empty(shape, dtype=BF16, device=CUDA).normal_(generator=random)

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values have scales."""
        return kv_format(self.cache.dtype) is not None

    def attention(self, ops: TritonOps) -> Tensor:
        """Return the attention in fp32; rows of padding are NaN."""
        out = torch.full(self.q.shape, torch.nan, dtype=torch.float32, device=CUDA)
        ops.forward.begin_pass(self.rows)
        ops.forward.attention_into(self.q, self.rows, self.heads, self.cache, out)
        return out

    def layers(self, ops: TritonOps, count: int) -> Tensor:
        """Return the result of `count` layers, of which each reads that of the previous kernel."""
        ops.forward.begin_pass(self.rows)
        x = self.q
        for _ in range(count):
            out = ops.forward.attention(x, self.rows, self.heads, self.cache)
            x = ops.forward.add(self.q, out)
        return x

    def stored_layers(self, ops: TritonOps, count: int) -> Tensor:
        """Return the results of `count` layers that store the keys of their rows just before."""
        random = torch.Generator(device=CUDA).manual_seed(2)
        width = (self.heads.num_q + 2 * self.heads.num_kv) * self.heads.dim
        shape = (width, self.q.shape[1])
        packed = [
            ops.forward.pack_linear(
                torch.empty(shape, dtype=BF16, device=CUDA).normal_(std=0.05, generator=random)
            )
            for _ in range(2)
        ]
        rope = torch.ones((1 << 16, self.heads.dim), device=CUDA)
        ops.forward.begin_pass(self.rows)
        x, results = self.q, []
        for i in range(count):
            attention = Attention(self.heads, packed[i % 2], None)
            qkv = ops.forward.linear(x, attention.qkv)
            query = ops.forward.rope_store(qkv, self.rows, attention, rope, self.cache, 1e-6)
            results.append(ops.forward.attention(query, self.rows, self.heads, self.cache))
            x = ops.forward.add(self.q, results[-1])
        return torch.stack(results)


@contextmanager
def selected(*, everywhere: bool, even: bool = True) -> Iterator[None]:
    """Use the kernels at all lengths or not at all; `even`: also where tiles are uneven."""
    with ExitStack() as stack:
        tokens = 0 if everywhere else 1 << 40
        stack.enter_context(mock.patch.object(warp_specialized, "LONG_TABLE_TOKENS", tokens))
        stack.enter_context(mock.patch.object(warp_specialized, "MIN_TALL_ROWS", 0))
        if even:
            stack.enter_context(mock.patch.multiple(worklist, MIN_EVEN_SPANS=0, MAX_UNEVEN_NUMERATOR=1000))
        yield


def watched_tiles(inputs: Inputs) -> AbstractContextManager[mock.Mock]:
    """Return a patch that counts the launches of whole tiles."""
    module, name = (
        (quantized_decode, "launch_even") if inputs.is_quantized else (warp_specialized, "launch_tiles")
    )
    return mock.patch.object(module, name, wraps=getattr(module, name))


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors have equal bits; -0 and 0 differ."""
    return torch.equal(got.contiguous().view(torch.int16), want.contiguous().view(torch.int16))


@contextmanager
def tall_tiles() -> Iterator[None]:
    """Compute all rows with `prefill.py` in tiles of 128, block by block: the loop without `span_loop.py`."""
    tall = {128: tiles.TALL_TILES[128]}
    with (
        mock.patch.object(splitkv, "MAX_SCRATCH_BYTES", 0),
        mock.patch.multiple(prefill, MAX_ONE_LIST_ROWS=0, SHORT_TILES=tall, TALL_TILES_SM90=tall),
        selected(everywhere=False),
    ):
        yield


def other_kernels(inputs: Inputs) -> AbstractContextManager[None]:
    """Return a patch that selects none of the kernels tested here, but tall tiles for quantised keys."""
    return tall_tiles() if inputs.is_quantized else selected(everywhere=False)


def reference(inputs: Inputs, ops: TritonOps) -> Tensor:
    """Return the attention by the other kernels."""
    with other_kernels(inputs):
        want = inputs.attention(ops)
    assert not want[inputs.rows.slots >= 0].isnan().any()
    return want


def assert_equal(inputs: Inputs, got: Tensor, want: Tensor) -> None:
    is_real = inputs.rows.slots >= 0
    assert same_bits(got[is_real], want[is_real])
    assert got[~is_real].isnan().all()


def assert_same_bits(inputs: Inputs, ops: TritonOps, launches: int = 1) -> None:
    """Compare whole tiles of all rows with the other kernels, then whole tiles where they are even."""
    want = reference(inputs, ops)
    # above 48 rows, and for a tile per row, whole tiles are chosen if they run at the same time
    has_tile_per_row = inputs.is_quantized and inputs.heads == GROUP_OF_SIXTEEN
    num_sms = 8 * 132 if len(inputs.q) > 48 or has_tile_per_row else 132
    for even in (True, False):
        with (
            selected(everywhere=True, even=even),
            mock.patch.object(ops.forward._prefill, "_num_sms", num_sms if even else 132),
            watched_tiles(inputs) as launch,
        ):
            got = inputs.attention(ops)
            assert launch.call_count == launches
        if even and launches:
            (list_of_tiles,) = (call.args[5] for call in launch.call_args_list)
            assert list_of_tiles[0] > 0
        assert_equal(inputs, got, want)
    assert not ops.forward._partials.counters.any()


def assert_same_bits_of_few(inputs: Inputs, ops: TritonOps) -> None:
    """Compare the kernels of few rows with the other kernels; scratch of earlier calls holds NaN."""
    want = reference(inputs, ops)
    ops.forward._partials.parts.fill_(torch.nan)
    ops.forward._partials.stats.fill_(torch.nan)
    module, name = (quantized_decode, "launch_few") if inputs.is_quantized else (few_rows, "launch")
    with (
        selected(everywhere=True),
        mock.patch.object(module, name, wraps=getattr(module, name)) as launch,
    ):
        got = inputs.attention(ops)
        assert launch.call_count == 1
    assert_equal(inputs, got, want)


@pytest.fixture(scope="module")
def early_ops() -> TritonOps:
    return TritonOps(CUDA, pdl=True)


@pytest.fixture(scope="module")
def late_ops() -> TritonOps:
    return TritonOps(CUDA, pdl=False)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("name", ["a draft across a span", "16 drafts at 16k"])
def test_short_tiles_have_the_bits_of_tall_tiles(name: str, early_ops: TritonOps, kv: str) -> None:
    inputs = Inputs((DECODE | FEW)[name], LLAMA, kv=kv)
    with tall_tiles():
        want = inputs.attention(early_ops)
    with selected(everywhere=False):
        assert_equal(inputs, inputs.attention(early_ops), want)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("windows", FEW.values(), ids=FEW)
def test_few_rows_have_the_same_bits(
    windows: Windows, early_ops: TritonOps, late_ops: TritonOps, kv: str
) -> None:
    inputs = Inputs(windows, LLAMA, kv=kv)
    assert_same_bits_of_few(inputs, early_ops)
    assert_same_bits_of_few(inputs, late_ops)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("name", ["a row, one key of a span", "drafts and padding"])
@pytest.mark.parametrize("heads", [GROUP_OF_ONE, GROUP_OF_EIGHT, GROUP_OF_SIXTEEN], ids=["1", "8", "16"])
def test_few_rows_of_other_heads_have_the_same_bits(
    name: str, heads: AttentionShape, early_ops: TritonOps, kv: str
) -> None:
    assert_same_bits_of_few(Inputs(FEW[name], heads, kv=kv), early_ops)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("page", [64, 128])
def test_larger_pages_have_the_same_bits(page: int, early_ops: TritonOps, kv: str) -> None:
    assert_same_bits_of_few(Inputs(FEW["drafts and padding"], LLAMA, page, kv=kv), early_ops)
    assert_same_bits(Inputs(DECODE["drafts across a span and padding"], LLAMA, page, kv=kv), early_ops)
    if kv == "bf16":  # other formats have no kernel of Hopper for prompts
        assert_same_bits(Inputs(PROMPTS["first chunk, odd"], LLAMA, page), early_ops)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("name", ["16 rows around a span", "16 drafts at 16k"])
def test_decode_rows_without_early_launch_have_the_same_bits(name: str, late_ops: TritonOps, kv: str) -> None:
    assert_same_bits(Inputs(DECODE[name], LLAMA, kv=kv), late_ops)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("windows", DECODE.values(), ids=DECODE)
def test_decode_rows_have_the_same_bits(windows: Windows, early_ops: TritonOps, kv: str) -> None:
    inputs = Inputs(windows, LLAMA, kv=kv)
    assert_same_bits(inputs, early_ops, launches=len(inputs.q) <= 96)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("name", ["16 rows around a span", "drafts across a span and padding"])
@pytest.mark.parametrize("heads", [GROUP_OF_ONE, GROUP_OF_EIGHT, GROUP_OF_SIXTEEN], ids=["1", "8", "16"])
def test_decode_rows_of_other_heads_have_the_same_bits(
    name: str, heads: AttentionShape, early_ops: TritonOps, kv: str
) -> None:
    assert_same_bits(Inputs(DECODE[name], heads, kv=kv), early_ops)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("windows", PROMPTS.values(), ids=PROMPTS)
def test_prompts_have_the_same_bits(windows: Windows, early_ops: TritonOps, kv: str) -> None:
    """Compare the kernel of Hopper with `span_loop.py`, and that with `tall_tiles` for quantised keys."""
    inputs = Inputs(windows, LLAMA, kv=kv)
    assert_same_bits(inputs, early_ops, launches=not inputs.is_quantized)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(
    "name",
    ["16 rows at 1k", "16 rows, one at 64k", "16 drafts at 16k", "a row at 16k", "one at 64k and 7 short"],
)
def test_kernels_that_start_early_wait_for_their_inputs(name: str, early_ops: TritonOps, kv: str) -> None:
    inputs = Inputs((DECODE | FEW)[name], LLAMA, kv=kv)
    with other_kernels(inputs):
        want = inputs.layers(early_ops, 12)
    with selected(everywhere=True, even=False):
        inputs.layers(early_ops, 1)  # compile
        torch.cuda.synchronize()
        assert same_bits(inputs.layers(early_ops, 12), want)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(
    "windows", [[(65536, 1)], [(16385, 1)], [(2100, 3), (65536, 1), (16390, 4)]], ids=["64k", "16k", "drafts"]
)
def test_keys_of_this_pass_are_copied_after_the_kernel_that_stores_them(
    windows: Windows, early_ops: TritonOps, kv: str
) -> None:
    inputs = Inputs(windows, LLAMA, kv=kv)
    with other_kernels(inputs):
        want = inputs.stored_layers(early_ops, 8)
    assert not want.isnan().any()
    for _ in range(2):  # the first time compiles
        with selected(everywhere=True):
            got = inputs.stored_layers(early_ops, 8)
        torch.cuda.synchronize()
    assert same_bits(got, want)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("count", [1, 8])
def test_padding_alone_does_not_hide_the_kernels_before_it(count: int, early_ops: TritonOps, kv: str) -> None:
    """Launch rows of padding between the kernel that stores the queries and the attention of real rows."""
    inputs, padding = Inputs(FEW["a row at 16k"], LLAMA, kv=kv), Inputs([(0, 1)] * count, LLAMA, kv=kv)
    random = torch.Generator(device=CUDA).manual_seed(2)
    shape = (inputs.q.shape[1],) * 2
    weight = torch.empty(shape, dtype=BF16, device=CUDA).normal_(std=0.05, generator=random)
    packed = early_ops.forward.pack_linear(weight)
    ignored = torch.full(padding.q.shape, torch.nan, dtype=torch.float32, device=CUDA)

    def layers() -> Tensor:
        x = inputs.q
        for _ in range(12):
            x = early_ops.forward.linear(x, packed)
            early_ops.forward.attention_into(padding.q, padding.rows, LLAMA, padding.cache, ignored)
            x = early_ops.forward.attention(x, inputs.rows, LLAMA, inputs.cache)
        return x

    with other_kernels(inputs):
        want = layers()
    with selected(everywhere=True):
        layers()  # compile
        torch.cuda.synchronize()
        assert same_bits(layers(), want)
    assert ignored.isnan().all()


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("name", ["16 rows at 16k", "16 drafts at 16k", "a row at 64k", "8 rows at 16k"])
def test_a_graph_has_the_same_bits_at_other_contexts(name: str, early_ops: TritonOps, kv: str) -> None:
    """Replay a graph at the captured contexts, at uneven and at short ones: lists are made on the device."""
    inputs = Inputs((DECODE | FEW)[name], LLAMA, kv=kv)
    inputs.layers(early_ops, 1)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = inputs.layers(early_ops, 4)
    original = inputs.rows.positions.clone()
    uneven = original // torch.arange(1, len(original) + 1, device=CUDA)
    for positions in (original, uneven if "rows" in name else original, original % 300, original):
        inputs.rows.positions.copy_(positions)
        graph.replay()
        with other_kernels(inputs):
            want = inputs.layers(early_ops, 4)
        assert same_bits(got, want)


@pytest.mark.parametrize("heads", [WIDE, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("name", [name for name in FEW if "padding" not in name])
def test_span_loaded_early_has_the_bits_of_split_kv(
    name: str, heads: AttentionShape, early_ops: TritonOps
) -> None:
    """Compare layers that store the keys of their rows just before, with keys of the pass in the span."""
    inputs = Inputs(FEW[name], heads)
    with selected(everywhere=False):
        with mock.patch.object(preloaded, "MAX_SELECTED_ROWS", 0):
            want = inputs.stored_layers(early_ops, 4)
        assert not want.isnan().any()
        early_ops.forward._partials.parts.fill_(torch.nan)
        early_ops.forward._partials.stats.fill_(torch.nan)
        for _ in range(2):  # the first time compiles
            assert same_bits(inputs.stored_layers(early_ops, 4), want)
    assert not early_ops.forward._partials.counters.any()
