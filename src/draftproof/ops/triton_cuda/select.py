"""The first k of each row in the order (value down, id up).

Up to QUICK: each chunk sorts out its own k best keys, then one program a row sorts out the best of those.
Beyond: the library's top-k on the keys, which are all different, so that its order is ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton_cuda.order import LOWEST, id_of, key_of
from draftproof.ops.triton_cuda.runtime import power_of_two

QUICK = 64  # largest k of the two-stage path
CHUNK = 2048
MOST = 16384  # keys that the second stage holds


@triton.jit
def chunk_top_kernel(logits, keys, V, chunks, K: tl.constexpr, CHUNK: tl.constexpr):
    """keys [R, chunks, K]: the K best keys of each chunk, best first."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    best = tl.topk(tl.where(ids < V, key_of(x, ids), LOWEST), K)
    tl.store(keys + (row * chunks + chunk) * K + tl.arange(0, K), best)


@triton.jit
def join_top_kernel(logits, keys, values, ids, V, size, k, K: tl.constexpr, BLOCK: tl.constexpr):
    """Best k of keys [R, size]: values, ids [R, k]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = tl.topk(tl.load(keys + row * size + at, mask=at < size, other=LOWEST), K)
    place = tl.arange(0, K)
    token = id_of(best)
    ok = place < k
    value = tl.load(logits + row * V + token, mask=ok & (token < V), other=float("-inf"))
    tl.store(values + row * k + place, value, mask=ok)
    tl.store(ids + row * k + place, token, mask=ok)


@triton.jit
def key_kernel(logits, keys, V, BLOCK: tl.constexpr):
    """keys [R, V]."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    tl.store(keys + row * V + ids, key_of(x, ids), mask=ids < V)


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    device = logits.device
    width, chunks = max(8, power_of_two(k)), triton.cdiv(vocab, CHUNK)
    if k > QUICK or chunks * width > MOST:
        keys = torch.empty((rows, vocab), dtype=torch.int64, device=device)
        key_kernel[(rows, triton.cdiv(vocab, 1024))](logits, keys, vocab, BLOCK=1024, num_warps=4)
        ids = 0x7FFFFFFF - (keys.topk(k, dim=1).values & 0x7FFFFFFF)
        return logits.gather(1, ids), ids
    keys = torch.empty((rows, chunks * width), dtype=torch.int64, device=device)
    chunk_top_kernel[(rows, chunks)](logits, keys, vocab, chunks, K=width, CHUNK=CHUNK, num_warps=8)
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    join_top_kernel[(rows,)](
        logits, keys, values, ids, vocab, chunks * width, k,
        K=width, BLOCK=power_of_two(chunks * width), num_warps=8,
    )  # fmt: skip
    return values, ids
