"""Checks that every backend must pass, as functions, so that tests can show a wrong backend failing them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import BACKENDS, AttentionShape, KVLayout, Ops, Rows, resolve
from draftproof.ops.contract.kv_layout import kv_format, split_page_bytes
from draftproof.ops.torch.kv import store_kv

CPU = torch.device("cpu")
POOL = 40  # rows in the largest call
Call = Callable[[list[int]], Tensor]  # the op on these rows of a pool -> one result row each


def importable() -> dict[str, Ops]:
    """Return every backend that this machine can load; DRAFTPROOF_TEST_BACKENDS limits them."""
    found = {}
    wanted = os.environ.get("DRAFTPROOF_TEST_BACKENDS", ",".join(BACKENDS)).split(",")
    for name in wanted:
        with contextlib.suppress(ConfigError):  # not for this machine or device
            found[name] = resolve(name, CPU)
    return found


def bits(x: Tensor) -> bytes:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def rows_that_differ(call: Call, counts: Iterable[int] = range(1, POOL + 1), turns: int = 8) -> list[str]:
    """Return rows whose bits depend on the other rows of a call.

    Each row is computed alone, in every number of rows of `counts` with random others, and in `turns`
    rotations of the full pool.
    """
    alone = torch.cat([_row_bytes(call([i])) for i in range(POOL)])  # [POOL, bytes]
    random = torch.Generator().manual_seed(5)
    batches = [torch.randperm(POOL, generator=random)[:n].tolist() for n in counts]
    batches += [[(i + turn) % POOL for i in range(POOL)] for turn in range(turns)]
    wrong = []
    for batch in batches:
        differs = (_row_bytes(call(batch)) != alone[batch]).any(1)
        wrong += [f"row {batch[place]} at place {place} of {len(batch)}" for place in differs.nonzero()]
    return wrong


def _row_bytes(x: Tensor) -> Tensor:
    """Return the bytes of each row, [rows, bytes]."""
    return x.detach().reshape(len(x), -1).contiguous().view(torch.uint8)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Check fp32 within 2e-5 and bf16 within two units in the last place of `want`, computed in fp64."""
    assert got.shape == want.shape and got.dtype == want.dtype
    exact = dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=2e-5 if exact else 2**-7, atol=2e-5 if exact else 1e-2)


def check_order(ids: list[int], row: Tensor, gap: float = 1e-4) -> None:
    """Check that `ids` are the best of `row` in order, except where values are nearer than `gap`."""
    order = row.topk(len(ids))
    for place, token in enumerate(ids):
        if token != int(order.indices[place]):
            assert abs(float(row[token] - order.values[place])) < gap
    assert len(set(ids)) == len(ids)


class Paged:
    """A KV cache with pages out of order and NaN where no row may read; `dtype` may be a quantised one."""

    def __init__(
        self, heads: AttentionShape, lengths: list[int], dtype: torch.dtype, page_size: int = 8, seed: int = 0
    ):
        random = torch.Generator().manual_seed(seed)
        self.heads, self.lengths, self.page_size = heads, lengths, page_size
        max_pages = max(-(-n // page_size) for n in lengths)
        order = 1 + torch.randperm(len(lengths) * max_pages, generator=random)
        self.page_table = order.view(len(lengths), max_pages).to(torch.int32)
        layout = KVLayout(1, heads.num_kv, heads.dim, dtype, planes=1 if heads.value_dim else 2)
        (self.cache,) = layout.allocate(len(order) + 1, page_size, CPU)
        if kv_format(dtype) is None:
            self.cache.fill_(torch.nan)
        else:
            split_page_bytes(self.cache)[1].fill_(torch.nan)
        self.pool = [(slot, p) for slot, n in enumerate(lengths) for p in range(n)]
        rows = [torch.randn((2, heads.num_kv, heads.dim), generator=random) for _ in self.pool]
        places = torch.tensor([self.place(slot, p) for slot, p in self.pool])
        keys, values = torch.stack(rows, 1)
        if heads.value_dim:
            self.cache[0, places // page_size, places % page_size] = keys.to(dtype)
            return
        stored = torch.float32 if kv_format(dtype) else dtype
        store_kv(self.cache, places, keys.to(stored), values.to(stored))

    def place(self, slot: int, position: int) -> int:
        page = int(self.page_table[slot, position // self.page_size])
        return page * self.page_size + position % self.page_size

    def rows(self, where: list[tuple[int, int]]) -> Rows:
        """Return rows for (slot, position) pairs."""
        slots = torch.tensor([s for s, _ in where], dtype=torch.int64)
        positions = torch.tensor([p for _, p in where], dtype=torch.int64)
        index = torch.tensor([self.place(s, p) for s, p in where], dtype=torch.int64)
        return Rows(torch.zeros_like(slots), positions, slots, index, self.page_table)
