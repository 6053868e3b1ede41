"""The last norm, the LM head and the choice of a token in one kernel: logits never leave the chip.

A program has a tile of rows and of the head's columns: the products as `linear` sums them, then the best key
of each row, with noise where its temperature is not 0. The last program of a row tile to be done joins their
keys. What a column is in the vocabulary is looked up, so a head of some ids alone needs no wider row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import STREAM_SAMPLE
from draftproof.ops.triton.fused.gemm import count_of, scale_of, size_of, start_of
from draftproof.ops.triton.gemm.dense import PackedLinear
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.runtime import launch_options, next_power_of_two, pdl_sync
from draftproof.ops.triton.sampling.philox import approx_gumbel, philox, word_to_gumbel
from draftproof.ops.triton.sampling.sort_key import LOWEST_KEY, key_to_id, sort_key
from draftproof.types import Windows

WIDEST = 1024  # columns of a row
PIECE = 64  # of K at a time
JOIN = 128  # keys of a row that are joined at a time
TILES = (  # by rows, at most
    (16, Tile(16, 64, PIECE, 4, 5)),
    (32, Tile(32, 64, PIECE, 4, 5)),
    (1 << 30, Tile(64, 128, PIECE, 8, 4)),
)


@triton.jit
def noisy_keys(
    x, heat, ids, seed, position, STREAM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Best keys [BM] of fp32(x / heat + gumbel), x [BM, BN]; rows with heat 0 give LOWEST.

    As `best_with_noise`: few instructions say which ids may win, and they alone have their exact noise.
    """
    hot = heat > 0
    block = tl.broadcast_to((ids // 4)[None, :], (BM, BN))
    w0, w1, w2, w3 = philox(seed[:, None], position[:, None], STREAM, block)
    which = (ids % 4)[None, :]
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    near = x * (1.0 / tl.where(hot, heat, 1.0))[:, None] + approx_gumbel(word)
    top = tl.max(near, axis=1)
    bar = top - (1e-3 + 2e-6 * tl.abs(top))
    best = tl.full((BM,), LOWEST_KEY, tl.int64)
    live = hot & (top >= bar) & (top > float("-inf"))
    while tl.max(live.to(tl.int32), axis=0) > 0:
        one = tl.min(tl.where(near == top[:, None], ids[None, :], 2147483647), axis=1)
        chosen = ids[None, :] == one[:, None]
        value = tl.max(tl.where(chosen, x, float("-inf")), axis=1)
        value = tl.div_rn(value, tl.where(hot, heat, 1.0))
        bits = tl.sum(tl.where(chosen, word, 0).to(tl.uint32), axis=1).to(tl.uint32)
        best = tl.where(live, tl.maximum(best, sort_key(value + word_to_gumbel(bits), one)), best)
        near = tl.where(chosen, float("-inf"), near)
        top = tl.max(near, axis=1)
        live = live & (top >= bar) & (top > float("-inf"))
    return best


@triton.jit(do_not_specialize=["B"])
def pick_kernel(
    x, at, norm, w, ids, slots, positions, temperature, seeds, keys, arrived, out, rows, B, N, tiles, eps,
    K: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, JOIN: tl.constexpr,
    STAGES: tl.constexpr, AT: tl.constexpr, SOME: tl.constexpr, GREEDY: tl.constexpr, STREAM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [B] of x [_, K] at rows `at`, which go to `rows` [B, K]; w [N, K]; keys [B, tiles]: scratch."""
    dtype: tl.constexpr = x.dtype.element_ty
    grid_m = tl.cdiv(B, BM)
    tile_m, tile = tl.program_id(0) % grid_m, tl.program_id(0) // grid_m
    rm, rn = tile_m * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    pdl_sync(PDL)
    ok, known = rm < B, rn < N
    slot = tl.load(slots + rm, mask=ok, other=-1)
    if tl.max(slot, axis=0) < 0:  # nobody wants a token: all programs of these rows see that
        if tile == 0:
            tl.store(out + rm, slot * 0, mask=ok)
        return
    row = tl.minimum(rm, B - 1).to(tl.int64)
    if AT:
        row = tl.maximum(tl.load(at + row), 0)
    xs = ()
    for i in tl.static_range(count_of(K, PIECE)):
        rk = start_of(K, PIECE, i) + tl.arange(0, size_of(K, PIECE, i))
        xs = xs + (tl.load(x + row[:, None] * K + rk[None, :]),)
    scale = scale_of(xs, eps, K, PIECE)[:, None]
    if AT:  # noqa: SIM102 - a constant, then a value on the device
        if tile == 0:
            for i in tl.static_range(count_of(K, PIECE)):
                rk = start_of(K, PIECE, i) + tl.arange(0, size_of(K, PIECE, i))
                tl.store(rows + rm.to(tl.int64)[:, None] * K + rk[None, :], xs[i], mask=ok[:, None])
    rk = tl.arange(0, PIECE)
    x_at, w_at = x + row[:, None] * K + rk[None, :], w + rn.to(tl.int64)[None, :] * K + rk[:, None]
    logits = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, PIECE, num_stages=STAGES):
        b = tl.load(w_at + k, mask=known[None, :], other=0.0)
        gain = tl.load(norm + k + rk).to(tl.float32)
        unit = (tl.load(x_at + k).to(tl.float32) * scale).to(dtype).to(tl.float32)
        logits = tl.dot((unit * gain[None, :]).to(dtype), b, logits)
    logits = tl.where(known[None, :], logits, float("-inf"))
    token = tl.load(ids + rn, mask=known, other=2147483647).to(tl.int32) if SOME else rn
    top = tl.max(logits, axis=1)
    one = tl.min(tl.where(logits == top[:, None], token[None, :], 2147483647), axis=1)
    best = sort_key(top, one)
    if not GREEDY:
        heat = tl.load(temperature + slot, mask=slot >= 0, other=0.0)
        if tl.max(heat, axis=0) > 0:
            seed = tl.load(seeds + slot, mask=slot >= 0, other=0)
            position = tl.load(positions + rm, mask=ok, other=0)
            noisy = noisy_keys(logits, heat, token, seed, position, STREAM, BM, BN)
            best = tl.where(heat > 0, noisy, best)
    tl.store(keys + rm.to(tl.int64) * tiles + tile, best, mask=ok)
    tl.debug_barrier()
    done = tl.atomic_add(arrived + tile_m, 1, sem="acq_rel", scope="gpu")
    if done == tiles - 1:
        tl.store(arrived + tile_m, 0)
        for first in range(0, tiles, JOIN):
            j = first + tl.arange(0, JOIN)
            here = keys + rm.to(tl.int64)[:, None] * tiles + j[None, :]
            inside = ok[:, None] & (j < tiles)[None, :]
            best = tl.maximum(best, tl.max(tl.load(here, inside, LOWEST_KEY, cache_modifier=".cg"), axis=1))
        tl.store(out + rm, tl.where(slot >= 0, key_to_id(best), 0), mask=ok)


class Pick:
    """Launches the kernel; owns its counters."""

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(1 << 10, dtype=torch.int32, device=device)

    def takes(self, x: Tensor, count: int, packed: PackedLinear) -> bool:
        """Whether this kernel does it: for `count` rows of x."""
        wide = x.shape[1]
        if x.dtype != torch.bfloat16 or wide % PIECE or not 0 < wide <= WIDEST:
            return False
        return packed.split == 1 and packed.bias is None and 0 < count <= 16 * len(self._arrived)

    def __call__(
        self, x: Tensor, at: Tensor | None, norm: Tensor, eps: float, packed: PackedLinear,
        ids: Tensor | None, windows: Windows, greedy: bool, out: Tensor, pdl: bool,
    ) -> Tensor:  # fmt: skip
        count, (columns, wide) = len(out), packed.weight.shape
        tile = next(tile for most, tile in TILES if count <= most)
        tiles = triton.cdiv(columns, tile.bn)
        keys = torch.empty((count, tiles), dtype=torch.int64, device=x.device)
        rows = x if at is None else torch.empty((count, wide), dtype=x.dtype, device=x.device)
        held = windows.columns
        pick_kernel[(triton.cdiv(count, tile.bm) * tiles,)](
            x, out if at is None else at, norm, packed.weight, out if ids is None else ids, windows.slot,
            windows.position, held.temperature, held.seed, keys, self._arrived, out, rows, count, columns,
            tiles, eps,
            K=wide, PIECE=PIECE, BM=tile.bm, BN=tile.bn, JOIN=min(JOIN, next_power_of_two(tiles)),
            STAGES=tile.stages, AT=at is not None, SOME=ids is not None, GREEDY=greedy, STREAM=STREAM_SAMPLE,
            **launch_options(pdl, num_warps=tile.warps, enable_fp_fusion=False),
        )  # fmt: skip
        return rows
