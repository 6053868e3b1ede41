"""Final norm, LM head and sampling of a token in one kernel; logits stay in registers unless they are read.

A program computes a tile of rows and columns as `linear` does, then the best sort key of each row, with
noise where the temperature of the row is not 0. The last program of a row tile combines the keys. Columns
map to token ids by a table, so that a draft head with a reduced vocabulary needs no full logits row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import STREAM_SAMPLE
from draftproof.ops.triton.fused.gemm import inverse_rms_pieces, num_pieces, piece_size, piece_start
from draftproof.ops.triton.gemm.select import Epilogue, supports_fused
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_sync
from draftproof.ops.triton.sampling.philox import approx_gumbel, philox, word_to_gumbel
from draftproof.ops.triton.sampling.sort_key import LOWEST_KEY, key_to_id, sort_key
from draftproof.types import Windows

MAX_DEPTH = 1024  # maximum K
BK = 64  # of K in one step
KEYS_PER_LOAD = 128  # of a row that one step combines
TILES = (  # by maximum rows
    (16, Tile(16, 64, BK, 4, 5)),
    (32, Tile(32, 64, BK, 4, 5)),
    (1 << 30, Tile(64, 128, BK, 8, 4)),
)


@triton.jit
def best_noisy_keys(
    x, temperature, ids, seed, position, STREAM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Return the best sort keys [BM] of fp32(x / temperature + gumbel), x [BM, BN].

    Rows with temperature 0 give LOWEST_KEY. As in `best_noisy_key`, an approximation finds the ids that can
    win, and only these get their exact noise.
    """
    is_sampled = temperature > 0
    block = tl.broadcast_to((ids // 4)[None, :], (BM, BN))
    w0, w1, w2, w3 = philox(seed[:, None], position[:, None], STREAM, block)
    word_index = (ids % 4)[None, :]
    word = tl.where(word_index < 2, tl.where(word_index == 0, w0, w1), tl.where(word_index == 2, w2, w3))
    approx = x * (1.0 / tl.where(is_sampled, temperature, 1.0))[:, None] + approx_gumbel(word)
    top = tl.max(approx, axis=1)
    threshold = top - (1e-3 + 2e-6 * tl.abs(top))
    best = tl.full((BM,), LOWEST_KEY, tl.int64)
    searching = is_sampled & (top >= threshold) & (top > float("-inf"))
    while tl.max(searching.to(tl.int32), axis=0) > 0:
        best_id = tl.min(tl.where(approx == top[:, None], ids[None, :], 2147483647), axis=1)
        chosen = ids[None, :] == best_id[:, None]
        value = tl.max(tl.where(chosen, x, float("-inf")), axis=1)
        value = tl.div_rn(value, tl.where(is_sampled, temperature, 1.0))
        bits = tl.sum(tl.where(chosen, word, 0).to(tl.uint32), axis=1).to(tl.uint32)
        best = tl.where(searching, tl.maximum(best, sort_key(value + word_to_gumbel(bits), best_id)), best)
        approx = tl.where(chosen, float("-inf"), approx)
        top = tl.max(approx, axis=1)
        searching = searching & (top >= threshold) & (top > float("-inf"))
    return best


@triton.jit(do_not_specialize=["B"])
def lm_head_sample_kernel(
    x, at, norm, w, ids, slots, positions, temperature, seeds, keys, counters, out, rows, scores,
    B, N, tiles, eps,
    K: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEYS_PER_LOAD: tl.constexpr,
    STAGES: tl.constexpr, HAS_AT: tl.constexpr, HAS_IDS: tl.constexpr, STORES_LOGITS: tl.constexpr,
    GREEDY: tl.constexpr, STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sample out [B] from x [_, K] at rows `at`, copied to `rows` [B, K]; w [N, K]; keys [B, tiles].

    With STORES_LOGITS the logits are stored to `scores` [B, N].
    """
    dtype: tl.constexpr = x.dtype.element_ty
    grid_m = tl.cdiv(B, BM)
    tile_m, tile = tl.program_id(0) % grid_m, tl.program_id(0) // grid_m
    rm, rn = tile_m * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    pdl_sync(PDL)
    row_ok, col_ok = rm < B, rn < N
    slot = tl.load(slots + rm, mask=row_ok, other=-1)
    if tl.max(slot, axis=0) < 0:  # padding only, which all programs of these rows observe
        if tile == 0:
            tl.store(out + rm, slot * 0, mask=row_ok)
        return
    row = tl.minimum(rm, B - 1).to(tl.int64)
    if HAS_AT:
        row = tl.maximum(tl.load(at + row), 0)
    xs = ()
    for i in tl.static_range(num_pieces(K, BK)):
        rk = piece_start(K, BK, i) + tl.arange(0, piece_size(K, BK, i))
        xs = xs + (tl.load(x + row[:, None] * K + rk[None, :]),)
    scale = inverse_rms_pieces(xs, eps, K, BK)[:, None]
    if HAS_AT:  # noqa: SIM102 - a constant, then a value on the device
        if tile == 0:
            for i in tl.static_range(num_pieces(K, BK)):
                rk = piece_start(K, BK, i) + tl.arange(0, piece_size(K, BK, i))
                tl.store(rows + rm.to(tl.int64)[:, None] * K + rk[None, :], xs[i], mask=row_ok[:, None])
    rk = tl.arange(0, BK)
    x_at, w_at = x + row[:, None] * K + rk[None, :], w + rn.to(tl.int64)[None, :] * K + rk[:, None]
    logits = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        b = tl.load(w_at + k, mask=col_ok[None, :], other=0.0)
        norm_weight = tl.load(norm + k + rk).to(tl.float32)
        normed = (tl.load(x_at + k).to(tl.float32) * scale).to(dtype).to(tl.float32)
        logits = tl.dot((normed * norm_weight[None, :]).to(dtype), b, logits)
    if STORES_LOGITS:
        scores_at = scores + rm.to(tl.int64)[:, None] * N + rn[None, :]
        tl.store(scores_at, logits, mask=row_ok[:, None] & col_ok[None, :])
    logits = tl.where(col_ok[None, :], logits, float("-inf"))
    token = tl.load(ids + rn, mask=col_ok, other=2147483647).to(tl.int32) if HAS_IDS else rn
    top = tl.max(logits, axis=1)
    best_id = tl.min(tl.where(logits == top[:, None], token[None, :], 2147483647), axis=1)
    best = sort_key(top, best_id)
    if not GREEDY:
        temperature = tl.load(temperature + slot, mask=slot >= 0, other=0.0)
        if tl.max(temperature, axis=0) > 0:
            seed = tl.load(seeds + slot, mask=slot >= 0, other=0)
            position = tl.load(positions + rm, mask=row_ok, other=0)
            noisy = best_noisy_keys(logits, temperature, token, seed, position, STREAM, BM, BN)
            best = tl.where(temperature > 0, noisy, best)
    tl.store(keys + rm.to(tl.int64) * tiles + tile, best, mask=row_ok)
    tl.debug_barrier()
    done = tl.atomic_add(counters + tile_m, 1, sem="acq_rel", scope="gpu")
    if done == tiles - 1:
        tl.store(counters + tile_m, 0)
        for first in range(0, tiles, KEYS_PER_LOAD):
            j = first + tl.arange(0, KEYS_PER_LOAD)
            here = keys + rm.to(tl.int64)[:, None] * tiles + j[None, :]
            inside = row_ok[:, None] & (j < tiles)[None, :]
            best = tl.maximum(best, tl.max(tl.load(here, inside, LOWEST_KEY, cache_modifier=".cg"), axis=1))
        tl.store(out + rm, tl.where(slot >= 0, key_to_id(best), 0), mask=row_ok)


class LmHeadSample:
    """Launcher of the kernel; it owns the counters."""

    def __init__(self, device: torch.device) -> None:
        self._counters = torch.zeros(1 << 10, dtype=torch.int32, device=device)

    def supports(self, x: Tensor, count: int, packed: PackedLinear) -> bool:
        """Return whether the kernel supports `count` rows of x."""
        depth = x.shape[1]
        if x.dtype != torch.bfloat16 or depth % BK or not 0 < depth <= MAX_DEPTH:
            return False
        return supports_fused(packed, count, Epilogue.SAMPLE) and 0 < count <= 16 * len(self._counters)

    def __call__(
        self, x: Tensor, at: Tensor | None, norm: Tensor, eps: float, packed: PackedLinear,
        ids: Tensor | None, windows: Windows, greedy: bool, out: Tensor, logits: Tensor | None, pdl: bool,
    ) -> Tensor:  # fmt: skip
        """Store the sampled tokens to `out` [B], and `logits` [B, N]; return the rows of x at `at`."""
        count, (num_columns, depth) = len(out), packed.weight.shape
        tile = next(tile for max_rows, tile in TILES if count <= max_rows)
        tiles = triton.cdiv(num_columns, tile.bn)
        keys = torch.empty((count, tiles), dtype=torch.int64, device=x.device)
        rows = x if at is None else torch.empty((count, depth), dtype=x.dtype, device=x.device)
        columns = windows.columns
        lm_head_sample_kernel[(triton.cdiv(count, tile.bm) * tiles,)](
            x, out if at is None else at, norm, packed.weight, out if ids is None else ids, windows.slot,
            windows.position, columns.temperature, columns.seed, keys, self._counters, out, rows,
            norm if logits is None else logits, count, num_columns, tiles, eps,
            K=depth, BK=BK, BM=tile.bm, BN=tile.bn,
            KEYS_PER_LOAD=min(KEYS_PER_LOAD, next_power_of_two(tiles)), STAGES=tile.stages,
            HAS_AT=at is not None, HAS_IDS=ids is not None, STORES_LOGITS=logits is not None, GREEDY=greedy,
            STREAM=STREAM_SAMPLE,
            **launch_options(pdl, num_warps=tile.warps, enable_fp_fusion=False),
        )  # fmt: skip
        return rows
