"""Time of the two kernels behind logprobs; the last line of stdout is JSON.

    python bench/micro/gpu/logprob_kernels.py [--rows 1 64 256 512] [--tops 0 8 32] [--named 0 8]

Microseconds of the whole op in a graph of twenty, by rows, alternatives and named ids. `picked`: the share of
the rows that is not padding.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/

import argparse
from itertools import product

import torch
from common.measure import finish

from draftproof.ops import NamedIds
from draftproof.ops.triton.backend import TritonOps

REPEATS = 20


def microseconds(ops: TritonOps, rows: int, vocab: int, picked: float, top: int, num_named: int) -> float:
    """Return the microseconds of the op."""
    draw = torch.Generator(device=ops.device).manual_seed(rows)
    logits = 3 * torch.randn((rows, vocab), generator=draw, device=ops.device)
    index = torch.arange(rows, device=ops.device)
    given = logits, torch.where(index < picked * rows, index, -1), logits.argmax(1)
    table = torch.randint(vocab, (rows, max(1, num_named)), generator=draw, device=ops.device)
    named = NamedIds(table, index, num_named) if num_named else None
    graph = ops.runtime.graph(
        lambda: [ops.sampling.logprobs(*given, top, None, named) for _ in range(REPEATS)][-1]
    )
    return 1e6 * ops.runtime.seconds(graph, times=20) / REPEATS


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--tops", type=int, nargs="+", default=[0, 8, 32])
    parser.add_argument("--named", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--vocab", type=int, default=49152)
    options = parser.parse_args()
    ops, found = TritonOps(torch.device("cuda")), []
    for rows, picked, top, num_named in product(options.rows, (1.0, 0.7), options.tops, options.named):
        us = round(microseconds(ops, rows, options.vocab, picked, top, num_named), 2)
        found.append({"rows": rows, "picked": picked, "top": top, "named": num_named, "us": us})
        print(found[-1], flush=True)
    finish("logprob_kernels", {"found": found})


if __name__ == "__main__":
    main()
