"""The first k of each row in the order (value down, id up).

Up to QUICK: a row is cut into groups; the first k lie in the k groups whose best keys come first. So one
pass finds the best key of each group, and one program a row sorts those, then the members of k groups.
Beyond: the library's top-k on the keys, which are all different, so that its order is ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.runtime import power_of_two
from draftproof.ops.triton.sampling.sort_key import LOWEST, id_of, key_of

QUICK = 64  # largest k of the two-stage path
GROUP = 64  # ids of one group
CHUNK = 4096  # ids of one program of the first stage
MOST = 4096  # groups that the second stage holds


@triton.jit
def best_of_groups(x, group, V, GROUP: tl.constexpr):
    """Keys [groups] of the best of x [groups, GROUP], groups numbered `group`; LOWEST beyond V.

    With the first id of the group: which of its ids has the value makes no difference to their order.
    """
    first = group * GROUP
    return tl.where(first < V, key_of(tl.max(x, axis=1), first), LOWEST)


@triton.jit
def keys_of(keys, groups, BLOCK: tl.constexpr):
    """[BLOCK] of the groups of a row, LOWEST beyond."""
    at = tl.arange(0, BLOCK)
    return tl.load(keys + at, mask=at < groups, other=LOWEST)


@triton.jit
def first_of(line, keys, held, V, groups, K: tl.constexpr, GROUP: tl.constexpr):
    """Ids [K] of the first K of a row, from the keys [groups] of its groups, `held` and then overwritten.

    Each of the K groups has a member no worse than the worst of their best, and as a rule few have two: those
    are gathered in the place of the keys, because to sort all members takes several times as long.
    """
    best = tl.topk(held, K)
    members = (id_of(best) // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # no group: beyond V
    x = tl.load(line + members, mask=members < V, other=float("-inf"))
    key = tl.reshape(tl.where(members < V, key_of(x, members), LOWEST), (K * GROUP,))
    good = (key >> 32) >= (tl.min(best, axis=0) >> 32)  # by value alone: a group's key has its first id
    place = tl.cumsum(good.to(tl.int32), axis=0)
    count = tl.max(place, axis=0)
    ROOM: tl.constexpr = 4 * K
    if count <= tl.minimum(ROOM, groups):
        tl.debug_barrier()  # everybody has read the keys
        tl.store(keys + place - 1, key, mask=good)
        tl.debug_barrier()
        few = tl.arange(0, ROOM)
        found = tl.topk(tl.load(keys + few, mask=few < count, other=LOWEST), K)
    else:
        found, turn = best, tl.arange(0, K)
        for i in range(K):
            top = tl.max(key, axis=0)
            found = tl.where(turn == i, top, found)
            key = tl.where(key == top, LOWEST, key)
    return id_of(found)


@triton.jit
def group_best_kernel(logits, keys, V, groups, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """keys [R, groups]: the best key of each group."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    tl.store(keys + row * groups + group, best_of_groups(x, group, V, GROUP), mask=group < groups)


@triton.jit
def top_kernel(
    logits, keys, values, ids, V, groups, k, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Best k of the groups whose best keys are keys [R, groups]: values, ids [R, k]."""
    row = tl.program_id(0).to(tl.int64)
    held = keys_of(keys + row * groups, groups, BLOCK)
    token = first_of(logits + row * V, keys + row * groups, held, V, groups, K, GROUP)
    place = tl.arange(0, K)
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
    width, groups = max(8, power_of_two(k)), triton.cdiv(vocab, GROUP)
    if k > QUICK or groups > MOST:
        keys = torch.empty((rows, vocab), dtype=torch.int64, device=device)
        key_kernel[(rows, triton.cdiv(vocab, 1024))](logits, keys, vocab, BLOCK=1024, num_warps=4)
        ids = 0x7FFFFFFF - (keys.topk(k, dim=1).values & 0x7FFFFFFF)
        return logits.gather(1, ids), ids
    keys = torch.empty((rows, groups), dtype=torch.int64, device=device)
    group_best_kernel[(rows, triton.cdiv(vocab, CHUNK))](
        logits, keys, vocab, groups, CHUNK=CHUNK, GROUP=GROUP, num_warps=8
    )
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    top_kernel[(rows,)](
        logits, keys, values, ids, vocab, groups, k,
        K=width, BLOCK=max(width, power_of_two(groups)), GROUP=GROUP, num_warps=4,
    )  # fmt: skip
    return values, ids
