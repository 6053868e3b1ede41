"""Top-k of each row, ordered by value down, then id up.

Up to MAX_MEMBERS ids in k groups: a row is split into groups, and its top k lie in the k groups with the best
keys. One pass finds the best key of each group; one program per row sorts these keys, then the members of k
groups. Above it: torch's top-k of the sort keys, which are all different, so that the order is unique.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.compile_ahead import is_compiling
from draftproof.ops.triton.kernel_utils import next_power_of_two
from draftproof.ops.triton.sampling.sort_key import LOWEST_KEY, key_to_id, sort_key

GROUP = 64  # ids of one group; twice as many in a vocabulary of more than MAX_GROUPS such groups
CHUNK = 4096  # ids of one program of the first stage
MAX_GROUPS = 4096  # of a row, in the second stage: keys that one program sorts
MAX_MEMBERS = 4096  # ids of k groups, k as a power of two


@triton.jit
def group_keys(x, group, V, GROUP: tl.constexpr):
    """Return the best sort keys [groups] of x [groups, GROUP], groups numbered `group`; LOWEST_KEY beyond V.

    A key holds the first id of its group: the id within the group does not change the order of groups.
    """
    first = group * GROUP
    return tl.where(first < V, sort_key(tl.max(x, axis=1), first), LOWEST_KEY)


@triton.jit
def load_group_keys(keys, groups, BLOCK: tl.constexpr):
    """Load the group keys [BLOCK] of a row, LOWEST_KEY beyond."""
    index = tl.arange(0, BLOCK)
    return tl.load(keys + index, mask=index < groups, other=LOWEST_KEY)


@triton.jit
def top_ids(
    row_logits, keys, group_key, V, groups, K: tl.constexpr, GROUP: tl.constexpr, divisor,
    DIVIDES: tl.constexpr,
):  # fmt: skip
    """Return the top K ids of a row from its group keys, loaded in `group_key`; `keys` is overwritten.

    With DIVIDES the keys are of logits over `divisor`.

    Each of the K best groups has a member at least as good as the K-th group key, and few groups have two.
    These candidates are compacted into the memory of the keys, because sorting all members takes several
    times as long.
    """
    best = tl.topk(group_key, K)
    first = (key_to_id(best) // GROUP)[:, None] * GROUP  # a missing group lies beyond V
    members = first + tl.arange(0, GROUP)[None, :]
    x = tl.load(row_logits + members, mask=members < V, other=float("-inf"))
    if DIVIDES:
        x = tl.div_rn(x, divisor)
    key = tl.reshape(tl.where(members < V, sort_key(x, members), LOWEST_KEY), (K * GROUP,))
    candidate = (key >> 32) >= (tl.min(best, axis=0) >> 32)  # by value only: a group key holds the first id
    output_index = tl.cumsum(candidate.to(tl.int32), axis=0)
    count = tl.max(output_index, axis=0)
    MAX_CANDIDATES: tl.constexpr = 4 * K
    if count <= tl.minimum(MAX_CANDIDATES, groups):
        tl.debug_barrier()  # all threads have read the keys
        tl.store(keys + output_index - 1, key, mask=candidate)
        tl.debug_barrier()
        compact = tl.arange(0, MAX_CANDIDATES)
        found = tl.topk(tl.load(keys + compact, mask=compact < count, other=LOWEST_KEY), K)
    else:
        found, rank = best, tl.arange(0, K)
        for i in range(K):
            top = tl.max(key, axis=0)
            found = tl.where(rank == i, top, found)
            key = tl.where(key == top, LOWEST_KEY, key)
    return key_to_id(found)


@triton.jit
def group_best_kernel(logits, keys, V, groups, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Store the best sort key of each group: keys [R, groups]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    tl.store(keys + row * groups + group, group_keys(x, group, V, GROUP), mask=group < groups)


@triton.jit
def top_kernel(
    logits, keys, values, ids, V, groups, k, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Store values and ids [R, k] of the top k of each row from its group keys [R, groups]."""
    row = tl.program_id(0).to(tl.int64)
    group_key = load_group_keys(keys + row * groups, groups, BLOCK)
    token = top_ids(logits + row * V, keys + row * groups, group_key, V, groups, K, GROUP, 1.0, False)
    output_index = tl.arange(0, K)
    ok = output_index < k
    value = tl.load(logits + row * V + token, mask=ok & (token < V), other=float("-inf"))
    tl.store(values + row * k + output_index, value, mask=ok)
    tl.store(ids + row * k + output_index, token, mask=ok)


@triton.jit
def key_kernel(logits, keys, V, BLOCK: tl.constexpr):
    """Store the sort key of each logit: keys [R, V]."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    tl.store(keys + row * V + ids, sort_key(x, ids), mask=ids < V)


def group_size(vocab: int) -> int:
    """Return the ids of one group."""
    return GROUP if vocab <= GROUP * MAX_GROUPS else 2 * GROUP


def padded_k(k: int) -> int:
    """Return the number of groups that the second stage reads."""
    return max(8, next_power_of_two(k))


def is_two_stage(vocab: int, k: int) -> bool:
    """Return whether one program can sort the group keys of a row, and the members of k groups."""
    group = group_size(vocab)
    return triton.cdiv(vocab, group) <= MAX_GROUPS and padded_k(k) * group <= MAX_MEMBERS


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return values and ids [R, k] of the top k of each row."""
    rows, vocab = logits.shape
    device = logits.device
    if not is_two_stage(vocab, k):
        keys = torch.empty((rows, vocab), dtype=torch.int64, device=device)
        key_kernel[(rows, triton.cdiv(vocab, 1024))](logits, keys, vocab, BLOCK=1024, num_warps=4)
        if is_compiling():
            keys.fill_(0x7FFFFFFF)  # a valid key, of id 0
        ids = 0x7FFFFFFF - (keys.topk(k, dim=1).values & 0x7FFFFFFF)
        return logits.gather(1, ids), ids
    group, width = group_size(vocab), padded_k(k)
    groups = triton.cdiv(vocab, group)
    keys = torch.empty((rows, groups), dtype=torch.int64, device=device)
    group_best_kernel[(rows, triton.cdiv(vocab, CHUNK))](
        logits, keys, vocab, groups, CHUNK=CHUNK, GROUP=group, num_warps=8
    )
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    top_kernel[(rows,)](
        logits, keys, values, ids, vocab, groups, k,
        K=width, BLOCK=max(width, next_power_of_two(groups)), GROUP=group, num_warps=4,
    )  # fmt: skip
    return values, ids
