"""Checks of the step ops under Triton's interpreter; `test_ops_triton` runs them in its process.

Blocks are small, so that small cases have several of each: import this module when others have run.
"""

from __future__ import annotations

import sys
from functools import partial

import triton_checks  # first: it enables the interpreter before the kernels are imported
from draftproof.ops.triton import draft_rounds, draft_search_kernels
from draftproof.ops.triton.gemm import lm_head_sample
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.sampling import kernels, logprobs, penalties, sample, topk
from draftproof.ops.triton.step import commit, layout
from step_cases import CHECKS, Size

for module in (kernels, sample, logprobs):
    module.CHUNK = 16
layout.BLOCK = draft_search_kernels.BLOCK = draft_rounds.BLOCK = penalties.BLOCK = commit.PICK_BLOCK = 8
logprobs.MAX_SCAN_PROGRAMS = draft_rounds.NUM_ENTRIES = topk.GROUP = 4
lm_head_sample.TILES = ((5, Tile(16, 16, 64, 4, 2)), (1 << 30, Tile(16, 8, 64, 4, 2)))
lm_head_sample.KEYS_PER_LOAD = 2
# Seeds of checks that are slow in the interpreter.
NUM_SEEDS = {"logprobs": 2, "search_suffix": 2, "search_ngram": 3}
DEFAULT_NUM_SEEDS = 4


def check_seeds(name: str) -> None:
    """Run one check with several seeds."""
    for seed in range(NUM_SEEDS.get(name, DEFAULT_NUM_SEEDS)):
        try:
            CHECKS[name](triton_checks.ops, seed, Size())
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


triton_checks.CHECKS[__name__] = {name: partial(check_seeds, name) for name in CHECKS}


if __name__ == "__main__":
    triton_checks.run_checks(triton_checks.CHECKS[__name__], sys.argv[1:])
