"""Warp-specialised attention of Hopper has the bits of the other kernels, at short and long contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention import warp_specialized, worklist
from draftproof.ops.triton.backend import TritonOps


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = pytest.mark.skipif(not has_hopper(), reason="no GPU of compute capability 9.0")
CUDA, BF16, PAGE, POOL_PAGES = torch.device("cuda"), torch.bfloat16, 16, 2048
LLAMA = AttentionShape(num_q=32, num_kv=8, dim=128, scale=128**-0.5, window=0)
GROUP_OF_EIGHT = AttentionShape(num_q=64, num_kv=8, dim=128, scale=128**-0.5, window=0)
Windows = list[tuple[int, int]]  # of each slot: its context, and rows at the end of it

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


class Inputs:
    """Queries and rows on random pages; memory that no row may read holds NaN."""

    def __init__(self, windows: Windows, heads: AttentionShape) -> None:
        self.heads = heads
        random = torch.Generator(device=CUDA).manual_seed(1)
        shape = (2, POOL_PAGES, PAGE, heads.num_kv, heads.dim)
        self.cache = torch.empty(shape, dtype=BF16, device=CUDA).normal_(generator=random)
        self.cache[:, 0] = torch.nan
        max_pages = max(-(-max(n for n, _ in windows) // PAGE), 1024)
        count = len(windows)
        table = torch.randint(1 + count, POOL_PAGES, (count, max_pages), generator=random, device=CUDA)
        slots, positions = [], []
        for slot, (context, rows) in enumerate(windows):
            used = -(-context // PAGE)
            table[slot, used:] = 0
            if context:
                table[slot, used - 1] = 1 + slot
                self.cache[:, 1 + slot, (context - 1) % PAGE + 1 :] = torch.nan
            slots += [slot if context else -1] * rows
            positions += [max(p, 0) for p in range(context - rows, context)]
        places = torch.tensor(positions, device=CUDA)
        owners = torch.tensor(slots, device=CUDA)
        self.rows = Rows(torch.zeros_like(owners), places, owners, torch.zeros_like(owners), table.int())
        shape = (len(slots), heads.num_q * heads.dim)
        self.q = torch.empty(shape, dtype=BF16, device=CUDA).normal_(generator=random)

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


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors have equal bits; -0 and 0 differ."""
    return torch.equal(got.contiguous().view(torch.int16), want.contiguous().view(torch.int16))


def assert_same_bits(inputs: Inputs, ops: TritonOps, launches: int = 1) -> None:
    with selected(everywhere=False):
        want = inputs.attention(ops)
    is_real = inputs.rows.slots >= 0
    assert not want[is_real].isnan().any()
    for even in (True, False):
        with (
            selected(everywhere=True, even=even),
            mock.patch.object(warp_specialized, "launch_tiles", wraps=warp_specialized.launch_tiles) as tiles,
        ):
            got = inputs.attention(ops)
            assert tiles.call_count == launches
        assert same_bits(got[is_real], want[is_real]), even
        assert got[~is_real].isnan().all()
    assert not ops.forward._partials.counters.any()


@pytest.fixture(scope="module")
def early_ops() -> TritonOps:
    return TritonOps(CUDA, pdl=True)


@pytest.mark.parametrize("windows", DECODE.values(), ids=DECODE)
def test_decode_rows_have_the_same_bits(windows: Windows, early_ops: TritonOps) -> None:
    inputs = Inputs(windows, LLAMA)
    assert_same_bits(inputs, early_ops, launches=len(inputs.q) <= 96)


@pytest.mark.parametrize("name", ["16 rows around a span", "drafts across a span and padding"])
def test_decode_rows_of_other_heads_have_the_same_bits(name: str, early_ops: TritonOps) -> None:
    assert_same_bits(Inputs(DECODE[name], GROUP_OF_EIGHT), early_ops)


@pytest.mark.parametrize("windows", PROMPTS.values(), ids=PROMPTS)
def test_prompts_have_the_same_bits(windows: Windows, early_ops: TritonOps) -> None:
    assert_same_bits(Inputs(windows, LLAMA), early_ops)


@pytest.mark.parametrize("name", ["16 rows at 1k", "16 rows, one at 64k", "16 drafts at 16k"])
def test_kernels_that_start_early_wait_for_their_inputs(name: str, early_ops: TritonOps) -> None:
    inputs = Inputs(DECODE[name], LLAMA)
    with selected(everywhere=False):
        want = inputs.layers(early_ops, 12)
    with selected(everywhere=True, even=False):
        inputs.layers(early_ops, 1)  # compile
        torch.cuda.synchronize()
        assert same_bits(inputs.layers(early_ops, 12), want)


@pytest.mark.parametrize("name", ["16 rows at 16k", "16 drafts at 16k"])
def test_a_graph_has_the_same_bits_at_other_contexts(name: str, early_ops: TritonOps) -> None:
    """Replay a graph at the captured contexts, at uneven and at short ones: lists are made on the device."""
    inputs = Inputs(DECODE[name], LLAMA)
    inputs.layers(early_ops, 1)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = inputs.layers(early_ops, 4)
    original = inputs.rows.positions.clone()
    uneven = original // torch.arange(1, len(original) + 1, device=CUDA)
    for positions in (original, uneven if len(original) == 16 else original, original % 300, original):
        inputs.rows.positions.copy_(positions)
        graph.replay()
        with selected(everywhere=False):
            want = inputs.layers(early_ops, 4)
        assert same_bits(got, want)
