"""The triton backend's step under Triton's interpreter; `test_ops_step` runs this file as a process.

Blocks are made small, so that small cases have several of each.
"""

from __future__ import annotations

import json
import sys
import time
import traceback

import triton_checks  # it chooses the interpreter, before the kernels are imported
from draftproof.ops.triton import draft_rounds_kernels, draft_search_kernels
from draftproof.ops.triton.gemm import lm_head_sample
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.sampling import kernels, logprobs, penalties, sample, topk
from draftproof.ops.triton.step import commit, layout, ngram
from step_cases import CHECKS, Size

for module in (kernels, sample, logprobs):
    module.CHUNK = 16
for module in (topk, logprobs):
    module.GROUP = 4
layout.BLOCK = ngram.BLOCK = draft_search_kernels.BLOCK = penalties.BLOCK = commit.PICK_BLOCK = 8
logprobs.MAX_SCAN_PROGRAMS = draft_rounds_kernels.NUM_ENTRIES = 4
draft_rounds_kernels.BLOCK = 8
lm_head_sample.TILES, lm_head_sample.JOIN = ((5, Tile(16, 16, 64, 4, 2)), (1 << 30, Tile(16, 8, 64, 4, 2))), 2
SLOW = {
    "logprobs": 3,
    "search_ngram": 5,
    "search_suffix": 3,
    "sample": 8,
    "apply_penalties": 8,
    "lm_head_sample": 6,
}  # the interpreter sorts slowly


def main(seeds: int, only: list[str]) -> None:
    """Name of a check -> what went wrong, or nothing."""
    results = {}
    for name, function in CHECKS.items():
        if only and name not in only:
            continue
        begun, results[name] = time.perf_counter(), ""
        for seed in range(min(seeds, SLOW.get(name, seeds))):
            try:
                function(triton_checks.ops, seed, Size())
            except Exception:
                results[name] = f"seed {seed}\n{traceback.format_exc()}"
                break
        print(f"{name} {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
