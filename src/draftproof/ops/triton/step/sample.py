"""What plain sampling takes at each row: a pass over the logits in chunks, and a join.

The pass reads a chunk once for all three: the best key, with noise where the row's temperature is not 0, and
whether a value is not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import STREAM_SAMPLE
from draftproof.ops.triton.runtime import begin, launch_options, power_of_two
from draftproof.ops.triton.sampling.kernels import CHUNK, best_of, best_with_noise
from draftproof.ops.triton.sampling.sort_key import LOWEST, id_of
from draftproof.types import FinishStatus, Windows

FORBIDDEN, NOT_FINITE = (
    tl.constexpr(int(FinishStatus.NO_ALLOWED_TOKEN)),
    tl.constexpr(int(FinishStatus.NOT_FINITE)),
)


@triton.jit
def choose_kernel(
    logits, slots, positions, temperature, seeds, keys, states, V, chunks,
    SCALED: tl.constexpr, STREAM: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """keys, states [L, chunks]: a chunk's best key; 0 if all its values are -inf, 2 if one is no number."""
    begin(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        heat = tl.load(temperature + slot)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
        top = tl.max(x, axis=0)
        wild = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
        state = tl.where(wild > 0, 2, tl.where(top == float("-inf"), 0, 1))
        if heat > 0:
            seed, position = tl.load(seeds + slot), tl.load(positions + row)
            best = best_with_noise(x, heat, ids, chunk, seed, position, V, not SCALED, STREAM, CHUNK)
        else:
            best = best_of(x, top, ids, V)
        tl.store(keys + row * chunks + chunk, best)
        tl.store(states + row * chunks + chunk, state)


@triton.jit
def join_choice_kernel(slots, keys, states, tokens, bad, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """tokens, bad [L]; what padding rows have for keys and states is read and dropped."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    real = tl.load(slots + row) >= 0
    at = tl.arange(0, BLOCK)
    key = tl.max(tl.load(keys + row * chunks + at, mask=at < chunks, other=LOWEST), axis=0)
    state = tl.max(tl.load(states + row * chunks + at, mask=at < chunks, other=0), axis=0)
    why = tl.where(state == 1, 0, tl.where(state == 0, FORBIDDEN, NOT_FINITE))
    why = tl.where(real, why, 0).to(tl.int64)
    tl.store(tokens + row, tl.where(real & (why == 0), id_of(key), 0))
    tl.store(bad + row, why)


def sample(logits: Tensor, windows: Windows, scaled: bool, pdl: bool) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    columns, device = windows.columns, logits.device
    chunks = triton.cdiv(vocab, CHUNK)
    keys = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    states = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    tokens, bad = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    choose_kernel[(rows, chunks)](
        logits, windows.slot, windows.position, columns.temperature, columns.seed, keys, states,
        vocab, chunks,
        SCALED=scaled, STREAM=STREAM_SAMPLE, CHUNK=CHUNK, **launch_options(pdl, num_warps=8, maxnreg=64),
    )  # fmt: skip
    join_choice_kernel[(rows,)](
        windows.slot, keys, states, tokens, bad, chunks,
        BLOCK=power_of_two(chunks), **launch_options(pdl, num_warps=1),
    )  # fmt: skip
    return tokens, bad
