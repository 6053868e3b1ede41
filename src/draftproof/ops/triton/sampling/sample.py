"""Sampling of the rows of a step: a pass over the logits in chunks, and a kernel that combines the chunks.

The pass reads a chunk once and finds its best sort key, with noise where the temperature of the row is not
0, and whether a value is not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import STREAM_SAMPLE
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_sync
from draftproof.ops.triton.sampling.kernels import CHUNK, best_key, best_noisy_key
from draftproof.ops.triton.sampling.sort_key import LOWEST_KEY, key_to_id
from draftproof.types import FinishStatus, Windows

NO_ALLOWED_TOKEN = tl.constexpr(int(FinishStatus.NO_ALLOWED_TOKEN))
NOT_FINITE = tl.constexpr(int(FinishStatus.NOT_FINITE))


@triton.jit
def sample_kernel(
    logits, slots, positions, temperature, seeds, keys, states, V, chunks,
    SCALED: tl.constexpr, STREAM: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the best key and a state of each chunk, [L, chunks]: 0 all -inf, 1 valid, 2 NaN or inf."""
    pdl_sync(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        row_temperature = tl.load(temperature + slot)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
        top = tl.max(x, axis=0)
        not_finite = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
        state = tl.where(not_finite > 0, 2, tl.where(top == float("-inf"), 0, 1))
        if row_temperature > 0:
            seed, position = tl.load(seeds + slot), tl.load(positions + row)
            best = best_noisy_key(
                x, row_temperature, ids, chunk, seed, position, V, not SCALED, STREAM, CHUNK
            )
        else:
            best = best_key(x, top, ids, V)
        tl.store(keys + row * chunks + chunk, best)
        tl.store(states + row * chunks + chunk, state)


@triton.jit
def combine_sample_kernel(slots, keys, states, tokens, bad, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Store tokens, bad [L] from the chunks; keys and states of padding rows are read and ignored."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_real = tl.load(slots + row) >= 0
    index = tl.arange(0, BLOCK)
    key = tl.max(tl.load(keys + row * chunks + index, mask=index < chunks, other=LOWEST_KEY), axis=0)
    state = tl.max(tl.load(states + row * chunks + index, mask=index < chunks, other=0), axis=0)
    code = tl.where(state == 1, 0, tl.where(state == 0, NO_ALLOWED_TOKEN, NOT_FINITE))
    code = tl.where(is_real, code, 0).to(tl.int64)
    tl.store(tokens + row, tl.where(is_real & (code == 0), key_to_id(key), 0))
    tl.store(bad + row, code)


def sample(logits: Tensor, windows: Windows, scaled: bool, pdl: bool) -> tuple[Tensor, Tensor]:
    """Return the sampled tokens [L] and error codes [L], 0 for a valid row."""
    rows, vocab = logits.shape
    columns, device = windows.columns, logits.device
    chunks = triton.cdiv(vocab, CHUNK)
    keys = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    states = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    tokens, bad = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    sample_kernel[(rows, chunks)](
        logits, windows.slot, windows.position, columns.temperature, columns.seed, keys, states, vocab,
        chunks, SCALED=scaled, STREAM=STREAM_SAMPLE, CHUNK=CHUNK,
        **launch_options(pdl, num_warps=8, maxnreg=64),
    )  # fmt: skip
    combine_sample_kernel[(rows,)](
        windows.slot, keys, states, tokens, bad, chunks,
        BLOCK=next_power_of_two(chunks), **launch_options(pdl, num_warps=1),
    )  # fmt: skip
    return tokens, bad
